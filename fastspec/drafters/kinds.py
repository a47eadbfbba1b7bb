"""Which kind of draft model a source is, by its class or its configuration."""

from pathlib import Path
from typing import Literal

from transformers import PreTrainedModel

from fastspec.drafters.eagle3 import is_eagle3
from fastspec.drafters.glide import is_glide
from fastspec.models.loading import ReadConfig, load_config
from fastspec.models.reduced_vocabulary import is_reduced

DraftKind = Literal["glide", "eagle3", "reduced", "model"]


def kind_of(
    source: str | Path | PreTrainedModel, read_config: ReadConfig = load_config
) -> DraftKind:
    """Which kind of draft a source is; "reduced" ones take embeddings from their target.

    Args:
        read_config: `DrafterContext.read_config` reads that of a folder or hub id once.
    """
    if is_glide(source, read_config):
        return "glide"
    if is_eagle3(source, read_config):
        return "eagle3"
    is_stored = not isinstance(source, PreTrainedModel)
    return "reduced" if is_stored and is_reduced("drafter", source, read_config) else "model"
