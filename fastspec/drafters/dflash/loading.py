"""Loads DFlash draft models from folders of the published layouts."""

from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from fastspec.config import EngineConfig
from fastspec.config.checks import is_int, one_line, require
from fastspec.drafters.dflash.model import DFlashConfig, DFlashDraft, block_embeddings
from fastspec.models.loading import SPECULATORS, load_model
from fastspec.models.reduced_vocabulary import (
    ReducedHead,
    reduced_rows,
    save_beside_target,
    stored_token_ids,
)
from fastspec.models.weight_files import check_shape, fill, read_weights

_ARCHITECTURE = "DFlashDraftModel"
MODEL_TYPE = "muse_glimmer_assistant"  # transformers' own
_EMBEDDINGS, _HEAD = "embed_tokens.weight", "lm_head.weight"
# Fields by which later variants differ, with their values in DFlash.
_PLAIN = {"sample_from_anchor": False, "projector_type": "dflash", "shift_label": False}
_NOT_OF_A_LAYER = (
    *("block_size", "mask_token_id", "target_layers", "target_hidden_size"),
    *("draft_vocab_size", "windows_are_causal"),
)
_NAMES = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}  # transformers' to ours


def is_dflash(source: str | Path | PreTrainedModel, config: PreTrainedConfig) -> bool:
    """Whether a model is a DFlash draft, by its configuration."""
    if isinstance(source, PreTrainedModel):
        return isinstance(source, DFlashDraft) or config.model_type == MODEL_TYPE
    is_named = _ARCHITECTURE in (config.architectures or ()) or config.model_type == MODEL_TYPE
    return is_named or getattr(config, SPECULATORS, None) == "dflash"


def load_dflash(
    source: str | Path | PreTrainedModel, config: EngineConfig, target: PreTrainedModel
) -> PreTrainedModel:
    """Load a DFlash draft onto the device, in the target's dtype, with the target's embeddings and,
    unless it has its own, its head.

    Raises:
        ValueError: the model cannot be loaded or does not fit the target.
    """
    if target.config.is_encoder_decoder:
        raise ValueError("drafter: DFlash drafts for decoders, the target is an encoder-decoder")
    loaded = load_model("drafter", source, config, partial(_read, target=target), target)
    if isinstance(loaded, DFlashDraft) and loaded is source:
        _check_fits(loaded, target)
    if loaded.config.model_type != MODEL_TYPE:
        return loaded
    try:
        made: Any = _made(loaded.config.to_dict(), {**loaded.state_dict()}, target)
    except ValueError as error:
        raise ValueError(f"drafter: {type(loaded).__name__}: {error}") from error
    return made.to(target.device)


def _check_fits(draft: DFlashDraft, target: PreTrainedModel) -> None:
    """Refuse a loaded draft that was made for another target."""
    size = target.config.get_text_config(decoder=True).hidden_size
    head: Any = target.get_output_embeddings()
    config = draft.config
    given = draft.dtype, config.target_hidden_size, config.vocab_size
    expected = target.get_decoder().dtype, size, len(head.weight)
    if isinstance(draft.embed_tokens, nn.Identity):
        raise ValueError("drafter: this DFlash draft has no embeddings; give its folder")
    if given != expected:
        raise ValueError(
            f"drafter: this DFlash draft was loaded for another target: dtype, hidden size and"
            f" vocabulary are {given}, the target's {expected}; give its folder"
        )


def save_dflash(draft: Any, folder: Path) -> None:
    """Write a draft with a reduced head, see `save_beside_target`, in the layout of vLLM's
    `speculators`."""
    own: DFlashConfig = draft.config
    layer = own.to_diff_dict() | {"model_type": "qwen3"}
    for name in _NOT_OF_A_LAYER:
        layer.pop(name, None)
    config = {
        SPECULATORS: "dflash",
        "architectures": [_ARCHITECTURE],
        "aux_hidden_state_layer_ids": own.target_layers,
        "mask_token_id": own.mask_token_id,
        "block_size": own.block_size,
        "draft_vocab_size": own.draft_vocab_size,
        "sliding_window_non_causal": not own.windows_are_causal,
        "transformer_layer_config": layer,
    }
    save_beside_target(draft, config, folder)


def _read(
    path: str | Path, target: PreTrainedModel, use_safetensors: bool = False, **options: Any
) -> PreTrainedModel:
    stored, _ = PreTrainedConfig.get_config_dict(path)
    return _made(stored, read_weights(path, use_safetensors), target)


def _made(
    stored: dict[str, Any], tensors: dict[str, Tensor], target: PreTrainedModel
) -> DFlashDraft:
    """Make a draft from a configuration and weights of any layout."""
    for theirs, ours in _NAMES.items():
        tensors = {name.replace(theirs, ours): weight for name, weight in tensors.items()}
    large = target.config.get_text_config(decoder=True)
    head: Any = target.get_output_embeddings()
    vocab_size = len(head.weight)
    token_ids = stored_token_ids(tensors, vocab_size)
    fields = _fields(stored) | {
        "vocab_size": vocab_size,
        "draft_vocab_size": len(token_ids),
        "target_hidden_size": large.hidden_size,
    }
    try:
        config = DFlashConfig.from_dict(fields)
    except (StrictDataclassError, TypeError) as error:
        raise ValueError(f"its configuration: {one_line(error)}") from error
    size = config.hidden_size
    require("target_layers", config.target_layers, bool(config.target_layers), "numbers of layers")
    has_window = "sliding_attention" not in (config.layer_types or ()) or config.sliding_window
    require("sliding_window", config.sliding_window, bool(has_window), "an int, as layers have one")
    fits = size == large.hidden_size
    require("hidden_size", size, fits, f"{large.hidden_size}, as it reads its target's embeddings")
    draft: Any = DFlashDraft(config)
    dtype = target.get_decoder().dtype
    draft.to(dtype)
    tensors.pop(_EMBEDDINGS, None)  # equal to the target's
    own_head = tensors.pop(_HEAD, None)
    fill(dict(draft.named_parameters()), tensors, "DFlash draft")
    draft.embed_tokens = block_embeddings(target)
    draft.lm_head = head
    if len(token_ids) < vocab_size:
        rows = reduced_rows(target, token_ids) if own_head is None else own_head
        check_shape(_HEAD, rows, (len(token_ids), size))
        places = token_ids.to(target.device)
        draft.lm_head = ReducedHead(rows.to(target.device, dtype), places, vocab_size)
    elif own_head is not None:
        check_shape(_HEAD, own_head, (vocab_size, size))
        draft.lm_head = nn.Linear(size, vocab_size, bias=False, device="meta")
        draft.lm_head.weight = nn.Parameter(own_head.to(target.device, dtype))
    return draft.eval()


def _fields(stored: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of `DFlashConfig` that a configuration of any layout names."""
    if SPECULATORS in stored:
        return _fields_of_speculators(stored)
    nested = stored.get("dflash_config") or {}
    require("dflash_config", nested, isinstance(nested, dict), "a mapping")
    if stored.get("model_type") == MODEL_TYPE:
        stored = {"use_sliding_window": True, **stored}
    given = {**stored, **nested}
    _check_plain(given)
    written = given.get("target_layer_ids") or _usual_layers(stored)
    fits = isinstance(written, list) and all(map(is_int, written))
    require("target_layer_ids", written, fits, "a list of numbers of layers")
    return stored | {
        "model_type": DFlashConfig.model_type,
        # Theirs are the layers that write a state, ours those that read it.
        "target_layers": [layer + 1 for layer in written],
        "block_size": given.get("block_size", 16),
        "mask_token_id": given.get("mask_token_id"),
        "windows_are_causal": _windows_are_causal(given),
        "input_embedding_scale": given.get("input_embedding_scale", 1.0),
        "output_multiplier": given.get("output_multiplier", 1.0),
        "final_logit_softcapping": given.get("final_logit_softcapping"),
    }


def _windows_are_causal(given: dict[str, Any]) -> bool:
    """Whether layers with a window are causal in the layout of the authors, or of transformers."""
    if given.get("model_type") == MODEL_TYPE:
        return False
    causal = given.get("is_causal", given.get("causal"))
    require("is_causal", causal, causal is None or isinstance(causal, bool), "a bool")
    has_full = "full_attention" in (given.get("layer_types") or ["full_attention"])
    fits = not (causal and has_full)
    require("is_causal", causal, fits, "false, as layers without a window are not causal here")
    return causal is not False


def _check_plain(given: dict[str, Any]) -> None:
    for name, usual in _PLAIN.items():
        value = given.get(name)
        fits = value in (None, usual)
        require(name, value, fits, f"{usual!r}, as other drafts are not supported")


def _fields_of_speculators(stored: dict[str, Any]) -> dict[str, Any]:
    kind = stored[SPECULATORS]
    require(SPECULATORS, kind, kind == "dflash", "'dflash'")
    _check_plain(stored)
    layer = stored.get("transformer_layer_config")
    require("transformer_layer_config", layer, isinstance(layer, dict), "a mapping")
    assert isinstance(layer, dict)
    return layer | {
        "model_type": DFlashConfig.model_type,
        "target_layers": stored.get("aux_hidden_state_layer_ids"),
        "block_size": stored.get("block_size", 8),
        "mask_token_id": stored.get("mask_token_id"),
        "windows_are_causal": not stored.get("sliding_window_non_causal", False),
    }


def _usual_layers(stored: dict[str, Any]) -> list[int]:
    """Return the layers whose outputs are read if the configuration names none: spread evenly."""
    total, count = stored.get("num_target_layers"), stored.get("num_hidden_layers", 1)
    fits = is_int(total) and is_int(count)
    require("target_layer_ids", None, fits, "the layers of the target that it reads")
    assert total is not None
    if count == 1:
        return [total // 2]
    return [round(1 + index * (total - 4) / (count - 1)) for index in range(count)]
