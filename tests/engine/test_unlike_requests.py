"""Requests with drafters and K of their own share a batch, and each gets the text it gets alone."""

import pytest
import torch

from fastspec import Engine, EngineConfig, SamplingParams, SpecConfig
from fastspec.drafters import Proposal
from fastspec.drafters.base import NoDrafter

from ..models import perturbed
from .helpers import finish, hugging_face_greedy
from .probes import assert_blocks_came_back, record_passes, record_releases, running, take_error

PROMPTS = [[1, 2, 3], list(range(5, 22)), [40, 7] * 10, [99], [60, 61, 62, 63]]
DRAFTERS = {
    "lookup": SpecConfig("prompt_lookup", num_speculative_tokens=5, prompt_lookup_min=1),
    "block": SpecConfig("draft_model", 3, rejection_sample_method="block"),
    "tree": SpecConfig("tree", 3, tree_width=2, tree_nodes=6),
    "adaptive": SpecConfig("draft_model", 2, schedule="adaptive", step_costs=[3, 4, 5]),
    "ngram": SpecConfig("ngram", 2),
    "suffix": SpecConfig("suffix", 2),
    "coupled": SpecConfig(
        "prompt_lookup", 3, prompt_lookup_min=1, rejection_sample_method="coupled"
    ),
}


def params_of(seed, **fields):
    given = {"temperature": float(seed % 3 > 0), "seed": seed, "max_tokens": 16 + seed % 5}
    return SamplingParams(**{**given, "ignore_eos": True, **fields})


CHOICES = [
    {},
    *({"drafter": name} for name in DRAFTERS),
    {"drafter": "none"},
    *({"num_speculative_tokens": num} for num in range(5)),
    {"drafter": "lookup", "num_speculative_tokens": 2},
    {"drafter": "tree", "num_speculative_tokens": 1},
    {"drafter": "block", "num_speculative_tokens": 0},
    {"drafter": "coupled", "num_speculative_tokens": 0},
]
REQUESTS = [
    (PROMPTS[(index + offset) % len(PROMPTS)], params_of(index + 7 * offset, **choice))
    for index, choice in enumerate(CHOICES)
    for offset in range(2)
]


def engine_of(model, drafter, **config):
    config = EngineConfig(block_size=4, **config)
    engine = Engine(model, drafter, spec=SpecConfig(num_speculative_tokens=4), config=config)
    for name, spec in DRAFTERS.items():
        drafts = spec.method in ("draft_model", "tree")
        engine.add_drafter(name, spec, perturbed(model, 0.05) if drafts else None)
    return engine


@pytest.fixture(scope="module")
def alone(model, drafter):
    engine = engine_of(model, drafter)
    return [engine.generate([prompt], params)[0] for prompt, params in REQUESTS]


def test_k_of_a_request_is_that_of_an_engine(model, drafter):
    prompt, engine = PROMPTS[1], engine_of(model, drafter)
    for num in range(5):
        for temperature in (0.0, 1.0):
            params = params_of(3, temperature=temperature, max_tokens=30)
            mine = params_of(3, temperature=temperature, max_tokens=30, num_speculative_tokens=num)
            spec = SpecConfig(num_speculative_tokens=num) if num else SpecConfig("none")
            expected = Engine(model, drafter if num else None, spec=spec).generate([prompt], params)
            (output,) = engine.generate([prompt], mine)
            assert output.token_ids == expected[0].token_ids
            assert output.sources == expected[0].sources


@pytest.mark.parametrize("schedule", ["heuristic", "adaptive"])
def test_k_of_a_request_is_that_of_an_engine_under_a_schedule(model, schedule):
    """Whose drafts grow and shrink within it, and are not those of a longer one cut off."""
    drafter, costs = perturbed(model, 0.1), [1.0, 1.9, 1.95, 2.0, 2.05]
    pairs = []
    for num in (1, 2):
        for seed in range(8):
            params = params_of(seed, temperature=1.0, max_tokens=40)
            mine = params_of(seed, temperature=1.0, max_tokens=40, num_speculative_tokens=num)
            outputs = []
            for most, given in ((num, params), (4, mine)):
                given_costs = costs[: most + 1] if schedule == "adaptive" else None
                spec = SpecConfig(
                    num_speculative_tokens=most, schedule=schedule, step_costs=given_costs
                )
                outputs += Engine(model, drafter, spec=spec).generate([PROMPTS[1]], given)
            pairs.append([(o.token_ids, o.sources) for o in outputs])
    assert all(own == capped for own, capped in pairs)


def test_a_batch_of_all_kinds_gives_each_its_own_text(model, drafter, alone):
    for config in ({}, {"num_blocks": 40, "max_batch_size": 9}):
        engine = engine_of(model, drafter, **config)
        releases = record_releases(engine)
        outputs = engine.generate(*map(list, zip(*REQUESTS, strict=True)))
        for (_, params), output, expected in zip(REQUESTS, outputs, alone, strict=True):
            assert output.token_ids == expected.token_ids, params
            if params.temperature:  # a greedy request's tree may have another shape beside others
                assert output.sources == expected.sources, params
        assert (len(releases) > len(REQUESTS)) == bool(config), "preempted or not"
        assert_blocks_came_back(engine)


def test_aborts_harm_nobody_else(model, drafter, alone):
    engine = engine_of(model, drafter, num_blocks=60)
    ids = [engine.add_request(*request) for request in REQUESTS]
    outputs = {}
    for place, request_id in enumerate(ids):
        if place % 4 == 1:
            outputs |= {e.request_id: e.output for e in engine.step() if e.output}
            assert request_id in outputs or engine.abort(request_id).finish_reason == "abort"
    outputs |= finish(engine)
    for place, (request_id, expected) in enumerate(zip(ids, alone, strict=True)):
        if place % 4 != 1:
            assert outputs[request_id].token_ids == expected.token_ids
    assert_blocks_came_back(engine)


def test_one_pass_for_each_drafter_and_none_for_those_without_drafts(model, drafter):
    engine = engine_of(model, drafter)
    for choice in ({"drafter": "none"}, {}, {"num_speculative_tokens": 0}, {"drafter": "lookup"}):
        engine.add_request([1, 2, 3, 1, 2], params_of(0, **choice))
    engine.step()
    passes = record_passes(engine)
    engine.step()
    assert [len(spans) for spans, _ in passes] == [3, 1]
    finish(engine)
    assert not running(engine)


class Failing(NoDrafter):
    """Proposes nonsense, or raises."""

    name = "failing"

    def propose(self, batch):
        if len(batch.requests[0].token_ids) % 2:
            raise ZeroDivisionError("propose")
        return Proposal(torch.zeros((1, 1)))


def test_an_error_of_one_drafter_leaves_the_drafts_of_others(model, drafter):
    engine = engine_of(model, drafter)
    engine.add_drafter("failing", SpecConfig(num_speculative_tokens=2), Failing())
    choices = [{"drafter": "failing"}, {}, {"drafter": "none"}]
    prompts = [PROMPTS[0]] * 3
    params = [params_of(0, max_tokens=20, **choice) for choice in choices]
    with pytest.raises((ZeroDivisionError, ValueError)) as raised:
        engine.generate(prompts, params)
    failing, own, plain = raised.value.outputs
    expected = hugging_face_greedy(model, PROMPTS[0])[:20]
    assert failing.token_ids == own.token_ids == plain.token_ids == expected
    assert failing.stats.num_accepted_tokens == plain.stats.num_accepted_tokens == 0
    assert own.stats.num_accepted_tokens > 5
    assert take_error(engine) is None
    engine.remove_drafter("failing")


def test_switching_the_engines_own_drafter_leaves_the_others(model, drafter):
    engine = engine_of(model, drafter)
    engine.disable_spec_dec()
    outputs = engine.generate(
        [PROMPTS[0]] * 2, [params_of(0, num_speculative_tokens=4), params_of(0, drafter="block")]
    )
    assert outputs[0].stats.num_draft_tokens == 0 < outputs[1].stats.num_draft_tokens
    assert outputs[0].token_ids == outputs[1].token_ids


def test_what_is_refused(model, drafter):
    engine = engine_of(model, drafter)
    for fields, named in (
        ({"drafter": "unknown"}, "drafter: expected one of .*none, lookup"),
        ({"drafter": 3}, "drafter"),
        ({"num_speculative_tokens": 5}, "num_speculative_tokens: .* drafter's K, 4, got 5"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens"),
        ({"num_speculative_tokens": 4, "drafter": "tree"}, "num_speculative_tokens.* 3, got 4"),
        ({"num_speculative_tokens": 1, "drafter": "none"}, "num_speculative_tokens.* 0, got 1"),
    ):
        with pytest.raises(ValueError, match=f"^{named}"):
            engine.generate([PROMPTS[0]], params_of(0, **fields))
    with pytest.raises(ValueError, match=r"^num_speculative_tokens"):
        Engine(model).generate([PROMPTS[0]], params_of(0, num_speculative_tokens=1))
    for name in ("none", "lookup", "", None, 3):
        with pytest.raises(ValueError, match=r"^name"):
            engine.add_drafter(name, "prompt_lookup")
    for spec, named in (("none", "spec"), ("draft_model", "drafter"), ({"k": 1}, "spec")):
        with pytest.raises(ValueError, match=f"^{named}"):
            engine.add_drafter("another", spec)
    with pytest.raises(ValueError, match=r"^schedule"):
        engine.add_drafter("another", SpecConfig("tree", schedule="adaptive"), drafter)
    for name in ("another", "none", None):
        with pytest.raises(ValueError, match=r"^name: expected one of"):
            engine.remove_drafter(name)
    engine.add_request(PROMPTS[0], params_of(0, drafter="lookup"), "mine")
    with pytest.raises(ValueError, match=r"^name: 'lookup' drafts for .*'mine'"):
        engine.remove_drafter("lookup")
    finish(engine)
    engine.remove_drafter("lookup")
    with pytest.raises(ValueError, match=r"^name: .* none was"):
        Engine(model).remove_drafter("lookup")
    with pytest.raises(ValueError, match=r"^drafter"):
        engine.generate([PROMPTS[0]], params_of(0, drafter="lookup"))
