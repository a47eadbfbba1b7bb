"""EAGLE-1 and EAGLE-2 drafts: the published forward, the same output, the exact distribution."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from fastspec import Engine, EngineConfig, SamplingParams, SpecConfig

from ..models import random_model
from .eagle1_models import published_logits, write_folder
from .eagle_checks import assert_logits, spied
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
from .probes import CountingCapture, count_preemptions, target_runner, use_graphs

SAMPLED = SamplingParams(temperature=1.0, max_tokens=9, seed=5, ignore_eos=True)
CHAIN = SpecConfig("eagle3", 3)
TREE = SpecConfig("eagle3", 3, tree_nodes=7, tree_width=2)
GREEDY_TREE = SpecConfig("eagle3", 4, tree_nodes=9, draft_sample_method="greedy")
SMALL = EngineConfig(max_batch_size=3, block_size=4, prefill_chunk_size=7)


@pytest.mark.parametrize("spec", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize(("hidden_size", "has_bias"), [(64, False), (96, True)])
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_logits_are_those_of_the_published_forward(
    tmp_path, architecture, spec, hidden_size, has_bias
):
    target = random_model(architecture, hidden_size=hidden_size)
    weights = write_folder(tmp_path, target, has_bias)
    engine = Engine(target, tmp_path, spec=spec, config=SMALL)
    assert engine.drafter.name in ("eagle", "tree")
    seen = spied(engine)
    engine.generate(PROMPTS, SAMPLED)
    assert_logits(seen, partial(published_logits, weights, target), 40)


@pytest.mark.parametrize("is_replayed", [False, True])
def test_hidden_states_survive_preemption_and_shared_prefixes(tmp_path, is_replayed):
    target = random_model("llama")
    weights = write_folder(tmp_path, target)
    config = EngineConfig(max_batch_size=3, block_size=4, num_blocks=13, prefix_caching=True)
    engine = Engine(target, tmp_path, spec=CHAIN, config=config)
    if is_replayed:
        runner = target_runner(engine)
        use_graphs(runner, CountingCapture())
        runner.graphs.keep_inputs(runner.inputs)
    seen, preempted = spied(engine), count_preemptions(engine)
    prompts = [[*range(5, 17), *last] for last in ([1], [2], [3, 4])]
    params = replace(SAMPLED, max_tokens=10)
    engine.generate(prompts, params)
    engine.generate([prompts[1]], params)
    assert_logits(seen, partial(published_logits, weights, target), 40)
    assert preempted
    assert engine.stats.num_cached_prompt_tokens > 0


def test_passes_that_run_the_modules_keep_hidden_states_too(tmp_path):
    target = random_model("llama", max_position_embeddings=256)
    weights = write_folder(tmp_path, target)
    engine = Engine(target, tmp_path, spec=CHAIN)
    seen = spied(engine)
    engine.generate([[*range(100)], [*range(7, 150)]], SAMPLED)
    assert_logits(seen, partial(published_logits, weights, target), 20)


@pytest.mark.parametrize(
    ("architecture", "spec"),
    [("llama", CHAIN), ("llama", TREE), ("qwen3", CHAIN), ("gemma3", GREEDY_TREE)],
)
def test_greedy_output_is_that_of_plain_decoding(tmp_path, architecture, spec):
    target = random_model(architecture)
    write_folder(tmp_path, target)
    expected = [hugging_face_greedy(target, prompt) for prompt in PROMPTS]
    engine = Engine(target, tmp_path, spec=spec, config=SMALL)
    assert [output.token_ids for output in engine.generate(PROMPTS, GREEDY)] == expected


@pytest.mark.parametrize(
    ("sampling", "options"),
    [(FILTERED, {}), (PLAIN, {"tree_nodes": 4, "tree_width": 2})],
    ids=["chain", "tree"],
)
def test_exact_distribution(tmp_path, sampling, options):
    target = small_model()
    write_folder(tmp_path, target)
    assert p_value((target, tmp_path), sampling, SpecConfig("eagle3", 2, **options)) > ALPHA


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_a_folder_that_is_a_llama_by_its_config_is_recognised(tmp_path, file):
    target = random_model("llama")
    weights = write_folder(tmp_path, target)
    (tmp_path / "model.safetensors").unlink()
    save = save_file if file.endswith("safetensors") else torch.save
    save(weights, tmp_path / file)
    assert Engine(target, tmp_path).drafter.name == "eagle"
    assert Engine(target, tmp_path, spec="tree").drafter.draft.name == "eagle"
    with pytest.raises(ValueError, match="an EAGLE draft needs method 'eagle3'"):
        Engine(target, tmp_path, spec="draft_model")


def test_a_llama_of_one_layer_stays_a_draft_model(tmp_path):
    target = random_model("llama")
    random_model("llama", num_hidden_layers=1).save_pretrained(tmp_path)
    assert Engine(target, tmp_path).drafter.name == "draft_model"


def test_heads_and_biases_of_its_own(tmp_path):
    """Of queries, keys and values as in drafts for Qwen2, whose config does not say so."""
    target = random_model("llama")
    weights = write_folder(tmp_path, target)
    own = {"lm_head.weight": target.get_output_embeddings().weight.detach() * 2}
    for name in ("q_proj", "k_proj", "v_proj"):
        rows = len(weights[f"layers.0.self_attn.{name}.weight"])
        own[f"layers.0.self_attn.{name}.bias"] = torch.zeros(rows)
    save_file(weights | own, tmp_path / "model.safetensors")
    engine = Engine(target, tmp_path, spec=CHAIN)
    seen = spied(engine)
    engine.generate(PROMPTS[:1], SAMPLED)
    assert_logits(seen, lambda *path: 2 * published_logits(weights, target, *path), 10)


def test_other_targets_are_refused(tmp_path):
    target = random_model("llama", hidden_size=64)
    write_folder(tmp_path, target)
    with pytest.raises(ValueError, match=r"drafter: .*hidden_size: expected 96, the target's"):
        Engine(random_model("llama", hidden_size=96), tmp_path, spec="eagle3")
    weights = load_file(tmp_path / "model.safetensors")
    del weights["layers.0.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"is no EAGLE-1 or EAGLE-2 draft: midlayer.mlp.up_proj"):
        Engine(target, tmp_path, spec="eagle3")
