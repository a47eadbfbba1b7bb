"""Passes without modules: for models proven to compute just that, and no others."""

from typing import Any, cast

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, SmolLM3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from fastspec import Engine, EngineConfig, SamplingParams
from fastspec.models.rotary import RotaryTable
from fastspec_kernels import available_backends

from ..architectures import config_of, random_decoder
from ..models import random_model
from .helpers import PROMPTS, generated_greedily, hugging_face_greedy
from .probes import flat_model_of, model_of, record_passes

pytestmark = pytest.mark.skipif("cpu" not in available_backends(), reason="needs the CPU kernels")

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def is_flat(model, **config):
    return flat_model_of(Engine(model, config=EngineConfig(**config))) is not None


def layers_of(engine):
    """Names of the layers that run as one op inside a model that is not flat as a whole."""
    layers = cast(Any, model_of(engine)).model.layers
    return [index for index, layer in enumerate(layers) if "forward" in layer.__dict__]


def part(model, name) -> Any:
    return model.get_submodule(name)


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen3"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_models_of_the_llama_kind(architecture, dtype):
    assert is_flat(cast(Any, random_model(architecture)).to(dtype))


@pytest.mark.parametrize("architecture", ["gemma2", "gemma3"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layers_of_models_with_more_around_them(architecture, dtype):
    engine = Engine(cast(Any, random_model(architecture)).to(dtype))
    assert flat_model_of(engine) is None
    assert layers_of(engine) == [0, 1, 2]


@pytest.mark.parametrize("architecture", ["gpt_oss", "gpt_neox", "gpt2", "opt"])
def test_other_architectures_keep_their_modules(architecture):
    assert not is_flat(random_model(architecture))


def test_biases_and_tied_weights():
    model = random_model("llama", attention_bias=True, tie_word_embeddings=True)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    assert is_flat(model)
    (output,) = Engine(model).generate([PROMPTS[0]], GREEDY)
    assert output.token_ids == hugging_face_greedy(model, PROMPTS[0], 20)


def test_kept_rotations_are_those_of_the_module():
    rotary = LlamaRotaryEmbedding(cast(Any, random_model("llama")).config)
    table = RotaryTable(rotary)
    for places in ([3], [0, 70, 5], [40_000, 2], [69]):
        positions = torch.tensor(places)
        expected = rotary(torch.zeros(()), positions[None])
        for got, factor in zip(table.factors(positions), expected, strict=True):
            torch.testing.assert_close(got, factor[0], rtol=0, atol=0)


@pytest.mark.parametrize("rope_type", ["linear", "dynamic", "yarn", "llama3"])
def test_scaled_rotations(rope_type):
    parameters = {"rope_type": rope_type, "rope_theta": 10000.0, "factor": 4.0}
    parameters |= {"original_max_position_embeddings": 32, "low_freq_factor": 1.0}
    parameters |= {"high_freq_factor": 4.0}
    model = random_model("llama", rope_parameters=parameters)
    assert is_flat(model)
    (output,) = Engine(model).generate([PROMPTS[1]], GREEDY)
    assert output.token_ids == hugging_face_greedy(model, PROMPTS[1], 20)


def test_layers_without_rotation():
    torch.manual_seed(2)
    sizes: dict[str, Any] = {"vocab_size": 263, "hidden_size": 32, "intermediate_size": 48}
    sizes |= {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"max_position_embeddings": 96, "no_rope_layers": [1, 0, 1, 0]}
    sizes |= dict.fromkeys(("eos_token_id", "bos_token_id", "pad_token_id"))
    model = AutoModelForCausalLM.from_config(
        SmolLM3Config(**sizes, initializer_range=0.3), attn_implementation="eager"
    ).eval()
    assert is_flat(model)
    (output,) = Engine(model).generate([PROMPTS[1]], GREEDY)
    assert output.token_ids == hugging_face_greedy(model, PROMPTS[1], 20)


class ScaledLinear(nn.Linear):
    """A subclass that computes something else."""

    def forward(self, x):
        return 2 * super().forward(x)


def change_formula(model):
    """A layer that does not compute what its parts' names say."""
    layer = part(model, "model.layers.1")
    kind = type(layer)

    class Doubled(kind):
        def forward(self, hidden_states, *args, **kwargs):
            return 2 * super().forward(hidden_states, *args, **kwargs)

    layer.__class__ = Doubled


class NearlySilu(nn.Module):
    """Differs by little, as one form of GELU does from the other."""

    def forward(self, x):
        return nn.functional.silu(1.001 * x)


def change_slightly(model):
    for layer in part(model, "model.layers"):
        layer.mlp.act_fn = NearlySilu()


def change_far_positions(model):
    """Scales what is far from the beginning of the text, and nothing else."""
    layer = part(model, "model.layers.1")
    kind = type(layer)

    class Scaled(kind):
        def forward(self, hidden_states, *args, position_ids, **kwargs):
            out = super().forward(hidden_states, *args, position_ids=position_ids, **kwargs)
            return out * torch.where(position_ids > 300, 2.0, 1.0)[..., None].to(out.dtype)

    layer.__class__ = Scaled


def change_subclass(model):
    old = part(model, "model.layers.1.mlp.up_proj")
    new = ScaledLinear(old.in_features, old.out_features, bias=False)
    new.weight = old.weight
    part(model, "model.layers.1.mlp").up_proj = new


CHANGES = {
    "hook on a layer": lambda m: part(m, "model.layers.1").register_forward_hook(
        lambda module, args, out: 2 * out
    ),
    "hook in a layer": lambda m: part(m, "model.layers.1.mlp.up_proj").register_forward_pre_hook(
        lambda module, args: (2 * args[0],)
    ),
    "hook on the model": lambda m: part(m, "model").register_forward_hook(lambda *args: None),
    "hook on the embedding": lambda m: part(m, "model.embed_tokens").register_forward_hook(
        lambda module, args, out: 2 * out
    ),
    "own forward": lambda m: setattr(
        part(m, "model.layers.1.mlp.up_proj"), "forward", lambda x: x.new_ones(*x.shape[:-1], 64)
    ),
    "subclass": change_subclass,
    "formula": change_formula,
    "far positions": change_far_positions,
    "activation": change_slightly,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_changed_models_keep_what_was_changed(change, dtype):
    model = cast(Any, random_model("llama")).to(dtype)
    CHANGES[change](model)
    engine = Engine(model)
    if change != "hook on the embedding":  # of the hidden rows that the hook gives
        assert flat_model_of(engine) is None
    if dtype == torch.float32:
        (output,) = engine.generate([PROMPTS[0]], GREEDY)
        assert output.token_ids == generated_greedily(model, PROMPTS[0], 20)


def test_large_activations_stay_within_the_modules_own_error():
    """Layers whose results are of the order 1e4, as those of trained models are."""
    model = random_model("llama")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "down_proj" in name or "up_proj" in name:
                parameter.mul_(100.0)
    assert is_flat(model)


def test_weights_are_read_when_they_are_used():
    model = random_model("llama")
    engine = Engine(model)
    (before,) = engine.generate([PROMPTS[0]], GREEDY)
    model.load_state_dict(random_model("llama", seed=3).state_dict())
    (after,) = Engine(model).generate([PROMPTS[0]], GREEDY)
    assert engine.generate([PROMPTS[0]], GREEDY)[0].token_ids == after.token_ids
    assert after.token_ids != before.token_ids


@pytest.mark.parametrize("model_type", ["smollm3", "gemma2", "vaultgemma"])
def test_layers_that_add_nothing_prove_nothing(model_type):
    """Values written to their weights later show whether they rotate, and their activation."""
    model = random_decoder(config_of(model_type))
    expected = generated_greedily(model, PROMPTS[0], 20)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.zero_()
    engine = Engine(model)
    model.load_state_dict(state)
    assert engine.generate([PROMPTS[0]], GREEDY)[0].token_ids == expected


def test_nearer_to_float32_than_the_modules():
    """Between layers nothing is rounded to 16 bits."""
    model, reference = cast(Any, random_model("llama")).to(torch.bfloat16), random_model("llama")
    reference.load_state_dict(model.state_dict())
    ids = torch.tensor([PROMPTS[1][:20]])
    with torch.no_grad():
        truth = reference(ids).logits[0]
        theirs = model(ids).logits[0].float()
    engine = Engine(model)
    passes = record_passes(engine)
    engine.generate([PROMPTS[1][:20]], SamplingParams(temperature=0, max_tokens=1))
    ours = passes[-1][1][-1].float()
    assert (ours - truth[-1]).norm() < 1.5 * (theirs[-1] - truth[-1]).norm()


def test_a_block_that_clamps_large_values_keeps_its_modules():
    """No trial can show that a clamp is absent, so the block's forward must name nothing else."""
    model = random_model("llama")
    block = type(model.model.layers[0].mlp)

    class Clamping(block):
        def forward(self, x):
            up = self.up_proj(x).clamp(-1e3, 1e3)
            return self.down_proj(self.act_fn(self.gate_proj(x)) * up)

    assert is_flat(model)
    for layer in model.model.layers:
        layer.mlp.__class__ = Clamping
    engine = Engine(model)
    assert flat_model_of(engine) is None
    assert not layers_of(engine)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.up_proj.weight *= 1e4
            layer.mlp.down_proj.weight *= 1e-3
    (output,) = engine.generate([PROMPTS[1]], GREEDY)
    assert output.token_ids == hugging_face_greedy(model, PROMPTS[1], 20)
