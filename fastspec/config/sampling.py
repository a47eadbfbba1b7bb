"""How the tokens of one request are chosen."""

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from fastspec.config.checks import (
    is_int,
    is_number,
    normalise_ints,
    reject_unsupported,
    require,
)

# What the kernels take: float32 numbers that are not denormal, and int32.
_SMALLEST_FLOAT32, _LARGEST_FLOAT32 = 2.0**-126, (2.0 - 2.0**-23) * 2.0**127
_LARGEST_INT32 = 2**31 - 1


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen, on every verified row, and when it ends.

    Args:
        temperature: 0 = greedy (argmax, lowest id on ties), else logits are divided by it; a normal
            float32, so from 1.2e-38 on.
        top_k: keep the k largest logits, ties included; 0 or -1 = off, as is a number beyond the
            vocabulary.
        top_p: keep the smallest set of tokens with at least this mass; 1 = off.
        min_p: keep tokens with at least this fraction of the best token's probability; 0 = off.
        seed: 0 <= seed < 2**63; None draws one. The same seed gives the same tokens whatever the
            batch.
        max_tokens: number of new tokens at most, >= 1; None = what the model has room for.
        stop: a string or several, None = none; the text ends before the first one found, token_ids
            with the token that completes it.
        stop_token_ids: ids of the target's vocabulary that end the request beside the model's
            end-of-sequence ids, kept in token_ids; None = none.
        ignore_eos: do not stop at the model's end-of-sequence ids.
        logprobs: True or 0 returns the target's log-probability of each emitted token (greedy: at
            temperature 1), None or False nothing. More than 0, which would ask for those of other
            tokens, is not supported yet.
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
    max_tokens: int | None = 128
    min_tokens: int = 0
    stop: str | Collection[str] | None = ()
    stop_token_ids: Collection[int] | None = ()
    ignore_eos: bool = False
    logprobs: bool | int | None = None
    n: int = 1
    logits_processors: tuple[Any, ...] | list[Any] | None = ()

    def __post_init__(self):
        for name in ("temperature", "top_p", "min_p"):
            value = getattr(self, name)
            require(name, value, is_number(value), "a finite number")
            object.__setattr__(self, name, float(value))
        heat = self.temperature
        fits = heat == 0 or _SMALLEST_FLOAT32 <= heat <= _LARGEST_FLOAT32
        require("temperature", heat, fits, "0 or from 1.2e-38 to 3.4e38")
        object.__setattr__(self, "temperature", abs(heat))  # -0.0 is 0
        require("top_p", self.top_p, 0 < self.top_p <= 1, "in (0, 1]")
        require("min_p", self.min_p, 0 <= self.min_p <= 1, "in [0, 1]")
        normalise_ints(self, -1, "top_k")
        object.__setattr__(self, "top_k", min(max(self.top_k, 0), _LARGEST_INT32))
        normalise_ints(self, 0, "seed", most=2**63 - 1)
        if self.max_tokens is not None:
            normalise_ints(self, 1, "max_tokens")
        require("ignore_eos", self.ignore_eos, isinstance(self.ignore_eos, bool), "a bool")
        self._normalise_stops()
        returns_logprobs = self.logprobs is True or (is_int(self.logprobs) and self.logprobs == 0)
        is_off = self.logprobs is None or self.logprobs is False
        require("logprobs", self.logprobs, returns_logprobs or is_off, "True, 0, False or None")
        if returns_logprobs:
            object.__setattr__(self, "logprobs", True)
        if self.logits_processors is None:
            object.__setattr__(self, "logits_processors", ())
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

    def _normalise_stops(self) -> None:
        """Keep stop strings and ids as tuples."""
        strings = (self.stop,) if isinstance(self.stop, str) else _as_tuple("stop", self.stop)
        fits = all(isinstance(text, str) and text for text in strings)
        require("stop", self.stop, fits, "non-empty strings")
        object.__setattr__(self, "stop", strings)
        ids = _as_tuple("stop_token_ids", self.stop_token_ids)
        fits = all(is_int(token_id) and token_id >= 0 for token_id in ids)
        require("stop_token_ids", self.stop_token_ids, fits, "ints >= 0")
        object.__setattr__(self, "stop_token_ids", tuple(int(token_id) for token_id in ids))


def _as_tuple(name: str, value: Any) -> tuple:
    is_list = isinstance(value, (Sequence, Set)) and not isinstance(value, (str, bytes))
    require(name, value, value is None or is_list, "a list or None")
    return () if value is None else tuple(value)
