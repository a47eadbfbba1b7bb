"""Draft shapes to try, and untrained drafts of these shapes, which suffice for timing."""

from collections.abc import Sequence
from itertools import product
from typing import Any

from transformers import PreTrainedModel

from fastspec.train.data import cut_rows
from fastspec.train.new_drafts import make_draft
from fastspec.train.options import DraftShape, ShapesTried

_LAYERS, _VOCAB_SIZES = (1, 2, 4), (8192,)  # tried by default, if they fit


def shapes_of(target: PreTrainedModel, tried: ShapesTried) -> list[DraftShape]:
    """Return the draft shapes to try for a target, small vocabularies first, each at all depths."""
    config: Any = target.config.get_text_config(decoder=True)
    depths = tried.layers or [num for num in _LAYERS if num <= config.num_hidden_layers]
    sizes = tried.vocab_sizes or [size for size in _VOCAB_SIZES if size < config.vocab_size]
    widths = tried.hidden_sizes or (None,)
    shapes = [
        *product((None,), sizes),
        *((None if width == config.hidden_size else width, None) for width in widths),
    ]
    return [
        DraftShape(depth, width, reduced_vocab_size=size)
        for width, size in shapes
        for depth in depths
    ]


def untrained(
    target: PreTrainedModel, shape: DraftShape, kind: str, texts: Sequence[list[int]]
) -> PreTrainedModel:
    """Make an untrained draft with `new_drafts.make_draft`, placed to run with the target.

    Args:
        texts: token ids, whose most frequent ones form a reduced vocabulary.
    Raises:
        ValueError: the shape does not fit the target.
    """
    rows = cut_rows(texts, max(map(len, texts)))
    draft: Any = make_draft(target, rows, shape, kind)
    return draft.to(target.device, target.dtype).eval()
