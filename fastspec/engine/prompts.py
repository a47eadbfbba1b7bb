"""Normalises the accepted forms of prompts to texts and lists of ids."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

# A mapping is a BatchEncoding, or a dict with a BatchEncoding's key or one of vLLM's.
Prompt = str | Sequence[int] | Tensor | np.ndarray | Mapping[str, Any]
Message = Mapping[str, Any]
_KEYS = ("prompt", "prompt_token_ids", "input_ids")
_ONE = "a text, a list of token ids, a mapping, a tensor or an array"
_SEVERAL = f"{_ONE}, or a list of such prompts"


def as_prompt_list(
    prompts: Any, name: str = "prompts", one: str = "prompt", pad_ids: Collection[int] = ()
) -> list[str | list[int]]:
    """Return one or several prompts, each as a text or a list of unchecked ids.

    Args:
        pad_ids: ids that at the ends of a batch's rows can only be padding.
    Raises:
        ValueError: not a supported form, or padding without a mask; the message begins with `name`,
            with `one` for a prompt in a list, or with the key of a mapping.
    """
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Mapping):
        return _of_mapping(prompts, one, pad_ids)
    is_array = isinstance(prompts, (Tensor, np.ndarray))
    several: list[Any] = _rows(name, prompts) if is_array else _as_list(name, prompts, _SEVERAL)
    if not several:
        raise ValueError(f"{name}: the list is empty")
    if is_array:
        _refuse_padding(name, several, pad_ids)
        return several
    is_batch = isinstance(several[0], (Sequence, Mapping, Tensor, np.ndarray))
    if not is_batch:
        return [several]
    read = []
    for place, each in enumerate(several):
        with telling_which(place, len(several), name):
            read.append(as_prompt(each, one))
    return read


class PromptTooLong(ValueError):
    """A prompt that has more tokens than the model, or a limit, allows."""


@contextmanager
def telling_which(place: int, count: int, name: str = "prompts") -> Iterator[None]:
    """Say at the end of errors which of several prompts they are about."""
    try:
        yield
    except ValueError as error:
        if count == 1:
            raise
        kind = PromptTooLong if isinstance(error, PromptTooLong) else ValueError
        raise kind(f"{error} ({name}[{place}])") from error


def as_prompt(prompt: Any, name: str = "prompt") -> str | list[int]:
    """Return one prompt, which may be a batch of one as a tensor, array or mapping; errors begin
    with `name`."""
    if not isinstance(prompt, (Mapping, Tensor, np.ndarray)):
        return prompt if isinstance(prompt, str) else _as_list(name, prompt, _ONE)
    several = as_prompt_list(prompt, name, name)
    if len(several) != 1:
        raise ValueError(f"{name}: expected one, got a batch of {len(several)}")
    return several[0]


def as_conversations(messages: Any) -> list[list[Message]]:
    """Return one or several conversations as lists of messages.

    Raises:
        ValueError: not a conversation, or an empty one.
    """
    several = _as_list("messages", messages)
    if several and isinstance(several[0], Mapping):
        several = [several]
    conversations = [_as_list("messages", each) for each in several]
    if not conversations or not all(conversations):
        raise ValueError("messages: a conversation is empty")
    return conversations


def _of_mapping(
    prompt: Mapping[str, Any], name: str, pad_ids: Collection[int]
) -> list[str | list[int]]:
    given = [key for key in _KEYS if key in prompt]
    if len(given) != 1:
        raise ValueError(f"{name}: expected one of the keys {_KEYS}, got {[*prompt]}")
    (key,) = given
    value, mask = prompt[key], prompt.get("attention_mask") if key == "input_ids" else None
    for other, marks in prompt.items():
        if other == "mm_token_type_ids" and not torch.as_tensor(marks).any():  # 0 is text
            continue
        if other != key and (other != "attention_mask" or key != "input_ids"):
            raise ValueError(f"{other}: not supported together with {key} in a prompt")
    if key == "prompt":
        if not isinstance(value, str):
            raise ValueError(f"prompt: expected a text, got {type(value).__name__}")
        return [value]
    rows = _rows(key, value)
    if mask is not None:
        return [*_unmasked(rows, mask)]
    _refuse_padding(key, rows, pad_ids)
    return [*rows]


def _refuse_padding(name: str, rows: list[list[int]], pad_ids: Collection[int]) -> None:
    for place, row in enumerate(rows):
        if len(rows) > 1 and not {*row[:1], *row[-1:]}.isdisjoint(pad_ids):
            raise ValueError(
                f"{name}: row {place} begins or ends with padding, token {row[0]} or {row[-1]},"
                " which would be read as text; give the tokenizer's output with its attention_mask,"
                " or lists of ids"
            )


def _unmasked(rows: list[list[int]], mask: Any) -> list[list[int]]:
    """Remove the padding of rows."""
    if isinstance(mask, (Tensor, np.ndarray)):
        mask = mask * 1  # converts bools to ints
    masks = _rows("attention_mask", mask)
    if [len(row) for row in masks] != [len(row) for row in rows]:
        raise ValueError("attention_mask: expected the shape of input_ids")
    kept = []
    for row, places in zip(rows, masks, strict=True):
        seen = [index for index, place in enumerate(places) if place]
        has_hole = seen and seen[-1] - seen[0] >= len(seen)
        if has_hole or any(place not in (0, 1) for place in places):
            raise ValueError(
                f"attention_mask: expected 1s without a gap, and 0s at the ends, got {places!r:.60}"
            )
        kept.append(row[seen[0] : seen[-1] + 1] if seen else [])
    return kept


def _rows(name: str, value: Any) -> list[list[int]]:
    """Return ids of one or two dimensions as rows; the contents of a list are not checked."""
    if isinstance(value, (Tensor, np.ndarray)):
        kind = str(value.dtype).removeprefix("torch.")
        if value.ndim not in (1, 2) or not kind.startswith(("int", "uint")):
            raise ValueError(
                f"{name}: expected integers in one or two dimensions, got {kind} in {value.ndim}"
            )
        if isinstance(value, Tensor) and (value.is_meta or value.layout != torch.strided):
            kind = "no values" if value.is_meta else value.layout
            raise ValueError(f"{name}: expected a dense tensor, got one of {kind}")
        return value.tolist() if value.ndim == 2 else [value.tolist()]
    several = _as_list(name, value)
    if several and isinstance(several[0], (Sequence, Tensor, np.ndarray)):
        return [row for each in several for row in _rows(name, each)]
    return [several]


def _as_list(name: str, value: Any, expected: str = "a list") -> list:
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise ValueError(f"{name}: expected {expected}, got {type(value).__name__}")
    return list(value)
