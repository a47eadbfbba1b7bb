"""A draft model of any kind, or a drafter as it is: what "auto" and token trees run."""

from pathlib import Path
from typing import Literal

from transformers import PreTrainedModel

from fastspec.drafters import draft_model, eagle3, glide
from fastspec.drafters.base import Drafter
from fastspec.drafters.context import DrafterContext, DrafterPlan
from fastspec.models.loading import ReadConfig, load_config
from fastspec.models.reduced_vocabulary import is_reduced

_BUILDERS = {"glide": glide, "eagle3": eagle3}  # by kind; all others are draft models
DraftKind = Literal["glide", "eagle3", "reduced", "model"]


def kind_of(
    source: str | Path | PreTrainedModel, read_config: ReadConfig = load_config
) -> DraftKind:
    """Which kind of draft a source is; "reduced" ones take embeddings from their target.

    Args:
        read_config: `DrafterContext.read_config` reads that of a folder or hub id once.
    """
    if glide.is_glide(source, read_config):
        return "glide"
    if eagle3.is_eagle3(source, read_config):
        return "eagle3"
    is_stored = not isinstance(source, PreTrainedModel)
    return "reduced" if is_stored and is_reduced("drafter", source, read_config) else "model"


def build(context: DrafterContext) -> Drafter | DrafterPlan:
    """A GLIDE model where one is wanted, else what the model's configuration says that it is."""
    given = context.drafter
    is_model = isinstance(given, (str, Path, PreTrainedModel))
    kind = kind_of(given, context.read_config) if is_model else "model"
    kind = "glide" if context.wants_glide else kind
    return _BUILDERS.get(kind, draft_model).build(context)
