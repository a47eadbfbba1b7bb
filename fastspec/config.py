"""What a user may set: sampling of one request, speculation, and the engine."""

from collections.abc import Collection, Mapping
from dataclasses import InitVar, dataclass
from numbers import Real
from pathlib import Path
from typing import Any

METHODS = ("auto", "none", "draft_model", "prompt_lookup", "mag")
LATER_METHODS = ("cascade", "glide", "tree")
_DEFAULT_SPECULATIVE_TOKENS = 5
_DEFAULT_LOOKUP_TOKENS = 5


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen, on every verified row, and when it ends.

    Args:
        temperature: 0 = greedy (argmax, lowest id on ties), else logits are divided by it.
        top_k: keep the k largest logits, ties included; 0 = off.
        top_p: keep the smallest set of tokens with at least this mass; 1 = off.
        min_p: keep tokens with at least this fraction of the best token's probability; 0 = off.
        seed: 0 <= seed < 2**63; None draws one. The same seed gives the same tokens whatever the
            batch.
        max_tokens: number of new tokens at most, >= 1.
        stop: a string or several; the text ends before the first one found, token_ids with the
            token that completes it.
        stop_token_ids: ids that end the request beside the model's end-of-sequence ids, kept in
            token_ids.
        ignore_eos: do not stop at the model's end-of-sequence ids.
        logprobs: True returns the target's log-probability of each emitted token (greedy: at
            temperature 1).
    Raises:
        ValueError: a value out of range, or a field that this version does not support yet.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    max_tokens: int = 128
    min_tokens: int = 0
    stop: str | tuple[str, ...] | list[str] = ()
    stop_token_ids: tuple[int, ...] | list[int] = ()
    ignore_eos: bool = False
    logprobs: bool | int | None = None
    n: int = 1
    logits_processors: tuple[Any, ...] | list[Any] = ()

    def __post_init__(self):
        for name in ("temperature", "top_p", "min_p"):
            value = getattr(self, name)
            _require(name, value, isinstance(value, Real), "a number")
        _require("temperature", self.temperature, 0 <= self.temperature < float("inf"), ">= 0")
        _require("top_k", self.top_k, is_int(self.top_k) and self.top_k >= 0, "an int >= 0")
        _require("top_p", self.top_p, 0 < self.top_p <= 1, "in (0, 1]")
        _require("min_p", self.min_p, 0 <= self.min_p <= 1, "in [0, 1]")
        _require(
            "seed",
            self.seed,
            self.seed is None or (is_int(self.seed) and 0 <= self.seed < 2**63),
            "an int in [0, 2**63) or None",
        )
        is_positive = is_int(self.max_tokens) and self.max_tokens >= 1
        _require("max_tokens", self.max_tokens, is_positive, "an int >= 1")
        for name in ("stop", "stop_token_ids"):
            value = getattr(self, name)
            _require(name, value, isinstance(value, Collection), "a tuple or list")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        _require(
            "stop", self.stop, all(isinstance(s, str) and s for s in stop), "non-empty strings"
        )
        object.__setattr__(self, "stop", stop)
        ids = tuple(self.stop_token_ids)
        _require("stop_token_ids", self.stop_token_ids, all(is_int(i) for i in ids), "ints")
        object.__setattr__(self, "stop_token_ids", ids)
        _require(
            "logprobs",
            self.logprobs,
            self.logprobs in (None, False, True, 0),
            "True, False or None",
        )
        _reject_unsupported(
            self,
            repetition_penalty=1.0,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            logit_bias=None,
            min_tokens=0,
            n=1,
            logits_processors=(),
        )


@dataclass(frozen=True)
class SpecConfig:
    """How drafts are made and verified.

    Args:
        method: "auto" (a draft model when one is given, else none), "none" (plain
            decoding, a drafter that is given is not loaded), "draft_model", "prompt_lookup" (copy
            what followed the last tokens where they stood before) or "mag" (the same after the
            longest match, then by a table of bigrams). The last two need no second model.
        num_speculative_tokens: K, tokens proposed in each step, >= 1.
        draft_sample_method: "probabilistic" samples drafts from the drafter's own distribution
            under the request's parameters; "greedy" takes its argmax and verifies it as a point
            mass. Both are exact.
        rejection_sample_method: "standard" judges draft tokens one by one; "block" judges whole
            prefixes, accepts at least as many on average, and reads the rows once more. Both are
            exact, and the same at temperature 0.
        prompt_lookup_min, prompt_lookup_max: last tokens that must, and that can, agree for a copy,
            1 <= min <= max; the longest match counts. One given alone is both; by default 5.
        bigram_path: table of "mag", a JSON list whose entry i is the id that follows token i; None
            takes bigram.json in the target's folder if there is one, else copies alone.
        num_assistant_tokens: Hugging Face's name of num_speculative_tokens.
        prompt_lookup_num_tokens: Hugging Face's way to ask for prompt lookup with that many tokens.
    Raises:
        ValueError: a value out of range, or a field that this version does not support yet.
    """

    method: str = "auto"
    num_speculative_tokens: int = _DEFAULT_SPECULATIVE_TOKENS
    draft_sample_method: str = "probabilistic"
    rejection_sample_method: str = "standard"
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None
    bigram_path: str | Path | None = None
    k_matrix: Any = None
    lenience: float = 1.0
    tree_width: int | None = None
    tree_nodes: int | None = None
    cape: bool = False
    confidence_threshold: float | None = None
    schedule: str = "constant"
    synthetic_acceptance_rate: float | None = None
    num_assistant_tokens: InitVar[int | None] = None
    prompt_lookup_num_tokens: InitVar[int | None] = None

    def __post_init__(self, num_assistant_tokens, prompt_lookup_num_tokens):
        if prompt_lookup_num_tokens is not None:
            asks = self.method in ("auto", "prompt_lookup")
            expected = f"None for method {self.method!r}"
            _require("prompt_lookup_num_tokens", prompt_lookup_num_tokens, asks, expected)
            object.__setattr__(self, "method", "prompt_lookup")
        for name, value in (
            ("num_assistant_tokens", num_assistant_tokens),
            ("prompt_lookup_num_tokens", prompt_lookup_num_tokens),
        ):
            if value is not None:
                _require(name, value, is_int(value) and value >= 1, "an int >= 1")
                count = self.num_speculative_tokens
                is_free = count in (value, _DEFAULT_SPECULATIVE_TOKENS)
                expected = f"the value of num_speculative_tokens, {count!r}, or None"
                _require(name, value, is_free, expected)
                object.__setattr__(self, "num_speculative_tokens", value)
        if self.method in LATER_METHODS:
            raise ValueError(f"method: {self.method!r} is not supported yet")
        _require("method", self.method, self.method in METHODS, f"one of {METHODS}")
        count = self.num_speculative_tokens
        _require("num_speculative_tokens", count, is_int(count) and count >= 1, "an int >= 1")
        _require(
            "draft_sample_method",
            self.draft_sample_method,
            self.draft_sample_method in ("probabilistic", "greedy"),
            "'probabilistic' or 'greedy'",
        )
        if self.rejection_sample_method == "coupled":
            raise ValueError("rejection_sample_method: 'coupled' is not supported yet")
        _require(
            "rejection_sample_method",
            self.rejection_sample_method,
            self.rejection_sample_method in ("standard", "block"),
            "'standard' or 'block'",
        )
        self._check_copying()
        _reject_unsupported(
            self,
            k_matrix=None,
            lenience=1.0,
            tree_width=None,
            tree_nodes=None,
            cape=False,
            confidence_threshold=None,
            schedule="constant",
            synthetic_acceptance_rate=None,
        )

    @property
    def lookup_lengths(self) -> tuple[int, int]:
        """The least and the most tokens that prompt lookup matches."""
        least = self.prompt_lookup_min or self.prompt_lookup_max or _DEFAULT_LOOKUP_TOKENS
        return least, self.prompt_lookup_max or least

    def _check_copying(self) -> None:
        for name in ("prompt_lookup_min", "prompt_lookup_max"):
            value = getattr(self, name)
            if self.method != "prompt_lookup":
                _require(name, value, value is None, f"None for method {self.method!r}")
            _require(name, value, value is None or (is_int(value) and value >= 1), "an int >= 1")
        fits = self.method == "mag" or self.bigram_path is None
        _require("bigram_path", self.bigram_path, fits, f"None for method {self.method!r}")
        least, most = self.lookup_lengths
        expected = f"at least prompt_lookup_min, {least}"
        _require("prompt_lookup_max", self.prompt_lookup_max, most >= least, expected)


@dataclass(frozen=True)
class EngineConfig:
    """Where the models run and how much they may hold.

    Args:
        dtype: "auto" (float32 on CPU, else the checkpoint's), "float32", "bfloat16" or "float16".
        device: "auto" (cuda when there is one), "cpu", "cuda", "cuda:1", ...
        block_size: tokens in one block of the cache.
        num_blocks: blocks in the cache; None derives it from kv_cache_memory.
        kv_cache_memory: bytes of all KV caches together; None = 1 GiB on CPU, half the free memory
            on a GPU.
        max_batch_size: requests decoded together.
        max_model_len: prompt and new tokens of one request at most; None = the model's own limit.
        prefill_chunk_size: tokens of one forward pass while prompts are read.
        prefix_caching: True lets prompts that begin alike share the blocks of what they share, and
            keeps those of ended requests until their space is needed. Off by default: then what is
            read, and how long that takes, never depends on what ran before.
        backend: passed to every kernel, see fastspec_kernels.
    Raises:
        ValueError: a value out of range, or a field that this version does not support yet.
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
    cuda_graphs: str = "auto"
    backend: str = "auto"

    def __post_init__(self):
        dtypes = ("auto", "float32", "bfloat16", "float16")
        _require("dtype", self.dtype, self.dtype in dtypes, f"one of {dtypes}")
        for name in ("block_size", "max_batch_size", "prefill_chunk_size"):
            value = getattr(self, name)
            _require(name, value, is_int(value) and value >= 1, "an int >= 1")
        for name in ("num_blocks", "kv_cache_memory", "max_model_len"):
            value = getattr(self, name)
            _require(name, value, value is None or (is_int(value) and value >= 1), "an int >= 1")
        _require(
            "cuda_graphs", self.cuda_graphs, self.cuda_graphs in ("auto", "off", "on"), "'auto'"
        )
        _require(
            "prefix_caching", self.prefix_caching, isinstance(self.prefix_caching, bool), "a bool"
        )
        if self.cuda_graphs == "on":
            raise ValueError("cuda_graphs: 'on' is not supported yet")


def is_int(value: Any) -> bool:
    """Whether the value is an int and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def _require(name: str, value: Any, holds: bool, expected: str) -> None:
    if not holds:
        raise ValueError(f"{name}: expected {expected}, got {value!r}")


def _reject_unsupported(config: Any, **neutral: Any) -> None:
    for name, value in neutral.items():
        given = getattr(config, name)
        if (tuple(given) if isinstance(given, list) else given) != value:
            raise ValueError(f"{name}: {given!r} is not supported yet, only {value!r}")
