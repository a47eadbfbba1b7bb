"""Tiny random models of many architectures, and tokenizers of two kinds, for tests."""

from copy import deepcopy

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BloomConfig,
    FalconH1Config,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteMoeHybridConfig,
    JambaConfig,
    Lfm2Config,
    LlamaConfig,
    Mamba2Config,
    MambaConfig,
    MistralConfig,
    MT5Config,
    NemotronHConfig,
    OPTConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3NextConfig,
    T5Config,
    UMT5Config,
)

VOCAB_SIZE = 263  # 256 bytes, one special token and some padding
EOS_ID = 256

_SIZES = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
_GQA = {"num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 64}

_HEADS = {**_SIZES, "num_key_value_heads": 2, "intermediate_size": 64}
_MAMBA = {"mamba_n_heads": 6, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 8}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_MIXED = ["linear_attention", "full_attention", "linear_attention"]

RECURRENT_CONFIGS = {
    "lfm2": lambda: Lfm2Config(**_HEADS, layer_types=["conv", "full_attention", "conv"]),
    "mamba": lambda: MambaConfig(hidden_size=48, num_hidden_layers=2, state_size=8),
    "mamba2": lambda: Mamba2Config(
        hidden_size=48, num_hidden_layers=2, num_heads=6, head_dim=16, state_size=8, n_groups=2
    ),
    "falcon_h1": lambda: FalconH1Config(**_HEADS, **_MAMBA, mamba_d_ssm=96),
    "granitemoehybrid": lambda: GraniteMoeHybridConfig(
        **_HEADS, **_MAMBA, mamba_n_groups=1, layer_types=_MIXED, num_local_experts=4
    ),
    "jamba": lambda: JambaConfig(
        **_HEADS, attn_layer_period=3, attn_layer_offset=1, num_experts=4, mamba_d_state=8
    ),
    "nemotron_h": lambda: NemotronHConfig(
        **(_HEADS | _EXPERTS),
        layers_block_type=["mamba", "attention", "moe"],
        head_dim=12,
        mamba_num_heads=6,
        mamba_head_dim=16,
        ssm_state_size=8,
        n_groups=2,
        chunk_size=8,
        n_routed_experts=4,
        moe_shared_expert_intermediate_size=32,
    ),
    "qwen3_next": lambda: Qwen3NextConfig(
        **_HEADS,
        **_EXPERTS,
        **_DELTA,
        head_dim=16,
        layer_types=_MIXED,
        num_experts=4,
        shared_expert_intermediate_size=32,
    ),
}

CONFIGS = RECURRENT_CONFIGS | {
    "llama": lambda: LlamaConfig(**_SIZES, **_GQA),
    "mistral": lambda: MistralConfig(**_SIZES, **_GQA, sliding_window=7),
    "qwen3": lambda: Qwen3Config(**_SIZES, **_GQA),
    "gemma2": lambda: Gemma2Config(
        **_SIZES, **_GQA, sliding_window=6, attn_logit_softcapping=5.0, query_pre_attn_scalar=16
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **_SIZES, **_GQA, sliding_window=6, query_pre_attn_scalar=16
    ),
    "gpt_oss": lambda: GptOssConfig(
        **_SIZES, **_GQA, sliding_window=6, num_local_experts=4, num_experts_per_tok=2
    ),
    "gpt_neox": lambda: GPTNeoXConfig(**_SIZES, intermediate_size=64),
    "gpt2": lambda: GPT2Config(n_embd=48, n_layer=3, n_head=4),
    "opt": lambda: OPTConfig(**_SIZES, ffn_dim=64, word_embed_proj_dim=48),
    "bloom": lambda: BloomConfig(hidden_size=48, n_layer=2, n_head=4),
}


_T5_SIZES = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 3}
_T5_BIAS = {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 20}

T5_CONFIGS = {
    "t5": lambda: T5Config(**_T5_SIZES, **_T5_BIAS),
    "flan": lambda: T5Config(
        **_T5_SIZES, **_T5_BIAS, feed_forward_proj="gated-gelu", tie_word_embeddings=False
    ),
    "mt5": lambda: MT5Config(**_T5_SIZES, **_T5_BIAS),
    "umt5": lambda: UMT5Config(**_T5_SIZES, **_T5_BIAS),
}


def random_t5(kind: str = "flan", seed: int = 5, vocab_size: int = 100) -> PreTrainedModel:
    """A float32 encoder-decoder whose text depends on what its encoder reads, and on order."""
    config = T5_CONFIGS[kind]()
    config.vocab_size = vocab_size
    config.decoder_start_token_id = config.pad_token_id = 0
    config.eos_token_id = 1
    model = AutoModelForSeq2SeqLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "relative_attention_bias" in name:
                parameter.normal_(std=2.0)
            elif "shared" in name:
                parameter.normal_(std=0.1)
            elif parameter.dim() > 1:  # scores of attention are not divided by sqrt(d_kv)
                scale = config.d_kv**-0.5 if ".q." in name else 1.0
                parameter.normal_(std=2.0 * scale * parameter.shape[-1] ** -0.5)
    return model


def random_model(
    architecture: str = "llama", seed: int = 0, vocab_size: int = VOCAB_SIZE, **overrides
) -> PreTrainedModel:
    """A float32 model with weights large enough that its greedy text is not one repeated token."""
    config = CONFIGS[architecture]()
    config.vocab_size = vocab_size
    config.max_position_embeddings = 512
    config.bos_token_id = config.eos_token_id = EOS_ID
    config.pad_token_id = None
    config.tie_word_embeddings = False  # tied, a random model repeats its last token
    for name, value in overrides.items():
        setattr(config, name, value)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in ("embed", "wte", "wpe")):
                parameter.normal_(std=0.3)
            elif parameter.dim() > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
            elif name.endswith("sinks"):
                parameter.normal_()
    return model


def perturbed(model: PreTrainedModel, noise: float, seed: int = 1) -> PreTrainedModel:
    """A copy whose weights are off by relative noise: a draft that is often, not always, right."""
    copy = type(model)(deepcopy(model.config)).eval()
    copy.load_state_dict(model.state_dict())
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in copy.parameters():
            scale = noise * parameter.std() if parameter.numel() > 1 else 0.0
            parameter += scale * torch.randn(parameter.shape, generator=generator)
    return copy


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One id per byte, id 256 ends a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: index for index, symbol in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)
    fast.add_special_tokens({"eos_token": "<|end|>"})
    return fast


def sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """Words after a space, and bytes, as Llama 2 has them; ids 0 and 1 begin and end a text."""
    space = "\u2581"
    words = [space, space * 2, "a", "b", ",", f"{space}a", "ab", f"{space}ab", "\u65e5"]
    tokens = ["<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = [(space, space), (space, "a"), ("a", "b"), (space, "ab")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True))
    in_front, spaces = normalizers.Prepend(space), normalizers.Replace(" ", space)
    tokenizer.normalizer = normalizers.Sequence([in_front, spaces])
    steps = [decoders.Replace(space, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
