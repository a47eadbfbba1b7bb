"""How the tokens of one request are chosen."""

from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from fastspec.config.checks import is_int
from fastspec.config.options import (
    BOOL,
    LARGEST_INT32,
    Kind,
    check_options,
    documented,
    integer,
    not_yet,
    number,
    option,
)

# What the kernels take: float32 numbers that are not denormal, and int32.
_SMALLEST_FLOAT32, _LARGEST_FLOAT32 = 2.0**-126, (2.0 - 2.0**-23) * 2.0**127


def _several(each: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Whether a value is None, or a list or set of which all members fit."""

    def fits(value: Any) -> bool:
        is_list = isinstance(value, (Sequence, Set)) and not isinstance(value, (str, bytes))
        return value is None or (is_list and all(map(each, value)))

    return fits


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


_TEMPERATURE = number(
    "0 or from 1.2e-38 to 3.4e38",
    lambda value: value == 0 or _SMALLEST_FLOAT32 <= value <= _LARGEST_FLOAT32,
)
_TOP_K = Kind(
    "an int >= -1",
    lambda value: is_int(value) and value >= -1,
    lambda value: min(max(int(value), 0), LARGEST_INT32),
    int,
)
_STOP = Kind(
    "non-empty strings",
    lambda value: _is_text(value) or _several(_is_text)(value),
    lambda value: (value,) if isinstance(value, str) else tuple(value or ()),
    list[str],
)
_STOP_IDS = Kind(
    "a list of ints >= 0",
    _several(lambda token_id: is_int(token_id) and token_id >= 0),
    lambda value: tuple(int(token_id) for token_id in value or ()),
    list[int],
)
_LOGPROBS = Kind(
    "True, 0, False or None",
    lambda value: isinstance(value, bool) or (is_int(value) and value == 0),
    lambda value: value is not False,
    None,
)


@documented
@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen, on every verified row, and when it ends."""

    temperature: float = option(
        1.0,
        _TEMPERATURE,
        "0 is greedy (the lowest id on ties), above 0 logits are divided by it.",
        "A normal float32, so from 1.2e-38 on.",
    )
    top_k: int = option(
        0,
        _TOP_K,
        "Sample among the k best tokens, ties included; 0 or -1 is off.",
        "A number beyond the vocabulary is off, too.",
    )
    top_p: float = option(
        1.0,
        number("a number in (0, 1]", lambda value: 0 < value <= 1),
        "Sample among the best tokens of this total probability; 1 is off.",
    )
    min_p: float = option(
        0.0,
        number("a number in [0, 1]", lambda value: 0 <= value <= 1),
        "Drop tokens below this fraction of the best one's probability; 0 is off.",
    )
    repetition_penalty: float = not_yet(1.0)
    presence_penalty: float = not_yet(0.0)
    frequency_penalty: float = not_yet(0.0)
    logit_bias: Mapping[int, float] | None = not_yet(None)
    seed: int | None = option(
        None,
        integer(0, 2**63 - 1),
        "Makes samples repeatable; by default each run differs.",
        "The same seed gives the same tokens whatever else is in the batch.",
    )
    max_tokens: int | None = option(
        128,
        integer(1, None),
        "New tokens of each prompt at most.",
        "None = as many as the model has room for.",
        takes_none=True,
    )
    min_tokens: int = not_yet(0)
    stop: str | Collection[str] | None = option(
        (),
        _STOP,
        "End the text before this string; may be given several times.",
        "A string or several; token_ids ends with the token that completes one.",
    )
    stop_token_ids: Collection[int] | None = option(
        (),
        _STOP_IDS,
        "End after this token, as after an end-of-sequence token; may be given several times.",
        "Ids of the target's vocabulary; token_ids keeps the one that was found.",
    )
    include_stop_str_in_output: bool = option(
        False,
        BOOL,
        "End the text after the stop string that was found, not before it.",
        "Or after the token of stop_token_ids, or the model's end-of-sequence token, if it has a"
        " text.",
    )
    skip_special_tokens: bool = option(
        True,
        BOOL,
        "Leave special tokens out of the text; stop strings do not see them then.",
        flags=("--skip-special-tokens/--no-skip-special-tokens",),
    )
    ignore_eos: bool = option(False, BOOL, "Go on after the model's end-of-sequence tokens.")
    logprobs: bool | int | None = option(
        None,
        _LOGPROBS,
        "True or 0 returns the target's log-probability of each emitted token.",
        "Of greedy requests at temperature 1. More than 0, which would ask for those of other"
        " tokens, is not supported yet.",
    )
    n: int = not_yet(1)
    logits_processors: tuple[Any, ...] | list[Any] | None = not_yet(())

    def __post_init__(self):
        check_options(self)
