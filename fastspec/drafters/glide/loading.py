"""Loads GLIDE draft models from folders, hub ids or objects."""

from functools import partial
from pathlib import Path
from typing import Any, cast

from transformers import PreTrainedConfig, PreTrainedModel

from fastspec.config import EngineConfig
from fastspec.drafters.glide.model import GlideLlamaConfig, GlideLlamaForCausalLM
from fastspec.models.layer_fields import last_layer_field
from fastspec.models.loading import load_model


def load_glide(
    source: str | Path | PreTrainedModel,
    config: EngineConfig,
    target: PreTrainedModel | None = None,
) -> PreTrainedModel:
    """Load a GLIDE draft model onto the device, from a folder with the published weight names.

    Args:
        target: supplies fields about the target that the folder's configuration lacks.
    Raises:
        ValueError: it cannot be loaded, or a folder's weights are not those of a GLIDE model for
            such a target.
    """
    return load_model("drafter", source, config, partial(_from_pretrained, target=target))


def is_glide(source: str | Path | PreTrainedModel, config: PreTrainedConfig) -> bool:
    """Whether a model is a GLIDE model; for a folder or hub id its configuration decides."""
    if isinstance(source, PreTrainedModel):
        return isinstance(source, GlideLlamaForCausalLM)
    # Published ones are a Llama's except for the class.
    is_named = GlideLlamaForCausalLM.__name__ in (config.architectures or ())
    return is_named or isinstance(config, GlideLlamaConfig)


def shape_of_target(target: PreTrainedModel) -> dict[str, Any]:
    """Return the fields of GlideLlamaConfig that describe a target; ValueError if none do."""
    config = target.config.get_text_config(decoder=True)
    hidden_size, heads = config.hidden_size, last_layer_field(config, "num_attention_heads")
    if heads is None:
        raise ValueError(f"target: {type(target).__name__} has no attention that GLIDE could read")
    return {
        "large_hidden_size": hidden_size,
        "large_num_attention_heads": heads,
        "large_num_key_value_heads": last_layer_field(config, "num_key_value_heads") or heads,
        "large_head_dim": last_layer_field(config, "head_dim") or hidden_size // heads,
    }


def _from_pretrained(
    path: str | Path, target: PreTrainedModel | None, **options: Any
) -> GlideLlamaForCausalLM:
    stored, _ = GlideLlamaConfig.get_config_dict(path)
    known = {} if target is None else shape_of_target(target)
    config = GlideLlamaConfig.from_dict(known | {k: v for k, v in stored.items() if v is not None})
    loaded = GlideLlamaForCausalLM.from_pretrained(
        path, config=config, output_loading_info=True, ignore_mismatched_sizes=True, **options
    )
    model, report = cast(Any, loaded)
    missing = sorted(report["missing_keys"])
    if missing:
        raise ValueError(
            f"is not a GLIDE model: {len(missing)} weights are missing, such as {missing[0]}"
        )
    if report["mismatched_keys"]:
        name, stored_shape, shape = min(report["mismatched_keys"])
        raise ValueError(
            f"{name} has shape {tuple(stored_shape)}; by its configuration, completed by the"
            f" target's, it should be {tuple(shape)}"
        )
    return model
