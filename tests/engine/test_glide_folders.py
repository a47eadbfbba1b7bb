"""GLIDE folders with the published names, and models that do not fit."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from fastspec import Engine, EngineConfig, SpecConfig
from fastspec.drafters.glide import GlideLlamaConfig, load_glide

from ..models import EOS_ID, VOCAB_SIZE, byte_tokenizer, random_model
from .glide_models import random_glide
from .test_greedy import GREEDY, PROMPTS

GLIDE = SpecConfig(method="glide")

PUBLISHED = {
    "architectures": ["GlideLlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 1,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "bos_token_id": EOS_ID,
    "eos_token_id": EOS_ID,
    "large_hidden_size": 64,
    "large_num_attention_heads": 4,
}
LAYER = "model.layers.0."
NAMES = {
    "model.embed_tokens.weight",
    "model.norm.weight",
    "lm_head.weight",
    f"{LAYER}input_layernorm.weight",
    f"{LAYER}post_attention_layernorm.weight",
    *(f"{LAYER}self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"{LAYER}cross_attn.{name}_proj.weight" for name in "qo"),
    *(f"{LAYER}mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
}


def test_published_folder_loads_and_round_trips(tmp_path):
    target = random_model("llama", num_key_value_heads=4)
    draft = random_glide(target)
    published, saved = tmp_path / "published", tmp_path / "saved"
    published.mkdir()
    weights = {name: tensor.contiguous() for name, tensor in draft.state_dict().items()}
    assert set(weights) == NAMES
    save_file(weights, published / "model.safetensors", metadata={"format": "pt"})
    (published / "config.json").write_text(json.dumps(PUBLISHED))
    loaded = load_glide(published, EngineConfig())
    assert loaded.config.large_head_dim == 16
    assert loaded.config.large_num_key_value_heads == 4
    loaded.save_pretrained(saved)
    again = load_file(saved / "model.safetensors")
    assert set(again) == NAMES
    for name, tensor in weights.items():
        assert torch.equal(again[name], tensor)
    outputs = [
        Engine(target, model, spec=GLIDE).generate(PROMPTS, GREEDY)
        for model in (draft, loaded, load_glide(saved, EngineConfig()))
    ]
    runs = [
        [(output.token_ids, output.stats.num_accepted_tokens) for output in part]
        for part in outputs
    ]
    assert runs[0] == runs[1] == runs[2]


def test_a_folder_that_lacks_weights_is_refused_whatever_the_method(tmp_path):
    target = random_model("llama")
    draft = random_glide(target)
    draft.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights[f"{LAYER}cross_attn.q_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for method in ("auto", "glide", "tree"):
        with pytest.raises(ValueError, match="it lacks 1 weights"):
            Engine(target, tmp_path, spec=SpecConfig(method), tokenizer=byte_tokenizer())


def test_models_that_do_not_fit_are_refused(tmp_path):
    target = random_model("llama")
    with pytest.raises(ValueError, match="drafter: GLIDE needs a GLIDE model, got Llama"):
        Engine(target, random_model("llama"), spec=GLIDE)
    with pytest.raises(ValueError, match="drafter: method 'glide' needs a draft model"):
        Engine(target, spec=GLIDE)
    random_glide(target).save_pretrained(tmp_path / "glide")
    byte_tokenizer().save_pretrained(tmp_path / "glide")
    for draft in (random_glide(target), tmp_path / "glide"):
        with pytest.raises(ValueError, match="method 'glide', not 'draft_model'"):
            Engine(target, draft, spec=SpecConfig("draft_model"))
        with pytest.raises(ValueError, match="method 'glide', not 'cascade'"):
            Engine(target, [draft], spec=SpecConfig("cascade", k_matrix=[[1]]))
    other = random_glide(random_model("llama", num_key_value_heads=4))
    with pytest.raises(ValueError, match=r"drafter: was made for .*\(4, 16\).*\(2, 16\)"):
        Engine(target, other, spec=GLIDE)
    deep = random_glide(target, 3)
    with pytest.raises(ValueError, match="drafter: has 3 layers, the target 2"):
        Engine(random_model("llama", num_hidden_layers=2), deep, spec=GLIDE)
    shape = {"hidden_size": 40, "num_attention_heads": 5, "intermediate_size": 56}
    plain = LlamaForCausalLM(GlideLlamaConfig(**shape, vocab_size=VOCAB_SIZE))
    plain.save_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match=r"drafter: cannot load .* is not a GLIDE model"):
        load_glide(tmp_path / "plain", EngineConfig())


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"large_num_attention_heads": 5, "large_num_key_value_heads": 2}, "large_num_attention"),
        ({"block_size": 0}, "block_size"),
        ({"use_remap": True}, "use_remap"),
    ],
)
def test_shapes_that_do_not_fit_together(fields, named):
    with pytest.raises(ValueError, match=named):
        GlideLlamaConfig(**fields)
