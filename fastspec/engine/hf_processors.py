"""Logits processors of transformers that are sampling parameters here, and the others."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.generation.logits_process import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

# In the order in which the engine applies them, each with its parameter's name.
_WARPERS = {
    TemperatureLogitsWarper: "temperature",
    TopKLogitsWarper: "top_k",
    TopPLogitsWarper: "top_p",
    MinPLogitsWarper: "min_p",
}
# What these make of a row depends on no other row, and not on its place in the batch.
ROW_BY_ROW = (
    *_WARPERS,
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TypicalLogitsWarper,
)
_STATEFUL = (SynthIDTextWatermarkLogitsProcessor, UnbatchedClassifierFreeGuidanceLogitsProcessor)


def processed(
    processors: Sequence[Any], text: Tensor, scores: Tensor, row: int, num_rows: int
) -> Tensor:
    """Return what batch processors make of the scores [1, V] of one of their rows.

    Args:
        text: [1, n], padded as in the batch. Processors that may look at a row's place in the
            batch see it in every row.
    """
    scores = scores.clone()
    for processor in processors:
        if type(processor) in ROW_BY_ROW:
            scores = processor(text, scores)
        else:
            whole = processor(text.expand(num_rows, -1), scores.repeat(num_rows, 1))
            scores = whole[row : row + 1]
    return scores


def split_warpers(processors: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
    """Split off the trailing processors that our sampling parameters can express.

    Only trailing ones in the engine's order: one before another processor must stay before it.
    """
    rest, sampling = list(processors), {}
    while rest and type(rest[-1]) is LogitNormalization:  # changes no probability
        rest.pop()
    for kind in reversed(_WARPERS):
        if rest and type(rest[-1]) is kind:
            kept, filler = (
                getattr(rest[-1], name, default)
                for name, default in (("min_tokens_to_keep", 1), ("filter_value", -torch.inf))
            )
            if kept == 1 and filler == -torch.inf:
                sampling[_WARPERS[kind]] = getattr(rest.pop(), _WARPERS[kind])
    return rest, sampling


def split_rules(
    processors: Sequence[Any], ends: list[int], length: int, paddings: list[int]
) -> tuple[dict[str, Any], list[Any]]:
    """Turn the leading processors into parameters, which the engine applies first; keep the rest.

    Args:
        length: length of the padded prompts.
        paddings: padding tokens before each of them.
    """
    for processor in processors:
        if isinstance(processor, _STATEFUL):
            name = type(processor).__name__
            raise ValueError(f"logits_processor: {name} keeps state, which is not supported")
    rules: dict[str, Any] = {"min_tokens": 0}
    rest = list(processors)
    while rest and _take_rule(rest[0], rules, ends, length, paddings):
        rest.pop(0)
    return rules, rest


def _take_rule(
    processor: Any, rules: dict[str, Any], ends: list[int], length: int, paddings: list[int]
) -> bool:
    """Add a processor's effect to the rules, if they can express it in the same order."""
    kind = type(processor)
    if kind is RepetitionPenaltyLogitsProcessor and "repetition_penalty" not in rules:
        ignored = processor.prompt_ignore_length
        ignored = ignored.tolist() if isinstance(ignored, Tensor) else ignored
        if (ignored or [0] * len(paddings)) != paddings:
            return False
        rules["repetition_penalty"] = processor.penalty
    elif kind in (MinLengthLogitsProcessor, MinNewTokensLengthLogitsProcessor):
        if processor.eos_token_id.tolist() != ends:
            return False
        least = (
            processor.min_length
            if kind is MinLengthLogitsProcessor
            else (processor.prompt_length_to_skip + processor.min_new_tokens)
        )
        rules["min_tokens"] = max(rules["min_tokens"], least - length)
    elif kind in (SequenceBiasLogitsProcessor, NoBadWordsLogitsProcessor):
        biases = processor.sequence_bias
        is_ban = all(bias == -torch.inf for bias in biases.values())
        comes_first = rules == {"min_tokens": 0}  # penalties come after biases
        if any(len(ids) != 1 for ids in biases) or not (is_ban or comes_first):
            return False
        rules["logit_bias"] = rules.get("logit_bias", {}) | {i: b for (i,), b in biases.items()}
    elif kind is SuppressTokensLogitsProcessor:
        banned = dict.fromkeys(processor.suppress_tokens.tolist(), -torch.inf)
        rules["logit_bias"] = rules.get("logit_bias", {}) | banned
    else:
        return False
    return True
