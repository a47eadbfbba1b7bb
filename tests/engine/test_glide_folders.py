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
from .helpers import GREEDY, PROMPTS
from .probes import drafter_of

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
    weights = draft.state_dict()
    assert set(weights) == NAMES
    published_folder(published, draft, PUBLISHED)
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


def published_folder(folder, draft, fields):
    folder.mkdir(exist_ok=True)
    weights = {name: tensor.contiguous() for name, tensor in draft.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(fields))
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("heads", [4, 2])
@pytest.mark.parametrize("method", ["glide", "auto"])
def test_what_a_folder_does_not_say_of_the_target_comes_from_it(tmp_path, heads, method):
    """By auto, too, where such a folder ran as a plain Llama, without its cross-attention."""
    target = random_model("llama", num_key_value_heads=heads)
    draft = random_glide(target)
    fields = {name: v for name, v in PUBLISHED.items() if not name.startswith("large_")}
    folder = published_folder(tmp_path, draft, fields)
    tokenizer = byte_tokenizer()
    runs = []
    for each in (draft, folder):
        engine = Engine(target, each, tokenizer=tokenizer, spec=SpecConfig(method))
        assert drafter_of(engine).name == "glide"
        outputs = engine.generate(PROMPTS, GREEDY)
        runs.append([(o.token_ids, o.stats.num_accepted_tokens) for o in outputs])
    assert runs[0] == runs[1]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"large_num_attention_heads": 8}, r"cross_attn.o_proj.weight has shape \(40, 64\)"),
        ({"large_num_key_value_heads": 4}, r"was made for .*\(4, 16\).*\(2, 16\)"),
        ({"large_head_dim": 8}, r"cross_attn.o_proj.weight has shape \(40, 64\)"),
        ({"large_num_attention_heads": 3}, "large_num_attention_heads: 3, not a multiple of 2"),
    ],
)
def test_a_folder_for_another_target(tmp_path, fields, named):
    target = random_model("llama", num_key_value_heads=2)
    stored = {name: v for name, v in PUBLISHED.items() if not name.startswith("large_")} | fields
    folder = published_folder(tmp_path, random_glide(target), stored)
    with pytest.raises(ValueError, match=f"^drafter: .*{named}"):
        Engine(target, folder, tokenizer=byte_tokenizer(), spec=GLIDE)


def test_a_folder_that_lacks_weights_is_refused_whatever_the_method(tmp_path):
    target = random_model("llama")
    draft = random_glide(target)
    draft.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights[f"{LAYER}cross_attn.q_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for method in ("auto", "glide", "tree"):
        with pytest.raises(ValueError, match="1 weights are missing"):
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
