"""Where the models run and how much they may hold."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastspec.config.checks import config_of, refuse
from fastspec.config.colossal import fields_of_colossal
from fastspec.config.options import (
    BOOL,
    TEXT,
    Kind,
    Options,
    choice,
    documented,
    integer,
    option,
    options_of,
)

_PLACE = "{input_text}"
_TEMPLATE = Kind(f"a text with {_PLACE}", lambda value: isinstance(value, str) and _PLACE in value)


@documented
@dataclass(frozen=True)
class EngineConfig(Options):
    """Where the models run and how much they may hold."""

    dtype: str = option(
        "auto",
        choice("auto", "float32", "bfloat16", "float16"),
        "Weights: auto (the checkpoint's dtype), float32, bfloat16 or float16.",
        "A model that is passed loaded keeps its dtype: auto takes that, another is refused.",
    )
    load_format: str = option(
        "auto",
        choice("auto", "safetensors"),
        "Weights are read from: auto (safetensors, else pickled files) or safetensors alone.",
        "Of folders and hub ids, targets and drafts alike; a GGUF file is no pickle and is read in"
        " any case. Pickled files are read with torch's weights_only. `fastspec serve` and"
        " `fastspec.serve.ray_app` take safetensors unless they are given auto.",
        aliases=("vLLM",),
    )
    device: str = option(
        "auto",
        TEXT,
        "Where the models run: auto (cuda if there is one), cpu, cuda, cuda:1, ...",
        "A model that is passed loaded stays where it is.",
    )
    block_size: int = option(
        16, integer(1), "Tokens in one block of the cache.", aliases=("Colossal-Inference",)
    )
    num_blocks: int | None = option(
        None, integer(1), "Blocks in the cache; by default as many as kv_cache_memory holds."
    )
    kv_cache_memory: int | None = option(
        None,
        integer(1, None),
        "Bytes of all KV caches together; by default 1 GiB on CPU, half the free memory on a GPU.",
        "The states of recurrent layers, for max_batch_size requests, are part of it; on CPU they"
        " come on top of the default. Not beside num_blocks.",
    )
    max_batch_size: int = option(
        32, integer(1), "Requests decoded together at most.", aliases=("Colossal-Inference",)
    )
    max_model_len: int | None = option(
        None,
        integer(2),
        "Prompt and new tokens of one request at most; by default the model's own limit.",
        "For an encoder-decoder the limit of each of the two.",
    )
    prefill_chunk_size: int = option(
        512,
        integer(1),
        "Prompt tokens read before each decoding step at most, of all requests together.",
        "Requests whose prompts are read are decoded between the chunks of a longer one. More"
        " reads prompts faster, less lets the others wait less. An encoder, and a draft model when"
        " it first drafts for a request, read a whole prompt at once.",
    )
    prefix_caching: bool = option(
        False,
        BOOL,
        "Prompts that begin alike share the cache blocks of what they share.",
        "Blocks of ended requests are kept until their space is needed. Off by default: then what"
        " is read, and how long that takes, never depends on what ran before. Refused for an"
        " encoder-decoder, for recurrent layers, whose state at the end of a shared prefix is not"
        " kept, and for LongRoPE where texts may outgrow the original limit.",
    )
    kv_cache_dtype: str = option(
        "auto",
        choice("auto", "float8"),
        "Keys and values: auto (as the model) or float8, which rounds them to 8 bits (GPU).",
        "float8 is e4m3 without scales or calibration (beyond 448 values become 448), and holds"
        " two to four times as many tokens. What is decoded is then the target with such a cache;"
        " speculation is lossless with respect to that. Where two passes differ in a last bit,"
        " rounding may make it a whole step. Needs a GPU, or for tests backend reference or"
        " triton; refused for an encoder-decoder.",
    )
    cuda_graphs: str = option(
        "auto",
        choice("auto", "on", "off"),
        "Replay passes of few tokens as CUDA graphs: auto (where that works), on or off.",
        "auto logs a warning once where the model on a GPU cannot be captured; on raises instead."
        " Encoder-decoders, models with recurrent layers, GLIDE and EAGLE drafts are never"
        " captured.",
    )
    compile_modules: bool = option(
        False,
        BOOL,
        "Let torch.compile fuse what has no kernel of ours.",
        "These are rotary embeddings, normalisations and feed-forward blocks. Compiling takes"
        " seconds when they first run. Models that run without their modules have none to compile."
        " Off by default: it makes small models slower on a CPU, and has not been measured on a GPU"
        " yet.",
    )
    max_n_spec_tokens: int | None = option(
        None,
        integer(1),
        "num_speculative_tokens at most, also when speculation is turned on anew.",
        "Lowers the default of 5, and refuses more where that is given.",
        aliases=("Colossal-Inference",),
    )
    prompt_template: str | None = option(
        None,
        _TEMPLATE,
        f"Text prompts are put in the place of its {_PLACE}.",
        aliases=("Colossal-Inference",),
    )
    backend: str = option(
        "auto",
        choice("auto", "cpu", "cuda", "triton", "reference"),
        "Kernels: auto, cpu, cuda, triton or reference; see fastspec info.",
        "One that cannot run the models where they are is refused when they are loaded.",
    )

    def __post_init__(self):
        super().__post_init__()
        if self.num_blocks is not None:
            refuse("kv_cache_memory", self.kv_cache_memory, "num_blocks sizes the cache already")

    @classmethod
    def of(cls, value: "EngineConfig | Mapping[str, Any]") -> "EngineConfig":
        """The value, or what a mapping of fields says.

        Raises:
            ValueError: another type, an unknown field, or a value that is wrong.
        """
        return config_of("config", value, cls)

    @classmethod
    def from_colossal(cls, fields: Mapping[str, Any]) -> "EngineConfig":
        """Fields of Colossal-Inference's InferenceConfig.

        max_batch_size, block_size and max_n_spec_tokens keep their names. dtype may be a torch
        dtype, or fp16, bf16 or fp32; kv_cache_dtype None, the same as dtype, or fp8. max_input_len
        and max_output_len add up to max_model_len; where one is given, the other is 256.
        prompt_template is a text with {input_text}, or vicuna, llama or baichuan. prefill_ratio,
        use_cuda_kernel and use_cuda_graph have no effect, which a warning says. Others, as tp_size,
        have one value that means what is done here. What is not given has the default of this
        class.

        Raises:
            ValueError: another field, as those of sampling, or a value that cannot be used.
        """
        known = [
            name for name, each in options_of(cls).items() if "Colossal-Inference" in each.aliases
        ]
        return cls(**fields_of_colossal(fields, known))
