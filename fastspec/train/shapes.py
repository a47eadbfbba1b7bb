"""Shapes of drafts, and drafts of them that have learnt nothing: enough to time them."""

from collections.abc import Sequence
from itertools import product
from typing import Any

from transformers import PreTrainedModel

from fastspec.train.glide_data import cut_rows
from fastspec.train.glide_run import make_draft
from fastspec.train.options import DraftShape, ShapesTried

_LAYERS, _VOCAB_SIZES = (1, 2, 4), (8192,)  # tried unless others are named, where they fit


def shapes_of(target: PreTrainedModel, tried: ShapesTried) -> list[DraftShape]:
    """The drafts to try for a target: small vocabularies first, each with all depths."""
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
    """A draft as `glide_run.make_draft` makes it, to run beside the target.

    Args:
        texts: ids, whose most frequent tokens are those of a reduced vocabulary.
    Raises:
        ValueError: a shape that does not fit the target.
    """
    rows = cut_rows(texts, max(map(len, texts)))
    draft: Any = make_draft(target, rows, shape, kind)
    return draft.to(target.device, target.dtype).eval()
