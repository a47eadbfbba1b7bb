"""The engine's module tree shares the user's weights and changes nothing the user can see."""

from typing import Any, cast

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaMLP

from fastspec import Engine, EngineConfig, SamplingParams
from fastspec.models.twin import use_mlp_kernels
from fastspec_kernels import available_backends

from ..models import random_model
from .helpers import hugging_face_greedy
from .probes import model_of, record_passes

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


def replaced(model):
    return {type(m).__name__ for m in model.modules() if "forward" in m.__dict__}


def test_weights_are_shared_and_the_model_untouched():
    model = random_model("llama")
    before = model.config._attn_implementation
    engine = Engine(model)
    twin = model_of(engine)
    assert twin is not model
    for ours, theirs in zip(twin.parameters(), model.parameters(), strict=True):
        assert ours is theirs
    assert replaced(model) == set()
    assert model.config._attn_implementation == before


CHANGES = {
    "assigned": lambda m: m.load_state_dict(
        {name: x + 0.1 for name, x in m.state_dict().items()}, assign=True
    ),
    "head": lambda m: setattr(m.lm_head, "weight", torch.nn.Parameter(m.lm_head.weight + 0.1)),
    "module": lambda m: m.set_output_embeddings(torch.nn.Linear(16, 263, bias=False)),
    "layers": lambda m: setattr(m.model, "layers", m.model.layers[:1]),
    "hook": lambda m: m.model.layers[0].register_forward_hook(lambda *args: None),
    "dtype": lambda m: m.to(torch.bfloat16),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_target_that_has_changed_is_refused(change):
    """Its twin would go on with what it was; requests that run already may end."""
    model = random_model("llama")
    engine = Engine(model)
    running = engine.add_request([1, 2, 3], GREEDY)
    CHANGES[change](model)
    if change != "dtype":  # whose weights are those that a running request needs
        while engine.has_unfinished:
            events = engine.step()
        assert events[-1].output.error is None
    engine.abort(running)
    message = "target: modules, parameters, hooks or adapters of the LlamaForCausalLM have been"
    for call in (engine.generate, engine.add_request, lambda ids: next(engine.stream(ids))):
        with pytest.raises(ValueError, match=message):
            call([1, 2, 3])
    with pytest.raises(ValueError, match=message):
        engine.reset_prefix_cache()


def test_a_target_whose_adapters_have_been_merged_is_refused():
    """As PEFT's layers have them, whose weights the engine shares."""
    model = random_model("llama")
    layer = model.model.layers[0]
    layer.merged_adapters, layer.active_adapters, layer.disable_adapters = [], ["default"], False
    engine = Engine(model)
    engine.generate([1, 2, 3], GREEDY)
    layer.merged_adapters.append("default")
    with pytest.raises(ValueError, match="target: modules, parameters, hooks or adapters"):
        engine.generate([1, 2, 3], GREEDY)


def test_new_values_in_place_reach_the_twin():
    model = random_model("llama")
    engine = Engine(model, config=EngineConfig(prefix_caching=True))
    before = engine.generate([1, 2, 3], GREEDY)[0].token_ids
    model(torch.tensor([[1, 2]]), output_hidden_states=True)  # transformers adds hooks for these
    assert any(module._forward_hooks for module in model.modules())
    model.load_state_dict({name: x.flip(0) for name, x in model.state_dict().items()})
    engine.reset_prefix_cache()
    (output,) = engine.generate([1, 2, 3], GREEDY)
    assert output.token_ids == tuple(hugging_face_greedy(model, [1, 2, 3], 20))
    assert output.token_ids != before


def test_variants_that_only_look_alike_keep_their_code():
    if "cpu" not in available_backends():
        return
    expected = {
        "llama": {"Linear", "LlamaRMSNorm"},
        "gemma2": {"Linear", "Gemma2DecoderLayer"},
        "gpt_oss": {"Linear", "GptOssRMSNorm"},
        "qwen3": {"Linear", "Qwen3RMSNorm"},
    }
    for architecture, names in expected.items():
        twin = model_of(Engine(random_model(architecture)))
        assert replaced(twin) == names


def test_what_has_hooks_or_its_own_forward_keeps_it():
    """Also beside modules that a kernel replaces, and inside a block that one would replace."""
    if "cpu" not in available_backends():
        return
    model, called = random_model("llama"), []
    hooked = model.get_submodule("model.layers.1.mlp.up_proj")
    hooked.register_forward_hook(lambda *args: called.append("hook"))
    patched = cast(Any, model.get_submodule("model.layers.0.self_attn.q_proj"))
    forward = patched.forward
    patched.forward = lambda x: (called.append("forward"), forward(x))[1]
    engine = Engine(model)
    called.clear()
    (output,) = engine.generate([[1, 2, 3]], GREEDY)
    assert called.count("hook") == called.count("forward") >= len(output.token_ids)
    twin = model_of(engine)
    kept = {name for name, m in twin.named_modules() if type(m).__name__ == "LlamaMLP"}
    assert "forward" not in twin.get_submodule("model.layers.1.mlp").__dict__
    assert all("forward" in twin.get_submodule(n).__dict__ for n in kept - {"model.layers.1.mlp"})


def test_large_terms_that_cancel_are_no_reason_to_keep_a_module():
    """A trial compares with the module's own error, which grows with them."""
    if "cpu" not in available_backends():
        return
    model, generator = random_model("gpt_neox"), torch.Generator().manual_seed(1)
    mlp = LlamaMLP(random_model("llama").config)
    with torch.no_grad():
        for weight in (mlp.gate_proj.weight, mlp.up_proj.weight):
            weight[:32].normal_(std=2.0, generator=generator)
            weight[32:] = weight[:32]
        weight = mlp.down_proj.weight
        weight[:, :32].normal_(generator=generator)
        weight[:, 32:] = -weight[:, :32]
        weight += 1e-5 * torch.randn(weight.shape, generator=generator)
    model.register_module("extra", mlp)
    use_mlp_kernels(model)
    assert "forward" in mlp.__dict__


def test_the_reference_backend_uses_torchs_modules():
    model = random_model("llama")
    engine = Engine(model, config=EngineConfig(backend="reference"))
    assert replaced(model_of(engine)) == set()
    expected = Engine(model).generate([[1, 2, 3]], GREEDY)
    assert engine.generate([[1, 2, 3]], GREEDY)[0].token_ids == expected[0].token_ids


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@torch.inference_mode()
def test_logits_do_not_depend_on_how_many_tokens_are_read(dtype):
    """Plain decoding and verification see the same bits, so greedy ties fall the same way."""
    if "cpu" not in available_backends():
        return
    for architecture in ("llama", "mistral", "qwen3", "gemma2"):
        model = cast(Any, random_model(architecture)).to(dtype)
        engine = Engine(model)
        passes = record_passes(engine)
        (plain,) = engine.generate([[1, 2, 3]], GREEDY)
        alone = torch.cat([logits for _, logits in passes[-20:]])
        passes.clear()
        engine.enable_spec_dec(model, n_spec_tokens=4)
        (speculative,) = engine.generate([[1, 2, 3]], GREEDY)
        together = torch.cat([logits for _, logits in passes if logits.shape[0]])
        assert plain.token_ids == speculative.token_ids
        assert torch.equal(together[:20], alone)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@torch.inference_mode()
def test_logits_do_not_depend_on_what_a_prompt_is_read_with(dtype):
    """So a seed's text does not either, in 16 bits too and in passes of many tokens."""
    if "cpu" not in available_backends():
        return
    for architecture in ("llama", "qwen3", "gemma2"):
        model = cast(Any, random_model(architecture, max_position_embeddings=512)).to(dtype)
        engine = Engine(model, config=EngineConfig(prefill_chunk_size=2048))
        passes = record_passes(engine)
        prompt, *others = [[i % 200 + 5 * n for i in range(n, n + 290)] for n in (3, 7, 11, 2)]
        engine.generate([prompt], GREEDY)
        alone = torch.cat([logits[:1] for _, logits in passes[-20:]])
        passes.clear()
        engine.generate([prompt, *others], GREEDY)
        assert sum(span.count for span in passes[0][0]) == 4 * 290
        assert torch.equal(torch.cat([logits[:1] for _, logits in passes[-20:]]), alone)


PREFIXES = {"gemma2": "Gemma2", "gpt_neox": "GPTNeoX", "llama": "Llama", "qwen3": "Qwen3"}


@pytest.mark.parametrize("architecture", PREFIXES)
def test_compiled_modules(monkeypatch, architecture):
    """One function for each class, for any number of rows; everything else stays as it was."""
    compiled, called = [], set()

    def count(function, dynamic):
        name = function.__qualname__
        compiled.append(name)
        fused = compile_(function, dynamic=dynamic, backend="eager")

        def counted(*args, **kwargs):
            called.add(name)
            return fused(*args, **kwargs)

        return counted

    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", count)
    model = random_model(architecture)
    config = EngineConfig(backend="reference", compile_modules=True)
    engine = Engine(model, config=config)
    kinds = ("Attention", "MLP", "RMSNorm") if architecture != "gpt_neox" else ("Attention",)
    names = [PREFIXES[architecture] + kind for kind in kinds]
    rotation = "apply_rotary_pos_emb"
    assert sorted(compiled) == [*(f"{name}.forward" for name in names[1:]), rotation]
    assert replaced(model_of(engine)) == {*names}
    assert replaced(model) == set()
    expected = Engine(model, config=EngineConfig(backend="reference"))
    prompts = [[1, 2, 3], [4] * 9]
    assert [o.token_ids for o in engine.generate(prompts, GREEDY)] == [
        o.token_ids for o in expected.generate(prompts, GREEDY)
    ]
    assert called == {*compiled}


def test_kernels_of_ours_are_not_compiled():
    if "cpu" not in available_backends():
        return
    models = [
        model_of(Engine(random_model("llama"), config=config))
        for config in (EngineConfig(), EngineConfig(compile_modules=True))
    ]
    assert replaced(models[1]) - replaced(models[0]) == {"LlamaAttention", "LlamaMLP"}


def test_strided_weights_keep_their_layers():
    model = random_model("llama")
    expected = hugging_face_greedy(model, [1, 2, 3], 8)
    for part in (model.lm_head, model.model.layers[0].mlp.up_proj):
        part.weight.data = part.weight.data.T.contiguous().T
        assert not part.weight.is_contiguous()
    (output,) = Engine(model).generate(
        [[1, 2, 3]], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    )
    assert output.token_ids == expected
