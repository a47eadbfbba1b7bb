"""Chains that end once they are improbable: shorter drafts, same output, the same distribution."""

import pytest
import torch

from fastspec import Engine, EngineConfig, SamplingParams, SpecConfig

from ..models import perturbed, random_model
from .glide_models import often_right
from .helpers import ALPHA, FILTERED, GREEDY, PROMPTS, hugging_face_greedy, p_value, small_pair
from .probes import assert_caches, batch_of, drafter_of, remembers_nobody, request_of


def engine_of(method, model, threshold, **config):
    drafts = {"draft_model": lambda: perturbed(model, 0.3), "glide": lambda: often_right(model)}
    options = {"exit_layer": 1} if method == "early_exit" else {}
    spec = SpecConfig(method, 4, confidence_threshold=threshold, **options)
    draft = drafts[method]() if method in drafts else None
    return Engine(model, draft, spec=spec, config=EngineConfig(block_size=4, **config))


@pytest.mark.parametrize("method", ["draft_model", "glide", "early_exit"])
def test_greedy_output_is_that_of_plain_decoding(method):
    model = random_model("llama")
    expected = [hugging_face_greedy(model, prompt, GREEDY.max_tokens) for prompt in PROMPTS]
    numbers = {}
    for threshold in (0.0, 0.02, 1.0):
        engine = engine_of(method, model, threshold, num_blocks=34)
        outputs = engine.generate(PROMPTS, GREEDY)
        assert [output.token_ids for output in outputs] == expected
        stats = engine.stats
        numbers[threshold] = stats.num_draft_tokens / stats.num_drafts
        assert remembers_nobody(drafter_of(engine))
    assert numbers[0.0] > numbers[0.02] > numbers[1.0] == 1


def proposal_of(engine):
    requests = [request_of(prompt, f"r{index}") for index, prompt in enumerate(PROMPTS)]
    for index, request in enumerate(requests):
        request.block_table += range(12 * index, 12 * index + 12)
    with torch.inference_mode():
        return drafter_of(engine).propose(batch_of(*requests, wanted=5))


def test_the_draft_ends_with_the_token_that_makes_it_improbable():
    """Each request at its own place; what was read stays in the cache."""
    model = random_model("llama")
    draft = perturbed(model, 0.3)
    whole = proposal_of(Engine(model, draft, spec=SpecConfig("draft_model", 5))).token_ids.tolist()
    probs = []
    for prompt, ids in zip(PROMPTS, whole, strict=True):
        distributions = (
            draft(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].softmax(-1)
        )
        drafted = distributions.gather(1, torch.tensor(ids)[:, None])[:, 0]
        probs.append(drafted.cumprod(0).tolist())
    threshold = sorted(prob for row in probs for prob in row)[9] * 1.001
    engine = engine_of("draft_model", model, threshold)
    proposal = proposal_of(engine)
    stops = [
        [p < threshold for p in row].index(True) + 1 if min(row) < threshold else 5 for row in probs
    ]
    assert len(set(stops)) > 1
    assert proposal.num_tokens == stops
    expected = [ids[:stop] + [-1] * (5 - stop) for ids, stop in zip(whole, stops, strict=True)]
    assert proposal.token_ids.tolist() == expected
    assert [p["draft_model"] for p in proposal.passes] == stops

    engine = engine_of("draft_model", model, threshold)
    for prompt in PROMPTS:
        engine.add_request(prompt, GREEDY)
    for _ in range(4):
        engine.step()
        assert_caches(engine, model, draft, behind=None)


@pytest.mark.parametrize("rule", ["standard", "block", "coupled"])
def test_sampled_output_has_the_targets_distribution(rule):
    models = small_pair()
    spec = SpecConfig("draft_model", 3, confidence_threshold=0.2, rejection_sample_method=rule)
    assert p_value(models, FILTERED, spec, num_more=2) > ALPHA


def test_a_seed_gives_the_same_text_in_any_batch():
    model = random_model("llama")
    params = [
        SamplingParams(temperature=0.8, seed=seed, max_tokens=20, ignore_eos=True)
        for seed in range(len(PROMPTS))
    ]
    together = engine_of("draft_model", model, 0.03).generate(PROMPTS, params)
    alone = engine_of("draft_model", model, 0.03)
    for prompt, one, output in zip(PROMPTS, params, together, strict=True):
        assert alone.generate([prompt], one)[0].token_ids == output.token_ids


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("confidence_threshold", {"confidence_threshold": 1.2}),
        ("confidence_threshold", {"method": "mag", "confidence_threshold": 0.5}),
        ("confidence_threshold", {"method": "tree", "confidence_threshold": 0.5}),
        ("confidence_threshold", {"cape": True, "confidence_threshold": 0.5}),
        ("schedule", {"schedule": "adaptive", "confidence_threshold": 0.5}),
    ],
)
def test_wrong_options(field, options):
    with pytest.raises(ValueError, match=f"^{field}: "):
        SpecConfig(**options)
