"""How the tokens of one request are chosen."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

from fastspec.config.checks import is_int, reject_unsupported, require


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
            require(name, value, isinstance(value, Real), "a number")
        require("temperature", self.temperature, 0 <= self.temperature < float("inf"), ">= 0")
        require("top_k", self.top_k, is_int(self.top_k) and self.top_k >= 0, "an int >= 0")
        require("top_p", self.top_p, 0 < self.top_p <= 1, "in (0, 1]")
        require("min_p", self.min_p, 0 <= self.min_p <= 1, "in [0, 1]")
        require(
            "seed",
            self.seed,
            self.seed is None or (is_int(self.seed) and 0 <= self.seed < 2**63),
            "an int in [0, 2**63) or None",
        )
        is_positive = is_int(self.max_tokens) and self.max_tokens >= 1
        require("max_tokens", self.max_tokens, is_positive, "an int >= 1")
        for name in ("stop", "stop_token_ids"):
            value = getattr(self, name)
            require(name, value, isinstance(value, Collection), "a tuple or list")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        require("stop", self.stop, all(isinstance(s, str) and s for s in stop), "non-empty strings")
        object.__setattr__(self, "stop", stop)
        ids = tuple(self.stop_token_ids)
        require("stop_token_ids", self.stop_token_ids, all(is_int(i) for i in ids), "ints")
        object.__setattr__(self, "stop_token_ids", ids)
        require(
            "logprobs",
            self.logprobs,
            self.logprobs in (None, False, True, 0),
            "True, False or None",
        )
        reject_unsupported(
            self,
            repetition_penalty=1.0,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            logit_bias=None,
            min_tokens=0,
            n=1,
            logits_processors=(),
        )
