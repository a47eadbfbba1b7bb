"""Where the models run and how much they may hold."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastspec.config.checks import config_of, is_int, normalise_ints, refuse, require

_PLACE = "{input_text}"
_SAME_AS_COLOSSAL = ("max_batch_size", "block_size", "max_n_spec_tokens", "prompt_template")
_COLOSSAL_LENGTHS = ("max_input_len", "max_output_len")
_LARGEST_INT32 = 2**31 - 1


@dataclass(frozen=True)
class EngineConfig:
    """Where the models run and how much they may hold.

    Args:
        dtype: "auto" (float32 on CPU, else the checkpoint's), "float32", "bfloat16" or "float16".
            A model that is passed loaded stays what it is: "auto" takes that, another is refused.
        device: "auto" (cuda when there is one), "cpu", "cuda", "cuda:1", ... For a model that is
            passed loaded the same holds.
        block_size: tokens in one block of the cache.
        num_blocks: blocks in the cache; None derives it from kv_cache_memory. One of the two.
        kv_cache_memory: bytes of all KV caches together; None = 1 GiB on CPU, half the free memory
            on a GPU.
        max_batch_size: requests decoded together.
        max_model_len: prompt and new tokens of one request at most; None = the model's own limit.
            For an encoder-decoder the limit of each of the two.
        prefill_chunk_size: tokens of one forward pass while prompts are read.
        prefix_caching: True lets prompts that begin alike share the blocks of what they share, and
            keeps those of ended requests until their space is needed. Off by default: then what is
            read, and how long that takes, never depends on what ran before. ValueError for an
            encoder-decoder, and for LongRoPE where texts may outgrow the original limit.
        kv_cache_dtype: "auto" (that of the model) or "float8": keys and values are rounded to
            8 bits (e4m3, no scales, nothing calibrated; beyond 448 they become 448), so the cache
            holds two to four times as many tokens. What is decoded is then the target with such a
            cache; speculation is lossless with respect to that. Where two passes differ in a last
            bit, rounding may make it a whole step. Needs a GPU, or for tests backend "reference" or
            "triton"; ValueError for an encoder-decoder.
        cuda_graphs: "auto" replays passes of few tokens as CUDA graphs where the model is on a GPU
            and can be captured; where it cannot, a warning is logged once. "on" raises instead, and
            "off" never captures. Encoder-decoders and GLIDE drafts are never captured.
        compile_modules: True lets torch.compile fuse rotary embeddings, and normalisations and
            feed-forward blocks that have no kernel of ours, which takes seconds when they first
            run. Off by default: it makes small models slower on a CPU, and what it brings on a GPU
            has not been measured yet.
        max_n_spec_tokens: num_speculative_tokens at most, also when speculation is turned on anew;
            lowers the default of 5, and refuses more where that is given.
        prompt_template: text prompts are put in place of its {input_text}.
        backend: passed to every kernel, see fastspec_kernels.
    Raises:
        ValueError: a value out of range.
    """

    dtype: str = "auto"
    device: str = "auto"
    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_memory: int | None = None
    max_batch_size: int = 32
    max_model_len: int | None = None
    prefill_chunk_size: int = 512
    prefix_caching: bool = False
    kv_cache_dtype: str = "auto"
    cuda_graphs: str = "auto"
    compile_modules: bool = False
    max_n_spec_tokens: int | None = None
    prompt_template: str | None = None
    backend: str = "auto"

    def __post_init__(self):
        dtypes = ("auto", "float32", "bfloat16", "float16")
        require("dtype", self.dtype, self.dtype in dtypes, f"one of {dtypes}")
        caches, cache = ("auto", "float8"), self.kv_cache_dtype
        require("kv_cache_dtype", cache, cache in caches, f"one of {caches}")
        counts = ("block_size", "max_batch_size", "prefill_chunk_size", "num_blocks")
        normalise_ints(self, 1, *counts, "max_model_len", "max_n_spec_tokens", most=_LARGEST_INT32)
        normalise_ints(self, 1, "kv_cache_memory")
        if self.num_blocks is not None:
            refuse("kv_cache_memory", self.kv_cache_memory, "num_blocks sizes the cache already")
        graphs = ("auto", "on", "off")
        require("cuda_graphs", self.cuda_graphs, self.cuda_graphs in graphs, f"one of {graphs}")
        for name in ("device", "backend"):
            value = getattr(self, name)
            require(name, value, isinstance(value, str), "a text")
        for name in ("prefix_caching", "compile_modules"):
            value = getattr(self, name)
            require(name, value, isinstance(value, bool), "a bool")
        template = self.prompt_template
        fits = template is None or (isinstance(template, str) and _PLACE in template)
        require("prompt_template", template, fits, f"a text with {_PLACE}")

    @classmethod
    def of(cls, value: "EngineConfig | Mapping[str, Any]") -> "EngineConfig":
        """The value, or what a mapping of fields says.

        Raises:
            ValueError: another type, a field that there is not, or one that is wrong.
        """
        return config_of("config", value, cls)

    @classmethod
    def from_colossal(cls, fields: Mapping[str, Any]) -> "EngineConfig":
        """Fields of Colossal-Inference's InferenceConfig, those that mean the same here.

        max_batch_size, block_size, max_n_spec_tokens and prompt_template keep their names;
        max_input_len and max_output_len, given together, add up to max_model_len. What is not given
        has the default of this class.

        Raises:
            ValueError: another field, or a value out of range. A template must be spelt out, names
                of templates are unknown here.
        """
        kept = {name: value for name, value in fields.items() if name in _SAME_AS_COLOSSAL}
        lengths: dict[str, Any] = {n: fields[n] for n in _COLOSSAL_LENGTHS if n in fields}
        for name in fields:
            if name not in kept and name not in lengths:
                known = ", ".join((*_SAME_AS_COLOSSAL, *_COLOSSAL_LENGTHS))
                raise ValueError(f"{name}: has no meaning here; those that have are {known}")
        for name in _COLOSSAL_LENGTHS if lengths else ():
            value: Any = lengths.get(name)
            require(name, value, is_int(value) and value >= 1, "an int >= 1")
        return cls(**kept, max_model_len=sum(lengths.values()) or None)
