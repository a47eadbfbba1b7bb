"""Greedy output is Hugging Face's, token for token, whatever drafts and batches."""

from functools import cache

import pytest
import torch

from fastspec import Engine, EngineConfig, SamplingParams, SpecConfig

from ..models import perturbed, random_model
from .helpers import GREEDY, PROMPTS, hugging_face_greedy

ARCHITECTURES = (
    "llama",
    "mistral",
    "qwen3",
    "gemma2",
    "gemma3",
    "gpt_oss",
    "gpt_neox",
    "gpt2",
    "opt",
)

# How many tokens are drafted is the engine's business: one architecture takes every number, the
# others those that reach within, to the end of and over a sliding window.
NUM_DRAFT = {"often right": (1, 3, 8), "wrong": (5,), "target itself": (4,)}
SPECULATION = [
    (architecture, quality, num_draft)
    for architecture in ARCHITECTURES
    for quality in NUM_DRAFT
    for num_draft in range(1, 9)
    if (architecture == "llama" and quality == "often right") or num_draft in NUM_DRAFT[quality]
]


@pytest.fixture(params=ARCHITECTURES)
def case(request):
    return case_of(request.param)


@cache
def case_of(architecture):
    """A model and its texts; pytest would make a fixture of wider scope again and again."""
    model = random_model(architecture)
    return model, [hugging_face_greedy(model, prompt) for prompt in PROMPTS]


def test_texts_are_varied(case):
    _, expected = case
    assert max(len(set(tokens)) for tokens in expected) >= 8, "the test model repeats itself"


def test_plain_decoding(case):
    model, expected = case
    outputs = Engine(model).generate(PROMPTS, GREEDY)
    assert [output.token_ids for output in outputs] == expected


@pytest.mark.parametrize(
    ("architecture", "method"),
    [
        ("mamba2", "none"),
        *(("llama", each) for each in ("draft_model", "tree", "cascade", "mag", "suffix", "ngram")),
    ],
)
def test_defaults_of_torch_change_nothing(architecture, method):
    """Neither the default dtype nor the default device."""
    model, draft = random_model(architecture), None
    if method in ("draft_model", "tree"):
        draft = perturbed(model, 0.03)
    elif method == "cascade":
        draft = [perturbed(model, 0.03)]
    seeded = SamplingParams(seed=3, max_tokens=10, min_p=0.01, repetition_penalty=1.2, n=2)

    def written():
        engine = Engine(model, draft, spec=method)
        outputs = engine.generate(PROMPTS, GREEDY) + engine.generate(PROMPTS, seeded)
        texts = [each.token_ids for output in outputs for each in output.outputs]
        return texts, engine.stats.num_draft_tokens

    expected = written()
    for dtype in (torch.bfloat16, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            with torch.device("meta"):
                assert written() == expected
        finally:
            torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(("case", "quality", "num_draft"), SPECULATION, indirect=["case"])
def test_speculation(case, quality, num_draft):
    model, expected = case
    drafter = {
        "often right": lambda: perturbed(model, 0.03),
        "wrong": lambda: random_model("llama", seed=7),
        "target itself": lambda: model,
    }[quality]()
    engine = Engine(model, drafter, spec=SpecConfig(num_speculative_tokens=num_draft))
    outputs = engine.generate(PROMPTS, GREEDY)
    assert [output.token_ids for output in outputs] == expected
    if quality == "target itself":
        assert engine.stats.acceptance_rate == 1.0
    if quality == "wrong":
        assert engine.stats.acceptance_rate < 0.5


@pytest.mark.parametrize("block_size", [1, 3, 16, 64])
@pytest.mark.parametrize("chunk", [2, 512])
def test_block_and_chunk_sizes(block_size, chunk):
    model, expected = case_of("mistral")
    config = EngineConfig(block_size=block_size, prefill_chunk_size=chunk, max_batch_size=3)
    engine = Engine(model, perturbed(model, 0.03), config=config)
    outputs = engine.generate(PROMPTS, GREEDY)
    assert [output.token_ids for output in outputs] == expected


def test_greedy_drafts_of_sampled_and_greedy_requests():
    model, expected = case_of("llama")
    spec = SpecConfig(draft_sample_method="greedy", num_speculative_tokens=3)
    engine = Engine(model, perturbed(model, 0.03), spec=spec)
    sampled = SamplingParams(temperature=1.0, seed=3, max_tokens=40, ignore_eos=True)
    outputs = engine.generate(PROMPTS, [GREEDY, sampled, GREEDY, sampled])
    for index in (0, 2):
        assert outputs[index].token_ids == expected[index]


def test_draft_vocabulary_padded_differently():
    model, expected = case_of("llama")
    for vocab_size in (257, 300):
        drafter = random_model("llama", seed=7, vocab_size=vocab_size)
        outputs = Engine(model, drafter).generate(PROMPTS, GREEDY)
        assert [output.token_ids for output in outputs] == expected


def test_draft_model_with_fewer_positions():
    model, expected = case_of("llama")
    drafter = perturbed(model, 0.03)
    drafter.config.max_position_embeddings = 24
    outputs = Engine(model, drafter).generate(PROMPTS, GREEDY)
    assert [output.token_ids for output in outputs] == expected


def test_the_users_model_is_left_as_it_was():
    model = random_model("llama")
    before = model.config._attn_implementation
    Engine(model, perturbed(model, 0.03)).generate(PROMPTS, GREEDY)
    assert model.config._attn_implementation == before
