"""A tiny random model of each of transformers' decoders, and whether the engine gives its text.

`python -m tests.architectures` writes the tables of docs/models.md, in about two minutes. A model
is equal where its ids are those of `generate` while drafts are right, wrong and absent by turns, on
two texts at once that are longer than its windows. Its weights are drawn so large that attention is
far from uniform and no text repeats one token, and its layers are of all the kinds that its default
has. A model that does neither that nor end in a refusal is a bug.
"""

import re
from dataclasses import dataclass, fields
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from fastspec import Engine, SamplingParams, SpecConfig
from fastspec.drafters.base import NoDrafter, Proposal
from fastspec.models.flat import FlatLayer

from .engine.helpers import generated_greedily
from .engine.probes import flat_model_of, model_of

NUM_TOKENS = 20
LEAST_DISTINCT = 6  # tokens of each text
GAINS = (1.5, 1.0, 0.7, 0.5, 3.0, 4.0, 6.0)  # of weights, tried until the texts have them
PROMPTS = [[5, 7, 40, 9], [10 + (37 * i * i + 11 * i) % 250 for i in range(33)]]
NUM_LAYERS = 4
MOST_PARAMETERS = 8_000_000

_IDS = {"bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 1}
# What configurations call their sizes; each takes those that it has.
_SIZES = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embedding_size", "emb_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers"), NUM_LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 128),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size"), 48),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 48),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "head_dim"), 16),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    "vocab_size": 263,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "sliding_window": 7,
    "attention_chunk_size": 16,
}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 16}
_LINEAR = {
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 4),
    **dict.fromkeys(("linear_head_dim", "linear_num_heads"), 8),
}


def _rotated_in(*section: int) -> dict[str, Any]:
    """Parts of half a head, for time, height and width."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [*section]}
    return {"rope_parameters": rope}


_INDEXED = {"index_topk": 4, "index_head_dim": 16, "index_n_heads": 2}
# Their configurations want more than smaller sizes, or they do not generate text from text alone.
NOT_TRIED = {
    *("blt", "cpmant", "dots3_note_text", "gemma4_assistant", "gemma4_unified_assistant", "git"),
    *("phi4_multimodal", "prophetnet", "qwen4_exp_text", "roc_bert", "xlstm"),
}
# Models that also take images or sound, and that can be made small without much ado.
MULTIMODAL = (
    *("aria", "aya_vision", "cohere2_vision", "cohere_compass", "cosmos3_omni", "deepseek_vl"),
    *("deepseek_vl_hybrid", "exaone4_5", "gemma3", "gemma4", "gemma4_unified", "glm46v", "glm4v"),
    *("glm4v_moe", "glm_ocr"),
    *("glmasr", "got_ocr2", "hyperclovax_vision_v2", "idefics2", "idefics3", "internvl"),
    *("kimi_k25", "lfm2_vl", "lfm3_vl", "lighton_ocr", "llama4", "llava", "llava_next"),
    *("llava_next_video", "llava_onevision", "minicpm_ocr", "minicpmv4_6", "minicpmv4_7"),
    *("minimax_m3_vl", "mistral3", "mistral_large4", "omniasr", "ovis2", "paddleocr_vl"),
    *("paligemma", "pp_chart2table", "qianfan_ocr", "qwen2_5_vl", "qwen2_audio", "qwen2_vl"),
    *("qwen3_5", "qwen3_5_moe", "qwen3_asr", "qwen3_vl", "qwen3_vl_moe", "smolvlm", "step3p7"),
    *("video_llama_3", "video_llava", "vipllava", "voxtral"),
)
# Of the parts that read images and sound.
_ENCODER_SIZES = {
    **_SIZES,
    **dict.fromkeys(("depth", "num_hidden_layers", "encoder_layers", "num_layers"), 2),
    **dict.fromkeys(("hidden_size", "d_model", "embed_dim", "out_hidden_size"), 32),
    **{"image_size": 28, "patch_size": 14, "num_position_embeddings": 64},
}
# What a default leaves out, or must have together.
OVERRIDES: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {**_LINEAR, "num_expert_group": 1, "num_experts_per_token": 2},
    "bamba": {**_MAMBA, "attn_layer_indices": [1, 3]},
    "codegen": {"rotary_dim": 4},
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0}
            for kind in ("full_attention", "sliding_attention")
        }
    },
    "ctrl": {"dff": 48},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "deepseek_v4": {"head_dim": 32, "o_groups": 2, "o_lora_rank": 8, **_INDEXED},
    "dory": {"n_input_layers": 1, "n_output_layers": 1},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "gemma3n_text": {"num_kv_shared_layers": 2, "vocab_size_per_layer_input": 263},
    "gemma4_text": {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 263},
    "falcon_h1": _MAMBA | {"mamba_d_ssm": 64},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 7},
    "gptj": {"rotary_dim": 4},
    "granitemoehybrid": {**_MAMBA, "layer_types": ["linear_attention", "full_attention"] * 2},
    "helium": {"head_dim": 8},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16, "num_experts": 4, "moe_topk": 2},
    "inkling_text": {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "rel_extent": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4},
    "kimi_linear": {**_LINEAR, "num_experts_per_token": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "full_attn_idxs": [1, 3]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "llama4_text": {"no_rope_layers": [1, 0, 1, 0], "floor_scale": 8, "intermediate_size_mlp": 48},
    "longcat_flash": {"expert_ffn_hidden_size": 16, "moe_topk": 2, "zero_expert_num": 2},
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 1, "chunk_size": 16},
    "minimax": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
        "rotary_dim": 8,
        "index_head_dim": 16,
        "index_block_size": 4,
        "index_topk_blocks": 2,
    },
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    "phimoe": {"sliding_window": None},
    "qwen2_moe": {"use_sliding_window": False, "layer_types": ["full_attention"] * 4},
    "qwen3_5_text": _LINEAR,
    "qwen3_5_moe_text": _LINEAR,
    "qwen3_next": _LINEAR,
    "reformer": {"axial_pos_embds": False, "hidden_size": 32},
    "smollm3": {"no_rope_layers": [1, 0, 1, 0]},
    "xmod": {"default_language": "en_XX"},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
}
OVERRIDES["inkling2_text"] = OVERRIDES["inkling_text"] | {"unpadded_vocab_size": 263}
OVERRIDES["inkling2_loop_text"] = OVERRIDES["inkling2_text"] | {
    "loop_layer_index_start": 1,
    "loop_layer_index_end": 3,
    "loop_num_passes": 2,
    "n_layers_per_attn_res_block": 1,
}
for _name in ("qwen2_vl_text", "qwen2_5_vl_text", "glm4v_text", "glm_ocr_text"):
    OVERRIDES[_name] = _rotated_in(2, 1, 1)
OVERRIDES["glm4v_moe_text"] = _rotated_in(0, 1, 1)
OVERRIDES["paddleocr_vl_text"] = _rotated_in(4, 2, 2)
_BERTS = ("bert", "camembert", "data2vec-text", "ernie", "roberta", "xlm-roberta")
for _name in (*_BERTS, "xmod"):  # the mean of GELU's output would outweigh what differs
    OVERRIDES[_name] = OVERRIDES.get(_name, {}) | {"hidden_act": "tanh"}


def config_of(model_type: str, **overrides) -> Any:
    """Its configuration, as small as that of any decoder, with layers of every kind it has."""
    kind = CONFIG_MAPPING[model_type]
    if model_type in MULTIMODAL:
        return _config_of_parts(kind)
    default = kind().__dict__
    own = {field.name for field in fields(kind)}
    sizes = {name: size for name, size in _SIZES.items() if default.get(name) is not None}
    sizes |= {name: value for name, value in _IDS.items() if name in own}
    sizes |= {name: _SIZES[name] for name in ("sliding_window",) if name in own}
    sizes |= {name: False for name in ("tie_word_embeddings",) if name in own}
    sizes |= {name: True for name in ("is_decoder",) if name in own}
    if "kv_lora_rank" in sizes and "num_key_value_heads" in sizes:
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    for name in ("layer_types", "mlp_layer_types"):
        if name in own and default.get(name):
            kinds = dict.fromkeys(default[name])
            if "full_attention" in kinds and "sliding_window" in own:
                kinds["sliding_attention"] = None
                sizes |= {name: True for name in ("use_sliding_window",) if name in own}
            sizes[name] = [*islice(cycle(kinds), NUM_LAYERS)]
    return kind(**sizes | OVERRIDES.get(model_type, {}) | overrides)


def _config_of_parts(kind: Any) -> Any:
    """The text part as small as if it were alone, and the others even smaller."""
    default = kind()
    text = default.get_text_config(decoder=True).model_type
    parts = {name: getattr(default, name, None) for name in kind.sub_configs}
    small = {
        name: config_of(text) if part.model_type == text else _encoder_config_of(part)
        for name, part in parts.items()
        if part is not None
    }
    own = {name: _SIZES[name] for name in ("vocab_size", "hidden_size") if name in vars(default)}
    return kind(**small | own, tie_word_embeddings=False)


def _encoder_config_of(default: Any) -> Any:
    fitting = {
        n: size for n, size in _ENCODER_SIZES.items() if type(getattr(default, n, 0.0)) is int
    }
    return type(default)(**fitting)


def random_decoder(config: Any, seed: int = 0) -> PreTrainedModel:
    """Weights that make its text depend on all that it has read."""
    options: Any = {"attn_implementation": "eager", "dtype": torch.float32}
    is_text = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    kind: Any = AutoModelForCausalLM if is_text else AutoModelForMultimodalLM
    with torch.device("meta"):
        size = kind.from_config(config, **options).num_parameters()
    assert size <= MOST_PARAMETERS, f"{config.model_type}: {size} parameters"
    torch.manual_seed(seed)
    model = kind.from_config(config, **options).eval()
    gain = GAINS[seed]
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() < 2:
                weight += 0.2 * torch.randn_like(weight)
            else:
                is_embedding = re.search("embed|wte|wpe", name)
                weight.normal_(std=0.3 if is_embedding else gain * weight.shape[-1] ** -0.5)
    return model


@dataclass
class Teller(NoDrafter):
    """Drafts of the true texts, 0 to 4 tokens by turns, with a wrong one in the longer ones."""

    texts: list[list[int]]
    name: str = "teller"

    def propose(self, batch):
        shape = len(batch.requests), batch.num_speculative_tokens
        token_ids = torch.full(shape, -1, dtype=torch.int32)
        for row, request, most in zip(
            token_ids, batch.requests, batch.num_draft_tokens, strict=True
        ):
            length = len(request.token_ids)
            (text,) = (t for t in self.texts if t[:4] == request.token_ids[:4])
            draft = text[length : length + min(most, length % 5)]
            if len(draft) > 2:
                draft[length % 3] = (draft[length % 3] + 1) % 250
            row[: len(draft)] = torch.tensor(draft, dtype=torch.int32)
        return Proposal(token_ids)


def model_types() -> list[str]:
    """The decoders that are tried: those with a configuration of text alone, and a small one."""
    names = sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - NOT_TRIED)
    text_configs = (CONFIG_MAPPING[name]().get_text_config(decoder=True) for name in names)
    return [name for name, c in zip(names, text_configs, strict=True) if c.model_type == name]


@dataclass(frozen=True)
class Verdict:
    """What the engine makes of a model type: how it runs, or the kind of reason against it."""

    model_type: str
    name: str
    is_equal: bool
    how: str

    @property
    def row(self) -> str:
        """Of the table."""
        verdict = "equal" if self.is_equal else "refused"
        return f"| `{self.model_type}` | {self.name} | {verdict} | {self.how} |"


# What the engine's message says, by the kind of reason.
KINDS = {
    "recurrent state": (
        r"keeps a recurrent state|keeps several states in a layer|layers of type \['(linear|recur)"
    ),
    "attention of its own": "never calls transformers' attention interface",
    "counts positions itself": "does not accept position_ids",
    "sparse or compressed attention": r"layers of type \['(?!linear|recur)",
    "mask or bias of its own": "builds its own attention mask or bias",
    "attends several times in a layer": r"layer -?\d+ attends \d+ times|share their attention",
    "outputs beside hidden states": "returns more than hidden states",
    "window that attention is not told of": "`generate` keeps",
    "bidirectional attention": "bidirectional attention",
}


def try_out(model_type: str) -> Verdict:
    """Run it, or see it refused; an AssertionError where its ids differ."""
    config = config_of(model_type)
    for seed in range(len(GAINS)):
        model = random_decoder(config, seed)
        texts = [[*prompt, *generated_greedily(model, prompt, NUM_TOKENS)] for prompt in PROMPTS]
        try:
            engine = Engine(model, Teller(texts), spec=SpecConfig(num_speculative_tokens=4))
        except ValueError as error:
            (kind,) = (kind for kind, text in KINDS.items() if re.search(text, str(error)))
            return Verdict(model_type, type(model).__name__, False, kind)
        new = [text[len(prompt) :] for text, prompt in zip(texts, PROMPTS, strict=True)]
        if min(len(set(ids)) for ids in new) >= LEAST_DISTINCT:
            break
    else:
        raise AssertionError(f"{model_type}: its texts repeat themselves")
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    outputs = engine.generate(PROMPTS, params)
    assert [list(output.token_ids) for output in outputs] == new, f"{model_type}: ids differ"
    assert 0 < engine.stats.acceptance_rate < 1
    return Verdict(model_type, type(model).__name__, True, _how(engine))


def _how(engine: Engine) -> str:
    if flat_model_of(engine):
        return "flat"
    forwards = (module.__dict__.get("forward") for module in model_of(engine).modules())
    is_layer = any(isinstance(getattr(f, "__self__", None), FlatLayer) for f in forwards)
    return "layer by layer" if is_layer else "own modules"


PAGE = Path(__file__).resolve().parents[1] / "docs" / "models.md"
TABLE = re.compile(
    r"(<!-- (?P<kind>architectures|multimodal): .*?-->\n)(?P<rows>.*?)(?=<!-- end)", re.DOTALL
)


def table(verdicts: list[Verdict]) -> str:
    """A part of the page that is not written by hand."""
    num_equal = sum(verdict.is_equal for verdict in verdicts)
    lines = [
        f"With transformers {transformers.__version__}: {num_equal} of {len(verdicts)} are equal.",
        "",
        "| model type | class | | how it runs, or why it does not |",
        "| --- | --- | --- | --- |",
        *(verdict.row for verdict in verdicts),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    listed = {"architectures": model_types(), "multimodal": MULTIMODAL}
    texts = {kind: table([try_out(name) for name in names]) for kind, names in listed.items()}
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(TABLE.sub(lambda m: m[1] + texts[m["kind"]], page), encoding="utf-8")
