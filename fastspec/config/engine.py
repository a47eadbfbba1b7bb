"""Where the models run and how much memory they may use."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastspec.config.checks import refuse
from fastspec.config.colossal import fields_of_colossal
from fastspec.config.options import (
    BOOL,
    SIZE,
    TEXT,
    Kind,
    Options,
    choice,
    config_of,
    documented,
    integer,
    option,
    options_of,
)

_PLACE = "{input_text}"
_TEMPLATE = Kind(
    f"a string with {_PLACE}", lambda value: isinstance(value, str) and _PLACE in value
)


@documented
@dataclass(frozen=True)
class EngineConfig(Options):
    """Where the models run and how much memory they may use."""

    dtype: str = option(
        "auto",
        choice("auto", "float32", "bfloat16", "float16"),
        "Data type of the weights: auto (the checkpoint's), float32, bfloat16 or float16.",
        "A model that is already loaded keeps its dtype: auto uses it, any other is refused.",
    )
    load_format: str = option(
        "auto",
        choice("auto", "safetensors"),
        "Weight files to read: auto (safetensors, else pickled files) or safetensors (only those).",
        "Applies to folders and hub ids, for targets and drafts alike; a GGUF file is not a pickle"
        " and is always read. Pickled files are read with torch's weights_only. `fastspec serve`"
        " and `fastspec.serve.ray_app` default to safetensors.",
        aliases=("vLLM",),
    )
    device: str = option(
        "auto",
        TEXT,
        "Device for the models: auto (cuda if available), cpu, cuda, cuda:1, ...",
        "A model that is already loaded stays where it is.",
    )
    block_size: int = option(
        16, integer(1), "Number of tokens per cache block.", aliases=("Colossal-Inference",)
    )
    num_blocks: int | None = option(
        None, integer(1), "Number of cache blocks; by default as many as fit in kv_cache_memory."
    )
    kv_cache_memory: int | str | None = option(
        None,
        SIZE,
        "Size of all KV caches together; by default 1 GiB on CPU, half the free memory on a GPU.",
        "This includes the states of recurrent layers for max_batch_size requests; on CPU they are"
        " added to the default. Cannot be combined with num_blocks.",
    )
    max_batch_size: int = option(
        32,
        integer(1),
        "Maximum number of requests decoded together.",
        aliases=("Colossal-Inference", "max_num_seqs (vLLM)"),
    )
    max_model_len: int | None = option(
        None,
        integer(2),
        "Maximum prompt plus new tokens per request; by default the model's own limit.",
        "For an encoder-decoder, the limit applies to each of the two.",
    )
    prefill_chunk_size: int = option(
        512,
        integer(1),
        "Maximum number of prompt tokens read in each step, over all requests.",
        "Requests whose prompts have been read are decoded between the chunks of a longer prompt."
        " A larger number reads prompts faster, a smaller one makes other requests wait less. An"
        " encoder, and a draft model when it first drafts for a request, read a whole prompt at"
        " once.",
    )
    prefix_caching: bool = option(
        False,
        BOOL,
        "Share cache blocks between prompts with a common prefix.",
        "Blocks of finished requests are kept until their space is needed. Off by default, so that"
        " what is read, and how long that takes, never depends on earlier requests. Refused for"
        " encoder-decoders, for recurrent layers, whose state at the end of a shared prefix is not"
        " kept, and for LongRoPE if texts may outgrow the original limit.",
        aliases=("enable_prefix_caching (vLLM)",),
    )
    kv_cache_dtype: str = option(
        "auto",
        choice("auto", "float8"),
        "Data type of keys and values: auto (the model's) or float8, rounded to 8 bits (GPU).",
        "float8 is e4m3 without scales or calibration (values beyond 448 become 448), and fits two"
        " to four times as many tokens. The output is then that of the target with such a cache;"
        " speculation is lossless with respect to it. Where two passes differ in the last bit,"
        " rounding may turn that into a whole step. Needs a GPU, or backend reference or triton for"
        " tests; refused for encoder-decoders.",
    )
    cuda_graphs: str = option(
        "auto",
        choice("auto", "on", "off"),
        "Replay passes over few tokens as CUDA graphs: auto (where possible), on or off.",
        "If a model on a GPU cannot be captured, auto logs a warning once and on raises an error."
        " Encoder-decoders, models with recurrent layers, models that attend in chunks, Gemma 4"
        " assistants and DFlash drafts are never captured.",
    )
    compile_modules: bool = option(
        False,
        BOOL,
        "Let torch.compile fuse the modules that have no fastspec kernel.",
        "These are rotary embeddings, normalisations and feed-forward blocks. Compiling takes"
        " seconds when they first run. Models that run without their modules have none to compile."
        " Off by default: it makes small models slower on a CPU, and has not been measured on a GPU"
        " yet.",
    )
    max_n_spec_tokens: int | None = option(
        None,
        integer(1),
        "Upper limit for num_speculative_tokens, also when speculation is enabled again.",
        "Lowers a method's default; a larger number is refused, also one that k_matrix,"
        " suffix_tokens or tree_suffix need.",
        aliases=("Colossal-Inference",),
    )
    prompt_template: str | None = option(
        None,
        _TEMPLATE,
        f"Template in which each text prompt replaces {_PLACE}.",
        aliases=("Colossal-Inference",),
    )
    backend: str = option(
        "auto",
        choice("auto", "cpu", "cuda", "triton", "reference"),
        "Kernel backend: auto, cpu, cuda, triton or reference; see fastspec info.",
        "A backend that cannot run the models where they are is refused when they are loaded.",
    )

    def __post_init__(self):
        super().__post_init__()
        if self.num_blocks is not None:
            refuse("kv_cache_memory", self.kv_cache_memory, "not with num_blocks")

    @classmethod
    def of(cls, value: "EngineConfig | Mapping[str, Any]") -> "EngineConfig":
        """The value itself, or a config made from a mapping of fields.

        Raises:
            ValueError: another type, an unknown field, or a value that is wrong.
        """
        return config_of("config", value, cls)

    @classmethod
    def from_colossal(cls, fields: Mapping[str, Any]) -> "EngineConfig":
        """A config from the fields of Colossal-Inference's InferenceConfig.

        max_batch_size, block_size and max_n_spec_tokens keep their names. dtype may be a torch
        dtype, or fp16, bf16 or fp32; kv_cache_dtype None, the same as dtype, or fp8. max_input_len
        and max_output_len add up to max_model_len; if only one is given, the other is 256.
        prompt_template is a string with {input_text}, or vicuna, llama or baichuan. prefill_ratio,
        use_cuda_kernel and use_cuda_graph have no effect and log a warning. Other fields, such as
        tp_size, accept only the value that matches what is done here. Fields that are not given
        have the defaults of this class.

        Raises:
            ValueError: any other field, such as those of sampling, or a value that cannot be used.
        """
        known = [
            name for name, each in options_of(cls).items() if "Colossal-Inference" in each.aliases
        ]
        return cls(**fields_of_colossal(fields, known))
