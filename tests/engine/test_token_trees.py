"""Engines that verify token trees: equal output, paths that end, a cache in order."""

import pytest
import torch

from fastspec import Engine, EngineConfig, SamplingParams, SpecConfig

from ..models import EOS_ID, byte_tokenizer, perturbed, random_model
from .probes import (
    assert_blocks_came_back,
    assert_caches,
    draft_model_of,
    remembers_nobody,
    running,
)
from .test_greedy import GREEDY, PROMPTS, hugging_face_greedy

PATHS = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 1], [0, 1, 0], [0, 0, 0, 0]]
TREES = {
    "tree": {"method": "tree"},
    "narrow": {"method": "tree", "tree_width": 2, "tree_nodes": 7, "num_speculative_tokens": 4},
    "chain": {"method": "tree", "tree_width": 1, "tree_nodes": 5},
    "greedy": {"method": "tree", "draft_sample_method": "greedy"},
    "paths": {"method": "tree", "tree_paths": PATHS},
    "paths of likeliest": {
        "method": "tree",
        "tree_paths": PATHS,
        "draft_sample_method": "greedy",
    },
    "with a copied branch": {
        "method": "tree",
        "tree_prompt_lookup": True,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 3,
        "draft_sample_method": "greedy",
    },
    "cape": {"cape": True},
    "narrow cape": {"cape": True, "cape_bins": [(0.5, 2), (1.0, 0)], "num_speculative_tokens": 3},
}


@pytest.fixture(scope="module")
def model():
    return random_model("llama")


@pytest.mark.parametrize(("name", "noise"), [("tree", 0), ("cape", 0), *((t, 0.03) for t in TREES)])
def test_greedy_output_is_that_of_plain_decoding(model, name, noise):
    config = EngineConfig(block_size=5)
    spec = SpecConfig(**TREES[name])
    engine = Engine(model, perturbed(model, noise), spec=spec, config=config)
    outputs = engine.generate(PROMPTS, GREEDY)
    assert [out.token_ids for out in outputs] == [hugging_face_greedy(model, p) for p in PROMPTS]
    if noise == 0:  # a tree holds the target's own choice as far as it goes
        assert not any("recovered" in out.sources for out in outputs)
    sampled = SamplingParams(temperature=1.0, seed=3, max_tokens=40, ignore_eos=True)
    mixed = engine.generate(PROMPTS, [GREEDY, sampled, GREEDY, sampled])
    assert [mixed[i].token_ids for i in (0, 2)] == [outputs[i].token_ids for i in (0, 2)]


@pytest.mark.parametrize("architecture", ["mistral", "gemma2", "gpt_oss", "gpt2"])
@pytest.mark.parametrize("name", ["tree", "cape"])
def test_architectures(architecture, name):
    model = random_model(architecture)
    engine = Engine(model, perturbed(model, 0.03), spec=SpecConfig(**TREES[name]))
    outputs = engine.generate(PROMPTS, GREEDY)
    assert [out.token_ids for out in outputs] == [hugging_face_greedy(model, p) for p in PROMPTS]


@pytest.mark.parametrize("block_size", [1, 3, 64])
def test_trees_cross_the_borders_of_blocks(model, block_size):
    config = EngineConfig(block_size=block_size, prefill_chunk_size=7, max_batch_size=3)
    spec = SpecConfig(method="tree", tree_nodes=30, tree_width=6)
    engine = Engine(model, perturbed(model, 0.03), spec=spec, config=config)
    outputs = engine.generate(PROMPTS, GREEDY)
    assert [out.token_ids for out in outputs] == [hugging_face_greedy(model, p) for p in PROMPTS]


@pytest.mark.parametrize("name", ["tree", "cape", "paths", "with a copied branch"])
def test_a_model_at_its_last_positions(name):
    model = random_model("gpt2", max_position_embeddings=48)
    drafter = perturbed(model, 0.03)
    drafter.config.max_position_embeddings = 24
    engine = Engine(model, drafter, spec=SpecConfig(**TREES[name]))
    plain = Engine(model)
    params = SamplingParams(temperature=0, ignore_eos=True)
    outputs, expected = engine.generate(PROMPTS, params), plain.generate(PROMPTS, params)
    assert [out.token_ids for out in outputs] == [out.token_ids for out in expected]
    assert {out.finish_reason for out in outputs} == {"length"}
    sampled = engine.generate(PROMPTS, SamplingParams(seed=5, ignore_eos=True))
    assert {(out.finish_reason, out.error) for out in sampled} == {("length", None)}


@pytest.mark.parametrize("name", ["tree", "cape", "paths", "with a copied branch"])
def test_the_last_token_does_not_depend_on_the_batch(model, name):
    """Nothing is proposed before it: a batch of it alone has no trees."""
    engine = Engine(model, perturbed(model, 0.1), spec=SpecConfig(**TREES[name]))
    params = [SamplingParams(seed=seed, max_tokens=1, ignore_eos=True) for seed in range(8)]
    mate = SamplingParams(seed=99, max_tokens=30, ignore_eos=True)
    together = engine.generate([PROMPTS[0]] * 8 + [PROMPTS[1]], [*params, mate])
    alone = [engine.generate([PROMPTS[0]], p)[0] for p in params]
    assert all(out.sources == ("target",) for out in alone)
    assert [out.token_ids for out in alone] == [out.token_ids for out in together[:8]]


def test_a_tight_cache_preempts_and_shares_prefixes(model):
    prompts = [[7, 8, 9, 10, 11, 12, 13, 14, 15, last] for last in (1, 2, 3, 1)]
    expected = [out.token_ids for out in Engine(model).generate(prompts, GREEDY)]
    spec = SpecConfig(**TREES["tree"])
    for prefix_caching in (False, True):
        config = EngineConfig(num_blocks=18, block_size=4, prefix_caching=prefix_caching)
        engine = Engine(model, perturbed(model, 0.03), spec=spec, config=config)
        for _ in range(2):
            outputs = engine.generate(prompts, GREEDY)
            assert [out.token_ids for out in outputs] == expected
        assert_blocks_came_back(engine)


@pytest.mark.parametrize(
    ("name", "noise", "temperature"),
    [
        ("tree", 0, 0),
        ("tree", 0.08, 0),
        ("tree", 0.08, 0.4),
        ("cape", 0.08, 0),
        ("cape", 0.08, 0.4),
    ],
)
def test_caches_equal_a_fresh_prefill(model, name, noise, temperature):
    drafter = perturbed(model, noise)
    config = EngineConfig(block_size=4)
    spec = SpecConfig(num_speculative_tokens=3, **TREES[name])
    engine = Engine(model, drafter, spec=spec, config=config)
    for index, prompt in enumerate(PROMPTS):
        params = {"temperature": temperature, "seed": index, "max_tokens": 24, "ignore_eos": True}
        engine.add_request(prompt, SamplingParams(**params))
    accepted_lens = set()
    while engine.has_unfinished:
        engine.step()
        assert_caches(engine, model, drafter, behind=None)
        for request in running(engine):
            accepted_lens |= {i for i, n in enumerate(request.stats.acceptance_histogram) if n}
    assert accepted_lens >= ({3} if noise == 0 else {0, 1, 2, 3})
    assert remembers_nobody(draft_model_of(engine))


def engine_of(model, drafter, name="tree", **config):
    return Engine(
        model,
        drafter,
        tokenizer=byte_tokenizer(),
        spec=SpecConfig(**TREES[name]),
        config=EngineConfig(**config),
    )


@pytest.mark.parametrize("name", ["tree", "cape"])
def test_stop_ids_and_lengths_cut_a_path(model, name):
    plain = Engine(model).generate(PROMPTS, GREEDY)
    engine = engine_of(model, model, name)
    for max_tokens in range(1, 9):
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        for output, full in zip(engine.generate(PROMPTS, params), plain, strict=True):
            assert output.token_ids == full.token_ids[:max_tokens]
            assert output.finish_reason == "length"
            assert output.stats.num_output_tokens == len(output.sources) == max_tokens
    for full in plain:
        for place in (5, 6, 7):
            stop = full.token_ids[place]
            params = SamplingParams(temperature=0, max_tokens=30, stop_token_ids=[stop])
            (output,) = engine.generate([list(full.prompt_token_ids)], params)
            assert output.token_ids == full.token_ids[: full.token_ids.index(stop) + 1]
            assert output.finish_reason == "stop"


@pytest.mark.parametrize("name", ["chain", "cape"])
def test_passes_of_the_draft_model_are_counted(model, name):
    spec = SpecConfig(num_speculative_tokens=3, **TREES[name])
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    outputs = Engine(model, model, spec=spec).generate(PROMPTS, params)
    assert all(out.stats.num_draft_passes == {"draft_model": 2 * 3} for out in outputs)


def test_eos_and_stop_strings_end_a_path():
    model = random_model("llama", seed=2, vocab_size=95)
    (full,) = engine_of(model, model).generate([PROMPTS[0]], GREEDY)
    stop = full.text[6:8]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop=stop)
    (output,) = engine_of(model, model).generate([PROMPTS[0]], params)
    assert output.text == full.text[: full.text.index(stop)]
    assert output.token_ids == full.token_ids[: len(output.token_ids)]
    model.generation_config.eos_token_id = full.token_ids[7]
    try:
        (output,) = engine_of(model, model).generate([PROMPTS[0]], SamplingParams(temperature=0))
    finally:
        model.generation_config.eos_token_id = EOS_ID
    assert output.token_ids == full.token_ids[: full.token_ids.index(full.token_ids[7]) + 1]


def test_logits_that_are_not_finite_fail_one_request_alone():
    model = random_model("llama")
    (healthy,) = Engine(model).generate([PROMPTS[0]], GREEDY)
    with torch.no_grad():
        model.get_input_embeddings().weight[200] = float("nan")
    outputs = engine_of(model, perturbed(model, 0)).generate([PROMPTS[0], [5, 200, 6]], GREEDY)
    assert outputs[0].token_ids == healthy.token_ids
    assert outputs[1].finish_reason == "error"
