"""Cascades: exact whatever the drafters, k_matrix and lenience; the caches follow the drafts."""

import pytest
import torch

from fastspec import Engine, EngineConfig, SamplingParams, SpecConfig
from fastspec.drafters import MagDrafter, PromptLookupDrafter

from ..models import perturbed, random_model
from .helpers import (
    ALPHA,
    FILTERED,
    GREEDY,
    PLAIN,
    PROMPTS,
    hugging_face_greedy,
    p_value,
    small_model,
)
from .probes import assert_cached, cached_tokens, remembers_nobody, reviewers_of, running

RECIPES = [
    ([[5, 14, 10], [0, 1, 10], [0, 0, 10]], 2),
    ([[5, 8, 10], [0, 1, 10], [0, 0, 10]], 5),
    ([[13, 10], [0, 10]], 3),
    ([[5, 10], [0, 10]], 1),
]


@pytest.fixture(scope="module")
def drafts(model):
    return [perturbed(model, 0.02), perturbed(model, 0.04, seed=2), perturbed(model, 0.08, seed=3)]


@pytest.fixture(scope="module")
def expected(model):
    return [hugging_face_greedy(model, prompt) for prompt in PROMPTS]


def cascade_of(model, drafts, k_matrix, lenience=1.0, **options):
    spec = SpecConfig("cascade", k_matrix=k_matrix, lenience=lenience, **options)
    return Engine(model, drafts, spec=spec, config=EngineConfig(max_batch_size=3, block_size=4))


def random_k_matrix(size, generator):
    entries = torch.randint(0, 7, (size, size), generator=generator).triu()
    entries[0, 0] += 1
    return entries


@pytest.mark.parametrize("with_mag", [False, True])
@pytest.mark.parametrize("num_models", [1, 2, 3])
@pytest.mark.parametrize("lenience", [1, 2.5, 1000.0])
def test_greedy_output_is_that_of_plain_decoding(
    model, drafts, expected, num_models, with_mag, lenience
):
    generator = torch.Generator().manual_seed(10 * num_models + with_mag)
    k_matrix = random_k_matrix(num_models + with_mag, generator)
    engine = cascade_of(model, drafts[:num_models], k_matrix, lenience)
    outputs = engine.generate(PROMPTS, GREEDY)
    assert [output.token_ids for output in outputs] == expected
    assert engine.stats.num_accepted_tokens > 0


@pytest.mark.parametrize(("k_matrix", "lenience"), RECIPES)
def test_published_recipes(model, drafts, expected, k_matrix, lenience):
    engine = cascade_of(model, drafts[: len(k_matrix) - 1], k_matrix, lenience)
    outputs = engine.generate(PROMPTS, GREEDY)
    assert [output.token_ids for output in outputs] == expected
    written = {writer for output in outputs for writer in output.drafters}
    assert "mag" in written
    assert any(str(writer).startswith("draft_model") for writer in written)


def test_cascades_without_a_model(model, expected):
    for levels in ([PromptLookupDrafter(1, 4), MagDrafter()], [MagDrafter()]):
        k_matrix = [[3, 4], [0, 0]] if len(levels) == 2 else [[6]]
        outputs = cascade_of(model, levels, k_matrix).generate(PROMPTS, GREEDY)
        assert [output.token_ids for output in outputs] == expected
        written = {writer for output in outputs for writer in output.drafters}
        assert written <= {None, *(level.name for level in levels)}


def test_vocabularies_and_positions_of_the_drafts_differ(model, drafts, expected):
    short = perturbed(model, 0.02)
    short.config.max_position_embeddings = 30
    padded = random_model("llama", seed=7, vocab_size=300)
    fewer = random_model("llama", seed=7, vocab_size=257)
    for pair in ([drafts[0], short], [short, drafts[0]], [padded, fewer], [fewer, drafts[0]]):
        engine = cascade_of(model, pair, [[2, 3, 4], [0, 1, 2], [0, 0, 3]])
        outputs = engine.generate(PROMPTS, GREEDY)
        assert [output.token_ids for output in outputs] == expected


def test_greedy_and_sampled_requests_together(model, drafts, expected):
    params = [GREEDY, SamplingParams(temperature=1.0, seed=3, max_tokens=40, ignore_eos=True)] * 2
    for options in ({}, {"draft_sample_method": "greedy"}, {"lenience": 2.0}):
        engine = cascade_of(model, drafts[:2], [[3, 2, 4], [0, 2, 3], [0, 0, 4]], **options)
        outputs = engine.generate(PROMPTS, params)
        assert [outputs[0].token_ids, outputs[2].token_ids] == [expected[0], expected[2]]


def test_seeds_do_not_depend_on_the_batch(model, drafts):
    spec = SpecConfig("cascade", k_matrix=[[3, 2, 4], [0, 2, 3], [0, 0, 4]])
    params = [
        SamplingParams(temperature=0.9, seed=seed, max_tokens=16 + seed, ignore_eos=True)
        for seed in range(len(PROMPTS))
    ]
    together = Engine(model, drafts[:2], spec=spec).generate(PROMPTS, params)
    alone = Engine(model, drafts[:2], spec=spec)
    for prompt, one, output in zip(PROMPTS, params, together, strict=True):
        assert alone.generate([prompt], one)[0].token_ids == output.token_ids


@pytest.mark.parametrize("options", [{"num_blocks": 26}, {"prefix_caching": True}])
def test_preemption_and_shared_prefixes_change_nothing(model, drafts, options):
    spec = SpecConfig("cascade", k_matrix=[[3, 2, 4], [0, 2, 3], [0, 0, 4]])
    params = [
        SamplingParams(temperature=0.9, seed=seed, max_tokens=40, ignore_eos=True)
        for seed in range(len(PROMPTS))
    ]
    prompts = [[*PROMPTS[1], *prompt] for prompt in PROMPTS]
    expected = Engine(model, drafts[:2], spec=spec).generate(prompts, params)
    config = EngineConfig(block_size=4, **options)
    engine = Engine(model, drafts[:2], spec=spec, config=config)
    for _ in range(2):
        outputs = engine.generate(prompts, params)
        assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
    if "num_blocks" in options:
        assert sum(o.stats.num_steps for o in outputs) == sum(o.stats.num_steps for o in expected)


@torch.no_grad()
def test_caches_are_those_of_a_fresh_read(model, drafts):
    """After every step each level's pages hold what reading the committed tokens would give."""
    engine = cascade_of(model, drafts[:2], [[3, 2, 4], [0, 2, 3], [0, 0, 4]])
    for prompt in PROMPTS[:3]:
        engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    reviewers = reviewers_of(engine)
    num_checked = 0
    while engine.has_unfinished:
        engine.step()
        for request in running(engine):
            for reviewer, draft in zip(reviewers, drafts, strict=False):
                count = cached_tokens(reviewer, request)
                assert_cached(reviewer.runner, request, count, draft)
                num_checked += 1
    assert num_checked > 20
    assert all(map(remembers_nobody, reviewers))


@pytest.fixture(scope="module")
def small_models():
    model = small_model()
    return model, [perturbed(model, 0.35), perturbed(model, 0.7, seed=2)]


@pytest.mark.parametrize(
    "options",
    [
        {"k_matrix": [[2]]},
        {"k_matrix": [[2, 1], [0, 2]]},
        {"k_matrix": [[1, 2, 1], [0, 1, 1], [0, 0, 2]]},
        {"k_matrix": [[1, 2, 1], [0, 1, 1], [0, 0, 2]], "sampling": FILTERED},
        {"k_matrix": [[1, 2, 1], [0, 1, 1], [0, 0, 2]], "lenience": 2.0},
        {"k_matrix": [[1, 2, 1], [0, 1, 1], [0, 0, 2]], "rejection_sample_method": "block"},
        {"k_matrix": [[2, 1], [0, 2]], "draft_sample_method": "greedy"},
    ],
    ids=["one", "model-mag", "three", "three-filtered", "lenient", "block", "greedy"],
)
def test_sampled_output_has_the_targets_distribution(small_models, options):
    model, drafts = small_models
    options = dict(options)
    sampling = options.pop("sampling", PLAIN)
    size = len(options["k_matrix"])
    spec = SpecConfig("cascade", **options)
    assert p_value((model, drafts[: max(1, size - 1)]), sampling, spec, num_draws=3000) > ALPHA
