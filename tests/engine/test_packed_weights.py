"""Weights that are not plain numbers, adapters, several devices: called as they are, or refused."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM

from fastspec import Engine, SamplingParams

from ..models import random_model
from .helpers import PROMPTS, generated_greedily
from .probes import flat_model_of

NUM_TOKENS = 16
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
ARCHITECTURES = ["llama", "gemma2", "gpt_neox"]


class PackedTensor(Tensor):
    """Four bits and a scale for each row; as with torchao's, only a product may read them."""

    packed: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, weight: Tensor):
        return Tensor._make_wrapper_subclass(cls, weight.shape, dtype=weight.dtype)

    def __init__(self, weight: Tensor):
        self.scale = weight.abs().amax(1, keepdim=True) / 7
        self.packed = (weight / self.scale).round().to(torch.int8)

    def plain(self) -> Tensor:
        return self.packed * self.scale

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is linear:
            x, weight, *bias = args
            assert x.numel() > 0
            return linear(x, weight.plain(), *bias)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return args[0]
        raise NotImplementedError(f"{func} reads a packed weight")


class PackedLinear(nn.Linear):
    """A layer of its own type, as those of bitsandbytes, GPTQ, AWQ and FP8 are."""

    def __init__(self, layer: nn.Linear):
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        packed = PackedTensor(layer.weight.detach())
        self.weight = nn.Parameter(packed.packed, requires_grad=False)
        self.register_buffer("scale", packed.scale)
        self.bias = layer.bias

    def forward(self, input: Tensor) -> Tensor:
        assert input.numel() > 0
        return linear(input, self.weight * self.scale, self.bias)


class LoraLinear(nn.Module):
    """A layer and what an adapter adds to it."""

    def __init__(self, layer: nn.Linear):
        super().__init__()
        self.base_layer = layer
        self.lora_A = nn.Linear(layer.in_features, 4, bias=False)
        self.lora_B = nn.Linear(4, layer.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


def with_packed_tensors(layer: nn.Linear) -> nn.Linear:
    layer.weight = nn.Parameter(PackedTensor(layer.weight.detach()), requires_grad=False)
    return layer


CHANGES = {"tensors": with_packed_tensors, "layers": PackedLinear, "LoRA": LoraLinear}


def changed(architecture: str, change: str) -> Any:
    """Every linear layer is another one; the head too, which reads prompts for no logits."""
    model = random_model(architecture)
    layers = {name: m for name, m in model.named_modules() if type(m) is nn.Linear}
    torch.manual_seed(1)
    for name, layer in layers.items():
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, CHANGES[change](layer))
    return model.eval()


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_is_no_plain_linear_layer_is_called(architecture, change):
    model = changed(architecture, change)
    expected = [generated_greedily(model, prompt, NUM_TOKENS) for prompt in PROMPTS]
    plain = random_model(architecture)
    assert expected != [generated_greedily(plain, prompt, NUM_TOKENS) for prompt in PROMPTS]
    engine = Engine(model, plain)
    assert [output.token_ids for output in engine.generate(PROMPTS, GREEDY)] == expected
    assert flat_model_of(engine) is None
    assert 0 < engine.stats.acceptance_rate < 1


def wrapped(model, **fields):
    """A PeftModel as far as the engine looks at it."""
    config = SimpleNamespace(peft_type="LORA", **fields)
    return SimpleNamespace(active_peft_config=config, get_base_model=lambda: model)


def test_the_wrapper_of_adapters():
    model = changed("llama", "LoRA")
    expected = generated_greedily(model, PROMPTS[0], NUM_TOKENS)
    engine = Engine(wrapped(model))
    assert engine.generate([PROMPTS[0]], GREEDY)[0].token_ids == expected
    peft = wrapped(model)
    peft.active_peft_config.peft_type = "PREFIX_TUNING"
    for other in (peft, wrapped(model, alora_invocation_tokens=[1])):
        with pytest.raises(ValueError, match="target: SimpleNamespace: LoRA is the only supported"):
            Engine(other)


def test_a_model_on_several_devices(tmp_path):
    pytest.importorskip("accelerate")
    random_model("llama").save_pretrained(tmp_path / "model")
    device_map, offload = {"model": "cpu", "lm_head": "disk"}, tmp_path / "offload"
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=device_map, offload_folder=offload
    )
    for models in ((model,), (random_model("llama"), model)):
        with pytest.raises(ValueError, match="LlamaForCausalLM is on cpu and meta; models spread"):
            Engine(*models)
    with pytest.raises(ValueError, match="target: LlamaForCausalLM is on meta; models spread"):
        Engine(random_model("llama").to(torch.device("meta")))
