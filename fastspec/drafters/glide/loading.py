"""GLIDE draft models from folders, hub ids or objects."""

from pathlib import Path
from typing import Any, cast

from transformers import PreTrainedModel

from fastspec.config import EngineConfig
from fastspec.drafters.glide.model import GlideLlamaConfig, GlideLlamaForCausalLM
from fastspec.models.loading import load_config, load_model


def load_glide(source: str | Path | PreTrainedModel, config: EngineConfig) -> PreTrainedModel:
    """A GLIDE draft model on the device, from a folder with the published weight names.

    Raises:
        ValueError: it cannot be loaded, or a folder's has no cross-attention.
    """
    return load_model("drafter", source, config, _from_pretrained)


def is_glide(source: str | Path | PreTrainedModel) -> bool:
    """Whether a model is GLIDE's; of a folder or hub id, whether its configuration says so."""
    if isinstance(source, PreTrainedModel):
        return isinstance(source, GlideLlamaForCausalLM)
    return isinstance(load_config("drafter", source), GlideLlamaConfig)


def _from_pretrained(path: str | Path, **options) -> GlideLlamaForCausalLM:
    loaded = GlideLlamaForCausalLM.from_pretrained(path, output_loading_info=True, **options)
    model, report = cast(Any, loaded)
    missing = sorted(report["missing_keys"])
    if missing:
        raise ValueError(
            f"is not a GLIDE model: it lacks {len(missing)} weights, such as {missing[0]}"
        )
    return model
