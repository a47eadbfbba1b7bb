"""Models from every source: run as `generate` runs them, or refused in one line that says why."""

import json
import re
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    DiffLlamaConfig,
    MiniCPM3Config,
    PhimoeConfig,
)

from fastspec import Engine, EngineConfig, SamplingParams, SpecConfig
from fastspec.models.model_kinds import check_same_kind

from ..architectures import config_of, random_decoder
from ..models import byte_tokenizer, perturbed, random_model
from .helpers import hugging_face_greedy
from .probes import model_of

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[5, 7, 40, 9], list(range(30, 51))]

_SIZES: dict[str, Any] = {
    "vocab_size": 263,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
_SIZES |= {"intermediate_size": 48, "max_position_embeddings": 96, "eos_token_id": None}
_SIZES |= {"pad_token_id": None, "bos_token_id": None}
_LATENT: dict[str, Any] = {"num_key_value_heads": 2, "q_lora_rank": 16, "kv_lora_rank": 16}
_LATENT |= {"qk_nope_head_dim": 8, "qk_rope_head_dim": 16, "v_head_dim": 12}
_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
_EXPERTS |= {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}

LATENT = {
    "deepseek_v2": lambda: DeepseekV2Config(**_SIZES, **_LATENT, **_EXPERTS, head_dim=16),
    "deepseek_v3": lambda: DeepseekV3Config(**_SIZES, **_LATENT, **_EXPERTS),
    "minicpm3": lambda: MiniCPM3Config(**_SIZES, **_LATENT, tie_word_embeddings=False),
}


def from_config(config):
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3 if "embed" in name else 1.5 * parameter.shape[-1] ** -0.5)
    return model


@pytest.fixture
def folder(tmp_path):
    random_model("llama").save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def refusal(*args, **kwargs):
    with pytest.raises(ValueError, match=r"^\w+: ") as error:
        Engine(*args, **kwargs)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("kind", LATENT)
def test_values_narrower_than_keys(kind):
    model = from_config(LATENT[kind]())
    expected = [hugging_face_greedy(model, prompt, 12) for prompt in PROMPTS]
    assert len(set(expected[1])) > 4
    engine = Engine(model, random_model("llama"), spec=SpecConfig(num_speculative_tokens=4))
    assert [output.token_ids for output in engine.generate(PROMPTS, GREEDY)] == expected


def test_attention_in_chunks():
    """Prompts and drafts that end in, at and behind the end of a chunk, several in a pass."""
    model = random_decoder(config_of("llama4_text"))
    prompts = [[*range(20, 20 + length)] for length in (16, 40)]
    expected = [hugging_face_greedy(model, prompt, 20) for prompt in prompts]
    config = EngineConfig(prefill_chunk_size=23)
    engine = Engine(model, perturbed(model, 0.1), config=config)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    assert [output.token_ids for output in engine.generate(prompts, params)] == expected
    assert 0 < engine.stats.acceptance_rate < 1
    message = refusal(model, config=EngineConfig(block_size=12))
    assert message.startswith("block_size: Llama4ForCausalLM attends in chunks of 16 tokens")
    trees = SpecConfig("tree", 3)
    message = refusal(model, random_model("llama"), spec=trees)
    assert (
        message
        == "Llama4ForCausalLM: a model that attends in chunks verifies chains, not token trees"
    )
    short = random_decoder(config_of("llama4_text", attention_chunk_size=128))
    expected = [hugging_face_greedy(short, prompts[-1], 12)]
    engine = Engine(short, random_model("llama"), spec=trees)
    assert [output.token_ids for output in engine.generate([prompts[-1]], GREEDY)] == expected


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            DiffLlamaConfig(**_SIZES, num_key_value_heads=2),
            "DiffLlamaForCausalLM: layer 0 attends 2 times in one pass",
        ),
        (
            BertConfig(**_SIZES, is_decoder=False),
            "BertSelfAttention: bidirectional attention, as in an encoder, is not supported",
        ),
        (
            PhimoeConfig(**_SIZES, num_key_value_heads=2, num_local_experts=2, sliding_window=6),
            "PhimoeForCausalLM: `generate` keeps 6 tokens of layer 0, whose attention is given no"
            " window",
        ),
    ],
)
def test_refused_architectures(config, message):
    assert refusal(from_config(config)).startswith(message)


@pytest.mark.parametrize("role", ["target", "drafter"])
def test_attention_of_the_users_own_is_refused(role):
    model, own = random_model("llama"), cast(Any, random_model("llama"))
    own.config._attn_implementation = "sharp"
    message = refusal(*((own, None) if role == "target" else (model, own)))
    assert message.startswith("LlamaForCausalLM: attends by 'sharp', which is not one of transform")
    for usual in ("eager", "sdpa", "flash_attention_2", "kernels-community/flash-attn"):
        own.config._attn_implementation = usual
        Engine(own)


@pytest.mark.parametrize("role", ["target", "drafter"])
def test_dtype_and_device_of_loaded_models(role):
    model, other = random_model("llama"), cast(Any, random_model("llama")).to(torch.bfloat16)
    models = (other, None) if role == "target" else (model, other)
    message = refusal(*models, config=EngineConfig(dtype="float32"))
    assert message.startswith(f"dtype: 'float32', but the {role}, a loaded LlamaForCausalLM, is in")
    assert "bfloat16" in message
    assert Engine(other, config=EngineConfig(dtype="bfloat16")).device.type == "cpu"
    away = cast(Any, random_model("llama")).to("meta")
    models = (away, None) if role == "target" else (model, away)
    message = refusal(*models, config=EngineConfig(device="cpu"))
    assert message.startswith(f"device: 'cpu', but the {role}, a loaded LlamaForCausalLM, is on m")
    wide = cast(Any, random_model("llama")).double()
    message = refusal(*((wide, None) if role == "target" else (model, wide)))
    assert message.startswith(f"{role}: LlamaForCausalLM is in float64; expected float32, bf")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_folder_is_loaded_in_its_own_dtype(tmp_path, dtype):
    """On every device; the draft's may be another one."""
    name = str(dtype).removeprefix("torch.")
    cast(Any, random_model("llama")).to(dtype).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    engine = Engine(tmp_path, random_model("llama"), config=EngineConfig(device="cpu"))
    assert model_of(engine).dtype == dtype
    assert engine.generate([PROMPTS[0]], GREEDY)[0].finish_reason == "length"
    for asked in {"float32", "bfloat16"} - {name}:
        config = EngineConfig(device="cpu", dtype=asked)
        assert str(model_of(Engine(tmp_path, config=config)).dtype) == f"torch.{asked}"


def test_a_drafter_on_another_device():
    target = SimpleNamespace(
        device=torch.device("cpu"), decoder_start_id=None, name="Target", ranks=None
    )
    draft = SimpleNamespace(
        device=torch.device("cuda:0"), decoder_start_id=None, name="Draft", ranks=None
    )
    with pytest.raises(ValueError, match="drafter: Draft is on cuda:0, but the target on cpu"):
        check_same_kind(cast(Any, target), cast(Any, [draft]))


def test_truncated_weights(folder):
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for kept in (0, 5, 400, len(whole) // 2):
        file.write_bytes(whole[:kept])
        assert refusal(folder).startswith("target: cannot load ")
        assert refusal(random_model("llama"), folder).startswith("drafter: cannot load ")


def test_weights_that_lack_or_do_not_fit(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))
    assert "weights are missing, such as model.layers.3" in refusal(folder)
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 99}))
    assert refusal(folder).startswith("target: cannot load ")


def test_a_broken_tokenizer_or_configuration(folder):
    (folder / "tokenizer.json").write_text('{"version": ')
    assert refusal(folder).startswith("target: cannot load the tokenizer of ")
    (folder / "config.json").write_text('{"model_type": ')
    assert refusal(folder).startswith("target: cannot load ")


@pytest.mark.parametrize("target", [42, None, byte_tokenizer(), torch.nn.Linear(2, 2)])
def test_targets_of_another_type(target):
    kind = re.escape(type(target).__name__)
    message = f"target: expected a path, a hub id or a PreTrainedModel, got {kind}"
    assert re.fullmatch(message, refusal(target))


@pytest.mark.parametrize("method", ["auto", "draft_model", "tree", "prompt_lookup"])
def test_a_tokenizer_in_the_drafters_place(method):
    message = refusal(random_model("llama"), byte_tokenizer(), spec=SpecConfig(method))
    assert message.startswith("drafter: got a tokenizer; the second argument is the drafter")
    message = refusal(random_model("llama"), 42, spec=SpecConfig(method))
    assert message.startswith("drafter: expected a path, a hub id")
    assert message.endswith("got int")


@pytest.mark.parametrize("name", ["runs/one/last", "my model", "runs/", "a--b", "x" * 97])
def test_names_that_cannot_be_hub_ids(name, monkeypatch):
    def no_network(*args, **kwargs):
        raise AssertionError("asked the hub")

    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", no_network)
    assert refusal(name) == f"target: no such folder: {name!r}"
    assert refusal(random_model("llama"), name) == f"drafter: no such folder: {name!r}"


def test_a_file_in_the_place_of_a_folder(folder):
    assert "is a file" in refusal(str(folder / "model.safetensors"))


def test_a_model_in_training_mode():
    model = random_model("llama", attention_dropout=0.5).train()
    expected = [hugging_face_greedy(model.eval(), prompt, 12) for prompt in PROMPTS]
    model.train()
    outputs = Engine(model, model).generate(PROMPTS, GREEDY)
    assert [output.token_ids for output in outputs] == expected
    assert model.training


def test_several_eos_tokens_of_the_generation_config():
    model = random_model("llama")
    text = hugging_face_greedy(model, PROMPTS[0], 12)
    model.generation_config.eos_token_id = [262, text[5]]
    (output,) = Engine(model).generate([PROMPTS[0]], SamplingParams(temperature=0, max_tokens=12))
    assert output.finish_reason == "stop"
    assert output.token_ids == text[: text.index(text[5]) + 1]


@pytest.mark.parametrize(
    "part", ["model.layers.1", "model.embed_tokens", "lm_head", "model.layers"]
)
def test_models_in_two_dtypes(part):
    model = random_model("llama")
    model.get_submodule(part).to(torch.bfloat16)
    message = refusal(model)
    assert message.startswith("LlamaForCausalLM: has weights in bfloat16 and float32, which cannot")


def test_tied_weights():
    config = random_model("llama").config
    config.tie_word_embeddings = True
    model = from_config(config)
    expected = [hugging_face_greedy(model, prompt, 12) for prompt in PROMPTS]
    engine = Engine(model, random_model("llama", seed=4))
    assert [output.token_ids for output in engine.generate(PROMPTS, GREEDY)] == expected
