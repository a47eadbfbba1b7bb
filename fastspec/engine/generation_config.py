"""Converts transformers' GenerationConfig to sampling parameters, and warns of what a model's own
has that requests do not apply."""

import logging
from functools import cache
from typing import Any

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from fastspec.config import SamplingParams
from fastspec.models.loading import eos_token_ids, ids_in

logger = logging.getLogger(__name__)

_DEFAULTS = {"temperature": 1.0, "top_k": 50, "top_p": 1.0}  # of `generate`
_NUM_NEW = 20  # tokens that `generate` writes by default
_READ = {
    *_DEFAULTS,
    *("max_length", "max_new_tokens", "min_length", "min_new_tokens"),
    *("do_sample", "min_p", "repetition_penalty"),
    *("num_return_sequences", "eos_token_id", "stop_strings"),
}
# The engine does its own padding and caching; the rest says where the object comes from.
_WITHOUT_EFFECT = {
    *("pad_token_id", "bos_token_id", "decoder_start_token_id"),
    *("use_cache", "transformers_version"),
}
_KEPT_BY_THE_MODEL = ("eos_token_id", "cache_implementation")
# Values that turn a field off or are its default. None and False do so for every field.
_OFF = {
    "min_length": (0,),
    "min_new_tokens": (0,),
    "repetition_penalty": (1,),
    "bad_words_ids": ([],),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "sequence_bias": ([], {}),
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "length_penalty": (1,),
    "diversity_penalty": (0,),
    "penalty_alpha": (0,),
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "guidance_scale": (1,),
    "cache_implementation": ("dynamic",),
    "assistant_confidence_threshold": (0, 0.4),
    "num_assistant_tokens_schedule": ("constant",),
}
_PROCESSOR = "logits_processors, with transformers' own"
# Fields that change greedy text, and the SamplingParams that do the same; None = there are none.
_CHANGES_GREEDY_TEXT = {
    "repetition_penalty": "repetition_penalty",
    "min_length": "min_tokens",
    "min_new_tokens": "min_tokens",
    "stop_strings": "stop",
    "bad_words_ids": "bad_words",
    "suppress_tokens": "logit_bias, -inf for each",
    "begin_suppress_tokens": _PROCESSOR,
    "sequence_bias": _PROCESSOR,
    "no_repeat_ngram_size": _PROCESSOR,
    "encoder_no_repeat_ngram_size": _PROCESSOR,
    "encoder_repetition_penalty": _PROCESSOR,
    "watermarking_config": _PROCESSOR,
    "forced_bos_token_id": _PROCESSOR,
    "forced_eos_token_id": _PROCESSOR,
    "exponential_decay_length_penalty": _PROCESSOR,
    "num_beams": None,
    "guidance_scale": None,
    "penalty_alpha": None,
    "dola_layers": None,
    "constraints": None,
    "force_words_ids": None,
}


def warn_of_unapplied(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Log what the model's generation_config changes in the greedy text of `generate`, but not in
    that of requests, which follow their SamplingParams alone; the same message only once."""
    name, own = type(model).__name__, getattr(model, "generation_config", None)
    if own is None:
        return
    unapplied = []
    for field, option in _CHANGES_GREEDY_TEXT.items():
        if not is_off(field, value := getattr(own, field, None)):
            way = "not supported" if option is None else f"SamplingParams.{option}"
            unapplied.append(f"{field}={value!r:.60} ({way})")
    if unapplied:
        _warn_once(
            f"target: the generation_config of {name} changes the text of generate, but not that of"
            f" requests, unless they ask for it: {', '.join(unapplied)}"
        )
    others = ids_in(model.config) or ids_in(tokenizer)
    if others and not eos_token_ids(model):
        _warn_once(
            f"target: the generation_config of {name} has no eos_token_id, so no token ends a text,"
            f" as in generate: set it, or SamplingParams.stop_token_ids={sorted(others)}"
        )


@cache
def _warn_once(message: str) -> None:
    logger.warning(message)


def is_off(name: str, value: Any) -> bool:
    """Whether this value of a GenerationConfig field has no effect."""
    return value is None or value is False or value in _OFF.get(name, ())


def _given(config: GenerationConfig) -> dict[str, Any]:
    fields = vars(config).items()
    return {n: value for n, value in fields if value is not None and not n.startswith("_")}


def params_of(
    config: GenerationConfig, num_given: int, of_model: GenerationConfig | None = None
) -> SamplingParams:
    """Return sampling parameters with the same effect as the config has in `generate`.

    Args:
        num_given: tokens that max_length and min_length count in addition to the new ones.
        of_model: the model's own config, which sets what the other one leaves at None. Its
            end-of-sequence tokens are the engine's anyway.
    Raises:
        ValueError: a field is not supported, or a value is out of range.
    """
    if not isinstance(config, GenerationConfig):
        raise ValueError(
            f"generation_config: expected a GenerationConfig, got {type(config).__name__}"
        )
    own = _given(config)
    others = {} if of_model is None else _given(of_model)
    given = {name: value for name, value in others.items() if name not in _KEPT_BY_THE_MODEL} | own
    fresh = vars(GenerationConfig())
    for name, value in given.items():
        is_default = is_off(name, value) or value == fresh.get(name)
        if not is_default and name not in _READ | _WITHOUT_EFFECT:
            whose = "" if name in own else ", as the model's generation_config has it"
            raise ValueError(f"generation_config: {name} is not supported, got {value!r}{whose}")
    given = _DEFAULTS | given
    longest = given.get("max_length", _NUM_NEW + num_given)
    max_tokens = given.get("max_new_tokens", longest - num_given)
    if max_tokens < 1:
        name = "max_new_tokens" if "max_new_tokens" in given else "max_length"
        raise ValueError(
            f"generation_config: {name}, {given[name]}, leaves no room after {num_given} tokens"
        )
    # As in `generate`, min_new_tokens counts alone, whichever of the two configs has it.
    least = given.get("min_new_tokens", max(0, given.get("min_length", 0) - num_given))
    if given.get("stop_strings") and least > 0:
        raise ValueError("generation_config: stop_strings are not supported with a minimum length")
    fields: dict[str, Any] = {"temperature": 0}
    if given.get("do_sample"):
        fields = {
            name: given[name]
            for name in ("temperature", "top_k", "top_p", "min_p")
            if name in given
        }
    ends = given.get("eos_token_id")
    if ends is not None:
        fields |= {"ignore_eos": True, "stop_token_ids": [ends] if isinstance(ends, int) else ends}
    return SamplingParams(
        **fields,
        max_tokens=max_tokens,
        min_tokens=min(least, max_tokens),
        repetition_penalty=given.get("repetition_penalty", 1.0),
        n=given.get("num_return_sequences", 1),
        stop=given.get("stop_strings"),
    )
