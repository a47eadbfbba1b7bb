"""Drafts by the target's first layers, on its own pages: same output, no second cache."""

import pytest
import torch
from torch.nn.utils import prune, weight_norm

from fastspec import Engine, EngineConfig, SpecConfig
from fastspec.tools.simulate import Simulator

from ..architectures import config_of, random_decoder
from ..models import VOCAB_SIZE, random_model, random_t5
from .helpers import (
    ALPHA,
    FILTERED,
    GREEDY,
    PROMPTS,
    generated_greedily,
    hugging_face_greedy,
    p_value,
    small_model,
)
from .probes import draft_model_of, flat_model_of, target_runner

SPEC = SpecConfig("early_exit", 4, exit_layer=1)


def with_quiet_layers(kind, scale, **config):
    """A target whose layers after the first add little."""
    model = random_model(kind, **config)
    with torch.no_grad():
        for layer in model.model.layers[1:]:
            layer.self_attn.o_proj.weight *= scale
            layer.mlp.down_proj.weight *= scale
    return model


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2", "gpt_neox"])
def test_greedy_output_is_that_of_plain_decoding(kind):
    model = random_model(kind)
    expected = [hugging_face_greedy(model, prompt, GREEDY.max_tokens) for prompt in PROMPTS]
    engine = Engine(model, spec=SPEC, config=EngineConfig(max_batch_size=3))
    outputs = engine.generate(PROMPTS, GREEDY)
    assert [output.token_ids for output in outputs] == expected
    assert engine.stats.num_draft_tokens > 0


@pytest.mark.parametrize("config", [{"num_blocks": 30}, {"prefix_caching": True}])
@pytest.mark.parametrize("options", [{}, {"cape": True}])
def test_every_draft_holds_where_later_layers_add_nothing(config, options):
    """So what the first layers find in the pages is right, after drafts of all kinds."""
    model = with_quiet_layers("llama", 0.0)
    spec = SpecConfig("early_exit", 4, exit_layer=1, **options)
    engine = Engine(model, spec=spec, config=EngineConfig(block_size=4, **config))
    expected = [hugging_face_greedy(model, prompt, GREEDY.max_tokens) for prompt in PROMPTS]
    for _ in range(2):
        outputs = engine.generate(PROMPTS, GREEDY)
        assert [output.token_ids for output in outputs] == expected
    assert engine.stats.acceptance_rate == 1.0
    assert {writer for output in outputs for writer in output.drafters} == {None, "early_exit"}


def test_some_drafts_hold_after_others_were_rejected():
    model = with_quiet_layers("llama", 0.35)
    engine = Engine(model, spec=SPEC)
    expected = [hugging_face_greedy(model, prompt, GREEDY.max_tokens) for prompt in PROMPTS]
    assert [output.token_ids for output in engine.generate(PROMPTS, GREEDY)] == expected
    assert 0.05 < engine.stats.acceptance_rate < 0.95


def test_the_pages_are_the_targets_and_the_pass_is_flat():
    model = random_model("llama")
    engine = Engine(model, spec=SPEC)
    draft, target = draft_model_of(engine).runner, target_runner(engine)
    assert draft.caches is target.caches
    assert (draft.paged_model.flat is None) == (flat_model_of(engine) is None)
    assert len(draft.paged_model.cache_shapes) == 1
    assert len(model.model.layers) == model.config.num_hidden_layers == 3


@pytest.mark.parametrize("options", [{}, {"cape": True}, {"rejection_sample_method": "coupled"}])
def test_sampled_output_has_the_targets_distribution(options):
    model = small_model()
    spec = SpecConfig("early_exit", 2, exit_layer=1, **options)
    assert p_value((model, None), FILTERED, spec) > ALPHA


@pytest.mark.parametrize(
    ("model", "spec", "named"),
    [
        ("llama", {"exit_layer": 3}, "exit_layer: expected an int from 1 to 2 for LlamaFor"),
        (
            "mamba2",
            {"exit_layer": 1},
            "method: 'early_exit' needs a plain decoder, but Mamba2ForCausalLM is recurrent",
        ),
        ("t5", {"exit_layer": 1}, "method: .*plain decoder, but T5For.* is an encoder-decoder"),
    ],
)
def test_what_it_cannot_do_is_refused(model, spec, named):
    target = random_t5() if model == "t5" else random_model(model)
    with pytest.raises(ValueError, match=f"^{named}"):
        Engine(target, spec=SpecConfig("early_exit", **spec))


def test_wrong_options():
    with pytest.raises(ValueError, match=r"^exit_layer: method 'early_exit' needs one$"):
        SpecConfig("early_exit")
    with pytest.raises(ValueError, match=r"^exit_layer: not for method"):
        SpecConfig("draft_model", exit_layer=2)
    with pytest.raises(ValueError, match=r"^drafter: method 'early_exit' does not take one"):
        Engine(random_model(), random_model(), spec=SPEC)
    with pytest.raises(ValueError, match=r"^method: 'early_exit' reads the target's layers"):
        Simulator("tiny", None, VOCAB_SIZE, spec=SPEC)


@pytest.mark.parametrize("exit_layer", [1, 3])
@pytest.mark.parametrize("name", ["gemma3n_text", "gemma4_text"])
def test_layers_with_inputs_or_keys_of_their_own(name, exit_layer):
    """Gemma 3n's last layers share keys and values; both models feed each layer other inputs."""
    model = random_decoder(config_of(name))
    engine = Engine(model, spec=SpecConfig("early_exit", 2, exit_layer=exit_layer))
    [output] = engine.generate([PROMPTS[1]], GREEDY)
    assert output.token_ids == generated_greedily(model, PROMPTS[1])


def pruned(model):
    for layer in model.model.layers:
        prune.l1_unstructured(layer.mlp.up_proj, "weight", amount=0.3)


def normed(model):
    for layer in model.model.layers:
        weight_norm(layer.mlp.up_proj)


@pytest.mark.parametrize("change", [pruned, normed])
@pytest.mark.parametrize(
    "spec", [SpecConfig("none"), SpecConfig("early_exit", 2, exit_layer=2), SpecConfig("quantized")]
)
def test_weights_that_modules_compute_before_a_pass(change, spec):
    model = random_model("llama")
    change(model)
    [output] = Engine(model, spec=spec).generate([PROMPTS[1]], GREEDY)
    assert output.token_ids == generated_greedily(model, PROMPTS[1])
