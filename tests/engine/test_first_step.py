"""The pass that reads the end of a prompt also yields the first token, and verifies drafts."""

import pytest
import torch

from fastspec import Engine, EngineConfig, SamplingParams, SpecConfig
from fastspec.drafters import Proposal
from fastspec.drafters.base import NoDrafter

from ..models import perturbed, random_model
from .helpers import GREEDY, hugging_face_greedy, ids_of
from .probes import record_passes

PROMPT = [7, 8, 9, 3, 4] * 5


@pytest.fixture(scope="module")
def model():
    return random_model("llama")


def counts_of(passes):
    """How many tokens each pass read, and after how many of them there were logits."""
    return [(sum(span.count for span in spans), len(logits)) for spans, logits in passes]


def greedy_texts(model, prompts):
    return [hugging_face_greedy(model, prompt) for prompt in prompts]


class Right(NoDrafter):
    """Drafts what will follow, as a chain or a tree, and notes how much was cached before."""

    name = "right"

    def __init__(self, text, is_tree=False, reads_target=False):
        self.text, self.is_tree, self.reads_target = text, is_tree, reads_target
        self.cached = []

    def propose(self, batch):
        (request,), (wanted,) = batch.requests, batch.num_draft_tokens
        self.cached.append((request.num_cached, len(request.token_ids)))
        ids = torch.tensor([self.text[len(request.token_ids) :][:wanted]], dtype=torch.int32)
        parents = torch.arange(ids.shape[1], dtype=torch.int32)[None]
        if not self.is_tree:
            return Proposal(ids)
        return Proposal(ids, parents, sibling_rule="target_only")


def drafted(model, params, prompt=PROMPT, config=EngineConfig(), **options):  # noqa: B008
    """The output with drafts that are right, the drafter, and what the target's passes read."""
    text = [*prompt, *hugging_face_greedy(model, prompt)]
    drafter = Right(text, **options)
    engine = Engine(model, drafter, spec=SpecConfig(num_speculative_tokens=3), config=config)
    passes = record_passes(engine)
    (output,) = engine.generate([prompt], params)
    return output, drafter, counts_of(passes)


def test_a_token_costs_a_pass_the_first_one_too(model):
    engine = Engine(model)
    passes = record_passes(engine)
    (output,) = engine.generate([PROMPT], GREEDY)
    assert output.token_ids == hugging_face_greedy(model, PROMPT)
    assert counts_of(passes) == [(len(PROMPT), 1)] + [(1, 1)] * (GREEDY.max_tokens - 1)
    assert (output.stats.num_steps, output.stats.num_prompt_steps) == (GREEDY.max_tokens, 1)
    (output,) = engine.generate([PROMPT], SamplingParams(temperature=0, max_tokens=1))
    assert output.stats.seconds["prefill"] > output.stats.seconds["verify"] == 0


def test_the_first_pass_verifies_drafts(model):
    output, drafter, counts = drafted(model, GREEDY)
    assert output.token_ids == hugging_face_greedy(model, PROMPT)
    assert counts[:2] == [(len(PROMPT) + 3, 4), (4, 4)]
    assert drafter.cached[0] == (0, len(PROMPT))
    assert output.stats.num_accepted_tokens == 3 * GREEDY.max_tokens // 4
    assert (output.stats.num_steps, output.stats.num_prompt_steps) == (GREEDY.max_tokens // 4, 1)


def test_a_tree_is_verified_after_the_prompt_is_read(model):
    output, drafter, counts = drafted(model, GREEDY, is_tree=True)
    assert output.token_ids == hugging_face_greedy(model, PROMPT)
    assert counts[:3] == [(len(PROMPT) - 1, 0), (4, 4), (4, 4)]
    assert drafter.cached[0] == (0, len(PROMPT))
    assert (output.stats.num_steps, output.stats.num_prompt_steps) == (GREEDY.max_tokens // 4, 1)


@pytest.mark.parametrize("is_tree", [False, True])
def test_who_reads_the_target_drafts_after_it(model, is_tree):
    output, drafter, counts = drafted(model, GREEDY, is_tree=is_tree, reads_target=True)
    assert output.token_ids == hugging_face_greedy(model, PROMPT)
    assert counts[:2] == [(len(PROMPT), 1), (4, 4)]
    assert drafter.cached[0] == (len(PROMPT), len(PROMPT) + 1)


@pytest.mark.parametrize("reads_target", [False, True])
def test_texts_that_lost_their_blocks_are_read_like_prompts(model, reads_target):
    config = EngineConfig(block_size=4, num_blocks=14)
    spec = SpecConfig(num_speculative_tokens=3)
    engine = Engine(model, perturbed(model, 0.02), spec=spec, config=config)
    engine.drafter.reads_target, propose = reads_target, engine.drafter.propose
    lacking = []  # whether a drafted text was unread, and whether it was more than a prompt

    def noted(batch):
        for request, num in zip(batch.requests, batch.num_draft_tokens, strict=True):
            length = len(request.token_ids)
            if num:
                lacking.append(
                    (request.num_cached < length - 1, length > request.num_prompt_tokens)
                )
        return propose(batch)

    engine.drafter.propose = noted
    prompts = [PROMPT[:9], PROMPT[3:12], PROMPT[5:16]]
    outputs = engine.generate(prompts, GREEDY)
    assert [out.token_ids for out in outputs] == greedy_texts(model, prompts)
    assert engine.stats.num_preemptions > 0
    assert {is_later for is_unread, is_later in lacking if is_unread} == (
        set() if reads_target else {False, True}
    )


def test_a_single_token_is_never_read_before(model):
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=4)
    _, drafter, counts = drafted(model, params, [5], reads_target=True)
    assert (drafter.cached[0], counts[0]) == ((0, 1), (4, 4))


@pytest.mark.parametrize("reads_target", [False, True])
def test_long_prompts_end_in_the_pass_that_has_room(model, reads_target):
    config = EngineConfig(prefill_chunk_size=8)
    output, drafter, counts = drafted(model, GREEDY, config=config, reads_target=reads_target)
    assert output.token_ids == hugging_face_greedy(model, PROMPT)
    assert len(PROMPT) == 3 * 8 + 1  # so only the last token is left for the fourth pass
    assert counts[:4] == [(8, 0)] * 3 + [(4, 4)]
    assert drafter.cached[0] == (24, 25)
    assert output.stats.num_prompt_steps == 0
    output, drafter, counts = drafted(
        model, GREEDY, PROMPT[:-2], config=config, reads_target=reads_target
    )
    assert counts[:3] == [(8, 0)] * 2 + [(7, 1) if reads_target else (10, 4)]


def test_prompts_with_log_probabilities_are_read_before(model):
    params = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=1)
    output, drafter, counts = drafted(model, params)
    assert counts == [(len(PROMPT) - 1,) * 2, (4, 4)]
    assert drafter.cached == [(len(PROMPT) - 1, len(PROMPT))]
    assert len(output.prompt_logprobs) == len(PROMPT)


@pytest.mark.parametrize("reads_target", [False, True])
def test_a_seeds_text_does_not_depend_on_how_its_prompt_was_read(model, reads_target):
    """At once, in chunks, before for its log-probabilities, or for another request."""
    texts = []
    wrong = perturbed(model, 0.02)
    prompt = [*PROMPT, 1]
    fields = {"temperature": 1.0, "seed": 3, "max_tokens": 12}
    for config, changes in (
        ({}, {}),
        ({"prefill_chunk_size": 5}, {}),
        ({}, {"prompt_logprobs": 0}),
        ({"prefix_caching": True, "block_size": 5}, {}),
    ):
        engine = Engine(model, wrong, config=EngineConfig(**config))
        engine.drafter.reads_target = reads_target
        params = SamplingParams(**fields, **changes)
        texts += ids_of(engine.generate([prompt], params))
        texts += ids_of(engine.generate([prompt], params))
    assert engine.stats.num_cached_prompt_tokens == len(PROMPT)
    assert len(set(map(tuple, texts))) == 1


def test_prompts_of_one_round_share_a_pass(model):
    engine = Engine(model)
    passes = record_passes(engine)
    prompts = [PROMPT, PROMPT[:7], [5]]
    outputs = engine.generate(prompts, GREEDY)
    assert [out.token_ids for out in outputs] == greedy_texts(model, prompts)
    assert counts_of(passes)[:3] == [(len(PROMPT) + 7, 2), (1, 1), (3, 3)]


def test_a_round_reads_by_one_pass_what_does_not_all_fit(model):
    """Otherwise it would have three."""
    engine = Engine(model, config=EngineConfig(prefill_chunk_size=8))
    passes = record_passes(engine)
    prompts = [PROMPT[:5], PROMPT[3:13]]
    outputs = engine.generate(prompts, GREEDY)
    assert [out.token_ids for out in outputs] == greedy_texts(model, prompts)
    assert counts_of(passes)[:4] == [(8, 0), (1, 1), (1, 1), (6, 1)]


def test_the_end_of_a_prompt_is_read_with_the_beginning_of_the_next(model):
    engine = Engine(model, config=EngineConfig(prefill_chunk_size=8))
    passes = record_passes(engine)
    engine.add_request(PROMPT[:10], GREEDY, "first")
    engine.step()
    engine.add_request(PROMPT[3:13], GREEDY, "second")
    assert [event.request_id for event in engine.step()] == ["first"]
    assert counts_of(passes) == [(8, 0), (8, 0), (1, 1)]


def test_samples_are_admitted_in_one_round(model):
    """Those behind them do not wait for a first step of each prompt."""
    sizes = {"block_size": 4, "max_batch_size": 16, "prefill_chunk_size": 100}
    engine = Engine(model, config=EngineConfig(**sizes))
    for number in range(4):
        engine.add_request([number, *PROMPT[:11]], SamplingParams(n=4, max_tokens=4))
    engine.step()
    assert engine.metrics()["num_requests_running"] == 16


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_synthetic_acceptance_does_not_depend_on_the_cache(model, temperature):
    """It draws for greedy requests as well."""
    spec = SpecConfig("early_exit", 3, exit_layer=1, synthetic_acceptance_rate=0.7)
    config = EngineConfig(prefix_caching=True, block_size=5)
    engine = Engine(model, spec=spec, config=config)
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=12)
    first, again = (ids_of(engine.generate([[*PROMPT, 1]], params)) for _ in range(2))
    assert engine.stats.num_cached_prompt_tokens == len(PROMPT)
    assert first == again


def test_a_large_batch_counts_those_that_have_just_come(model):
    spec = SpecConfig("draft_model", 3, disable_by_batch_size=2)
    engine = Engine(model, model, spec=spec)
    propose, wanted = engine.drafter.propose, []
    engine.drafter.propose = lambda batch: wanted.append(batch.num_draft_tokens) or propose(batch)
    for number in range(4):
        engine.add_request([number, *PROMPT[:5]], GREEDY)
        engine.step()
    assert wanted == [[3], [3], [3]]  # alone, then the first one and the second
