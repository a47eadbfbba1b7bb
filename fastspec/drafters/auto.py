"""Builds a drafter for a draft model of any kind, for method "auto" and token trees."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedModel

from fastspec.drafters import dflash, draft_model, eagle3, gemma_assistant, glide
from fastspec.drafters.base import Drafter
from fastspec.drafters.context import DrafterContext, DrafterPlan
from fastspec.models.loading import ReadConfig, load_config
from fastspec.models.reduced_vocabulary import is_reduced

DraftKind = Literal["glide", "dflash", "eagle3", "gemma_assistant", "reduced", "model"]
# Kinds of drafts with a method of their own; the first that a model is of counts.
_KINDS: list[tuple[DraftKind, Callable[..., bool], Callable[[DrafterContext], Any]]] = [
    ("glide", glide.is_glide, glide.build),
    ("dflash", dflash.is_dflash, dflash.build),
    ("eagle3", eagle3.is_eagle, eagle3.build),
    (
        "gemma_assistant",
        lambda _, config: gemma_assistant.is_assistant(config),
        gemma_assistant.build,
    ),
]
BUILDERS = {kind: build_own for kind, _, build_own in _KINDS}


def kind_of(
    source: str | Path | PreTrainedModel, read_config: ReadConfig = load_config
) -> DraftKind:
    """Return the kind of a draft model; "reduced" ones take embeddings from their target.

    Args:
        read_config: pass `DrafterContext.read_config` to read a folder's or hub id's config once.
    """
    is_loaded = isinstance(source, PreTrainedModel)
    config = source.config if is_loaded else read_config("drafter", source)
    for kind, is_of_kind, _ in _KINDS:
        if is_of_kind(source, config):
            return kind
    return "reduced" if not is_loaded and is_reduced(config) else "model"


def build(context: DrafterContext) -> Drafter | DrafterPlan:
    """Build a GLIDE drafter if one is wanted, otherwise the kind that the model's config names."""
    given = context.drafter
    is_model = isinstance(given, (str, Path, PreTrainedModel))
    kind = kind_of(given, context.read_config) if is_model else "model"
    kind = "glide" if context.wants_glide else kind
    return BUILDERS.get(kind, draft_model.build)(context)
