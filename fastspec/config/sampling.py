"""How the tokens of one request are chosen."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from fastspec.config.checks import is_int, is_number, refuse, require
from fastspec.config.options import (
    BOOL,
    LARGEST_INT32,
    Kind,
    Options,
    anything,
    documented,
    integer,
    number,
    option,
)

_MOST_LOGPROBS = 100
_DECIMAL_ID = re.compile("0|[1-9][0-9]{0,9}")  # one spelling per id, so that no two keys are equal
# What the kernels take: float32 numbers that are not denormal, and int32.
_SMALLEST_FLOAT32, _LARGEST_FLOAT32 = 2.0**-126, (2.0 - 2.0**-23) * 2.0**127


def _several(each: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Whether a value is None, or a list or set of which all members fit."""

    def fits(value: Any) -> bool:
        is_list = isinstance(value, (Sequence, Set)) and not isinstance(value, (str, bytes))
        return value is None or (is_list and all(map(each, value)))

    return fits


def _members(value: Any) -> Any:
    """The members of a list or set, those of a set in an order that all processes share."""
    return sorted(value, key=repr) if isinstance(value, Set) else value or ()


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _is_ids(value: Any) -> bool:
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        return False
    return len(value) > 0 and all(is_int(each) and each >= 0 for each in list(value))


def _is_decimal_id(value: Any) -> bool:
    return isinstance(value, str) and _DECIMAL_ID.fullmatch(value) is not None


def _as_bias(value: Any) -> dict[int, float]:
    """A bias for each token; in JSON the ids are strings."""
    expected = 'a mapping like {"15": -5.5} of token ids to numbers; -inf bans a token'
    require("logit_bias", value, isinstance(value, Mapping), expected)
    bias = {}
    for key, added in value.items():
        is_id = (is_int(key) and key >= 0) or _is_decimal_id(key)
        require("logit_bias", key, is_id, "token ids as keys, in decimal like 15 and not 015")
        require("logit_bias", key, int(key) not in bias, "each token id once")
        is_ban = isinstance(added, float) and added == float("-inf")
        is_bias = is_ban or (is_number(added) and abs(added) <= _LARGEST_FLOAT32)
        require("logit_bias", value, is_bias, expected)
        bias[int(key)] = float(added)
    return bias


def _as_structure(value: Any) -> dict[str, Any]:
    """The form that the output must have."""
    expected = f"a mapping with one of {', '.join(_GRAMMARS)}"
    fits = isinstance(value, Mapping) and len(value) == 1 and next(iter(value)) in _GRAMMARS
    require("structured_outputs", value, fits, expected)
    ((kind, form),) = value.items()
    if kind == "json":
        fits, expected = isinstance(form, (str, Mapping)), "json: a schema, as mapping or string"
    elif kind == "json_object":
        fits, expected = form is True, "json_object: True"
    elif kind == "choice":
        is_list = isinstance(form, Sequence) and not isinstance(form, str)
        fits, expected = is_list and bool(form) and all(map(_is_text, form)), "choice: strings"
    else:
        fits, expected = _is_text(form), f"{kind}: a string"
    require("structured_outputs", value, fits, expected)
    return dict(value)


def _as_processors(value: Any) -> tuple[Any, ...]:
    """Functions of token ids and scores."""
    several = () if value is None else value
    fits = isinstance(several, Sequence) and all(map(callable, several))
    require("logits_processors", value, fits, "functions of (input_ids, scores)")
    return tuple(several)


_TEMPERATURE = number(
    "0, or a number from 1.2e-38 to 3.4e38",
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
    lambda value: (value,) if isinstance(value, str) else tuple(_members(value)),
    list[str],
)
_STOP_IDS = Kind(
    "a list of ints >= 0",
    _several(lambda token_id: is_int(token_id) and token_id >= 0),
    lambda value: tuple(int(token_id) for token_id in _members(value)),
    list[int],
)
_LOGPROBS = Kind(
    f"a bool or an int from 0 to {_MOST_LOGPROBS}",
    lambda value: isinstance(value, bool) or (is_int(value) and 0 <= value <= _MOST_LOGPROBS),
    lambda value: None if value is False else int(value) * (value is not True),
    int,
)
_PENALTY = number("a number from -2 to 2", lambda value: -2 <= value <= 2)
_WORDS = Kind(
    "strings or lists of token ids, none of them empty",
    lambda value: _is_text(value) or _several(lambda word: _is_text(word) or _is_ids(word))(value),
    lambda value: (
        (value,)
        if isinstance(value, str)
        else tuple(
            word if isinstance(word, str) else tuple(map(int, word)) for word in _members(value)
        )
    ),
    list[str],
)
_PREDICTION = Kind(
    "a text or a list of ints >= 0",
    lambda value: (
        value is None
        or isinstance(value, str)
        or (isinstance(value, (list, tuple, range)) and (not value or _is_ids(value)))
    ),
    lambda value: value if value is None or isinstance(value, str) else tuple(map(int, value)),
    None,
)
_GRAMMARS = ("json", "json_object", "regex", "choice", "grammar")


@documented
@dataclass(frozen=True)
class SamplingParams(Options):
    """How the tokens of one request are chosen, at every verified position, and when it ends."""

    temperature: float = option(
        1.0,
        _TEMPERATURE,
        "Sampling temperature; 0 is greedy (the lowest id wins ties).",
        "Logits are divided by it. Above 0 it must be a normal float32, so at least 1.2e-38.",
    )
    top_k: int = option(
        0,
        _TOP_K,
        "Sample from the k most probable tokens, ties included; 0 or -1 is off.",
        "A number larger than the vocabulary is also off.",
    )
    top_p: float = option(
        1.0,
        number("a number in (0, 1]", lambda value: 0 < value <= 1),
        "Sample from the most probable tokens that add up to this probability, ties at the boundary"
        " included; 1 is off.",
    )
    min_p: float = option(
        0.0,
        number("a number in [0, 1]", lambda value: 0 <= value <= 1),
        "Drop tokens below this fraction of the highest probability; 0 is off.",
    )
    repetition_penalty: float = option(
        1.0,
        number("a number from 1e-30 to 1e30", lambda value: 1e-30 <= value <= 1e30),
        "Above 1, make tokens of the prompt and the output less likely; 1 is off.",
        "Their positive logits are divided by it, negative ones multiplied (Keskar et al.,"
        " 1909.05858).",
    )
    presence_penalty: float = option(
        0.0,
        _PENALTY,
        "Subtracted from the logit of every token already generated; 0 is off.",
    )
    frequency_penalty: float = option(
        0.0,
        _PENALTY,
        "Subtracted once per occurrence of the token in the generated text; 0 is off.",
    )
    logit_bias: Mapping[int, float] | None = option(
        None,
        anything("a mapping of token ids to numbers", _as_bias),
        'Values added to the logits of tokens, like {"15": -5.5}; -inf bans a token.',
        "Keys are ints, or strings of their decimal digits without leading zeros. Applied before"
        " the penalties, which come before temperature and filters.",
    )
    bad_words: str | Collection[str | Sequence[int]] | None = option(
        (),
        _WORDS,
        "Never generate this; may be given several times.",
        "Strings, also matched after a space, or lists of token ids. The token that would complete"
        " one after the text so far is banned; other tokenizations of a string are not.",
    )
    allowed_token_ids: Collection[int] | None = option(
        None,
        Kind(
            "a list of ints >= 0, not empty",
            lambda value: bool(value) and _STOP_IDS.fits(value),
            lambda value: tuple(int(token_id) for token_id in value),
            list[int],
        ),
        "Generate only these tokens; may be given several times.",
        "Include a token that ends the text, or only max_tokens ends it.",
    )
    structured_outputs: Mapping[str, Any] | None = option(
        None,
        anything(f"a mapping with one of {', '.join(_GRAMMARS)}", _as_structure),
        'Required form of the output, like {"json": {"type": "object"}} or {"regex": "[0-9]+"}.',
        "json takes a JSON schema, json_object True, regex a pattern, choice a list of strings,"
        " grammar an EBNF grammar in the syntax of Lark (start: ...) or GBNF (root ::= ...). Needs"
        " llguidance, which the extra [grammar] installs."
        " Tokens that do not fit are never drafted, drawn or accepted. Where the form forces text,"
        " only its usual tokenization may follow, with log-probability 0.",
        aliases=("guided_decoding (earlier vLLM)",),
    )
    seed: int | None = option(
        None,
        integer(0, 2**63 - 1),
        "Seed that makes samples repeatable; by default each run differs.",
        "The same seed gives the same tokens whatever else is in the batch; in bfloat16 only if the"
        " model's logits do not depend on the batch, see docs/requests.md.",
    )
    max_tokens: int | None = option(
        128,
        integer(1, None),
        "Maximum number of new tokens per prompt.",
        "None means as many as the model has room for; no text gets longer than that.",
        aliases=("max_new_tokens (Hugging Face)",),
        takes_none=True,
    )
    min_tokens: int = option(
        0,
        integer(0),
        "Generate at least this many new tokens.",
        "Until then no end-of-sequence or stop token is drawn, and stop strings are ignored.",
    )
    stop: str | Collection[str] | None = option(
        (),
        _STOP,
        "End the text before this string; may be given several times.",
        "A string or several; token_ids ends with the token that completes one. Strings are taken"
        " literally: in most shells a newline is $'\\n'.",
    )
    stop_token_ids: Collection[int] | None = option(
        (),
        _STOP_IDS,
        "End after this token, as after an end-of-sequence token; may be given several times.",
        "Ids in the target's vocabulary; token_ids keeps the one that was found.",
    )
    include_stop_str_in_output: bool = option(
        False,
        BOOL,
        "End the text after the stop string that was found, not before it.",
        "The same applies to a token of stop_token_ids or the model's end-of-sequence token, if it"
        " has text.",
    )
    skip_special_tokens: bool = option(
        True,
        BOOL,
        "Leave special tokens out of the text; stop strings then do not see them.",
        flags=("--skip-special-tokens/--no-skip-special-tokens",),
    )
    ignore_eos: bool = option(False, BOOL, "Continue after the model's end-of-sequence tokens.")
    logprobs: bool | int | None = option(
        None,
        _LOGPROBS,
        "Return the target's log-probability of each new token and of this many top tokens.",
        "True or 0 returns only those of the new tokens. They are from the distribution that a"
        " token is drawn from, after penalties, temperature and filters; for greedy requests, at"
        " temperature 1.",
    )
    prompt_logprobs: int | None = option(
        None,
        integer(0, _MOST_LOGPROBS),
        "Return log-probabilities of the prompt's tokens and of this many top tokens.",
        "They are from the model's unchanged logits: without biases, penalties, bans, processors,"
        " temperature and filters. Such a prompt is read in full, even if prefix caching has part"
        " of it.",
    )
    n: int = option(
        1,
        replace(integer(1, 2**14), flag_type=None),
        "Number of texts to sample for the prompt; `RequestOutput.outputs` has them all.",
        "The prompt is read once, or once per text where `prefix_caching` is not supported. The"
        " first text uses the seed, so it equals that of n=1; text i uses a seed that splitmix64"
        " derives from the seed and i, see `fastspec.engine.request_factory.sample_seed`. Each text"
        " counts towards max_batch_size.",
    )
    drafter: str | None = option(
        None,
        Kind("a name", lambda value: isinstance(value, str), flag_type=None),
        "Drafter to use: a name given to `Engine.add_drafter`, or none; by default the engine's.",
        "Its options apply to the request: method, K, acceptance rule and schedule.",
    )
    num_speculative_tokens: int | None = option(
        None,
        replace(integer(0), flag_type=None),
        "Tokens proposed in each step, up to the drafter's K, which is the default; 0 is none.",
        "A text drafted in chains is then the same as in an engine with that K. With suffix_tokens"
        " the number also limits copies, which K itself does not.",
    )
    prediction: str | Sequence[int] | None = option(
        None,
        _PREDICTION,
        "What the output may resemble, such as a file before a change; drafters copy from it, too.",
        "A text or token ids, which the model does not read: greedy output is the same without it,"
        " and sampled output has the same distribution. It is like OpenAI's predicted outputs, and"
        ' needs a drafter that copies: prompt_lookup, ngram (only with ngram_store="request"),'
        " suffix, mag, a cascade that ends with MaG or prompt lookup, or suffix_tokens, tree_suffix"
        " or tree_prompt_lookup beside a draft model. It has at most as many tokens as the model"
        " has room for.",
    )
    logits_processors: Sequence[Any] | None = option(
        (),
        Kind("functions of (input_ids, scores)", lambda value: True, _as_processors, None),
        "Functions that change the scores of the next token, like transformers' LogitsProcessor.",
        "Called as processor(input_ids [1, n] int64, scores [1, V] float32) -> scores for each"
        " verified row, with the tokens before it, drafts included. They run after penalties,"
        " biases, bad_words and min_tokens, and before allowed_token_ids, structured outputs,"
        " temperature and filters. They must depend on nothing else. If one raises, only its"
        " request ends.",
    )

    def __post_init__(self):
        super().__post_init__()
        least, most = self.min_tokens, self.max_tokens
        fits = most is None or least <= most
        require("min_tokens", least, fits, f"at most max_tokens ({most})")
        largest = max((self.logit_bias or {}).values(), default=0.0)
        fits = largest <= _LARGEST_FLOAT32 * self.repetition_penalty
        expected = f"numbers that float32 can hold divided by {self.repetition_penalty}"
        require("logit_bias", self.logit_bias, fits, f"{expected}, the repetition_penalty")
        if self.structured_outputs is not None and self.ignore_eos:
            refuse("structured_outputs", self.structured_outputs, "not with ignore_eos")
        if self.structured_outputs is not None and self.min_tokens:
            refuse("min_tokens", self.min_tokens, "not with structured_outputs")
