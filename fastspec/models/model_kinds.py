"""Decoders and encoder-decoders on the paged cache: what each excludes, and which fit together."""

import inspect

from transformers import PreTrainedModel

from fastspec.config import EngineConfig
from fastspec.models.encoder_decoder import EncoderDecoderModel
from fastspec.models.paged_model import PagedModel
from fastspec.models.twin import compile_modules


def paged_model_of(
    model: PreTrainedModel, config: EngineConfig, weight_bits: int | None = None
) -> PagedModel:
    """Put a model of either kind on the paged cache; ValueError if that is not possible.

    weight_bits: see `PagedModel`.
    """
    is_encoder_decoder = model.config.is_encoder_decoder
    if is_encoder_decoder and config.kv_cache_dtype != "auto":
        raise ValueError(
            f"kv_cache_dtype: {type(model).__name__} is an encoder-decoder; its attention cannot"
            f" read {config.kv_cache_dtype}"
        )
    if "shared_kv_states" in inspect.signature(model.forward).parameters:
        raise ValueError(
            f"{type(model).__name__}: reads another model's cache, so it can only draft for it"
        )
    kind = EncoderDecoderModel if is_encoder_decoder else PagedModel
    paged_model = kind(model, config.backend, config.kv_cache_dtype, weight_bits)
    obstacle = prefix_obstacle(paged_model, config)
    if config.prefix_caching and obstacle is not None:
        raise ValueError(f"prefix_caching: {paged_model.name} {obstacle}")
    if config.compile_modules:
        compile_modules(paged_model.model)
    return paged_model


def prefix_obstacle(paged_model: PagedModel, config: EngineConfig) -> str | None:
    """Return why requests cannot share the blocks of a prompt; None if they can."""
    if paged_model.decoder_start_id is not None:
        return (
            "is an encoder-decoder; its decoder's cache depends on the encoder's input, so requests"
            " cannot share it"
        )
    limit = paged_model.rotary.limit if paged_model.rotary else None
    most = config.max_model_len or paged_model.max_positions
    if limit is not None and (most is None or most > limit):
        return (
            f"rotates the keys of texts above {limit} tokens by other factors, so long and short"
            f" ones cannot share them; set max_model_len to {limit} to allow it"
        )
    if paged_model.recurrent is not None:
        return "has recurrent layers, whose state at the end of a shared prefix is not kept"
    return None


def check_same_kind(target: PagedModel, models: list[PagedModel]) -> None:
    """Refuse models that differ from the target in kind or device, or are split over processes."""
    for model in models:
        if model is not target and model.ranks is not None:
            raise ValueError(
                f"drafter: {model.name} is split over processes; each needs a whole draft model:"
                " load it without a DistributedConfig"
            )
        if model.device != target.device:
            raise ValueError(
                f"drafter: {model.name} is on {model.device}, but the target on {target.device}"
            )
        if (model.decoder_start_id is None) != (target.decoder_start_id is None):
            raise ValueError(
                f"drafter: {_kind(model)} cannot draft for {_kind(target)}: both must be decoders,"
                " or both encoder-decoders"
            )


def _kind(model: PagedModel) -> str:
    what = "a decoder" if model.decoder_start_id is None else "an encoder-decoder"
    return f"{model.name} ({what})"
