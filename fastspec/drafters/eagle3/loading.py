"""Loads EAGLE draft models from folders of the published layouts."""

from functools import partial
from pathlib import Path
from typing import Any, cast
from zipfile import BadZipFile

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from fastspec.config import EngineConfig
from fastspec.config.checks import require
from fastspec.drafters.eagle3.model import (
    Eagle1Draft,
    Eagle3Draft,
    EagleConfig,
    EagleDraft,
    usual_layers,
)
from fastspec.models.loading import SPECULATORS, load_model
from fastspec.models.named import folder_of
from fastspec.models.reduced_vocabulary import (
    reduced_rows,
    save_beside_target,
    stored_token_ids,
)
from fastspec.models.sharded import whole
from fastspec.models.weight_files import check_shape, fill, read_weights, weight_names

_ARCHITECTURE = "LlamaForCausalLMEagle3"
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_EMBEDDINGS, _HEAD = "embed_tokens.weight", "lm_head.weight"
_UNREADABLE = (OSError, ValueError, RuntimeError, SafetensorError, BadZipFile)


def is_eagle(source: str | Path | PreTrainedModel, config: PreTrainedConfig) -> bool:
    """Whether a model is an EAGLE draft. For a folder or hub id the config decides, or, if it has
    one layer, the weights: EAGLE-1 and EAGLE-2 are Llamas by their config."""
    if isinstance(source, PreTrainedModel):
        return isinstance(source, EagleDraft)
    is_named = any("Eagle3" in name for name in config.architectures or ())
    is_reduced = getattr(config, "draft_vocab_size", None) is not None
    if is_named or is_reduced or hasattr(config, SPECULATORS):
        return True
    folder = folder_of("drafter", str(source)) or Path(source).expanduser()
    if getattr(config, "num_hidden_layers", None) != 1 or folder.is_file():
        return False
    try:
        names = weight_names(folder if folder.is_dir() else source)
    except _UNREADABLE:
        return False  # loading it will report what is wrong
    return "fc.weight" in map(_own_name, names)


def load_eagle(
    source: str | Path | PreTrainedModel, config: EngineConfig, target: PreTrainedModel
) -> PreTrainedModel:
    """Load a draft model of EAGLE-1, 2 or 3 onto the device, in the target's dtype.

    If a folder lacks embeddings or a head, the target's are used.

    Raises:
        ValueError: the model cannot be loaded or does not fit the target.
    """
    if target.config.is_encoder_decoder:
        raise ValueError("drafter: EAGLE drafts for decoders, but the target is an encoder-decoder")
    return load_model("drafter", source, config, partial(_read, target=target), target)


def save_eagle3(draft: Eagle3Draft, folder: Path) -> None:
    """Write a draft model with a reduced head, see `save_beside_target`."""
    config = draft.config.to_diff_dict() | {"model_type": "llama", "architectures": [_ARCHITECTURE]}
    save_beside_target(draft, config, folder)


def _read(
    path: str | Path, target: PreTrainedModel, use_safetensors: bool = False, **options: Any
) -> EagleDraft:
    tensors = _by_own_names(read_weights(path, use_safetensors))
    large = target.config.get_text_config(decoder=True)
    head: Any = target.get_output_embeddings()
    known = {
        "vocab_size": len(head.weight),
        "draft_vocab_size": None,
        "target_hidden_size": large.hidden_size,
        "target_layers": None,
    }
    if hasattr(large, "max_position_embeddings"):
        known["max_position_embeddings"] = large.max_position_embeddings
    read = _first_version if _is_first_version(tensors) else _third_version
    return read(_config(path) | known, tensors, target).eval()


def _is_first_version(tensors: dict[str, Tensor]) -> bool:
    """Whether the draft joins embedding and hidden state before a layer that norms neither."""
    fuse = tensors.get("fc.weight")
    is_joined = fuse is not None and fuse.dim() == 2 and fuse.shape[1] == 2 * fuse.shape[0]
    norms = "midlayer.hidden_norm.weight", "midlayer.input_layernorm.weight"
    return is_joined and not tensors.keys() & {*norms}


def _first_version(
    stored: dict[str, Any], tensors: dict[str, Tensor], target: PreTrainedModel
) -> EagleDraft:
    """Make a draft of EAGLE-1 or EAGLE-2, with the target's head unless it has its own."""
    config = EagleConfig.from_dict(stored)
    size, read = config.hidden_size, config.target_hidden_size
    require("hidden_size", size, size == read, f"{read}, the target's, as EAGLE-1 has no other")
    draft: Any = Eagle1Draft(config)
    for name, module in draft.named_modules():
        # Some published ones have biases that their configuration does not mention.
        if isinstance(module, nn.Linear) and f"{name}.bias" in tensors and module.bias is None:
            module.bias = nn.Parameter(torch.zeros(module.out_features))
    head: Any = target.get_output_embeddings()
    bias = None if _HEAD in tensors else getattr(head, "bias", None)
    ends = _ends(tensors, target, "EAGLE-1 or EAGLE-2 draft", draft, head.weight)
    draft.set_whole_ends(*ends, None if bias is None else whole(bias.detach()))
    return draft


def _third_version(
    stored: dict[str, Any], tensors: dict[str, Tensor], target: PreTrainedModel
) -> EagleDraft:
    vocab_size = stored["vocab_size"]
    token_ids = stored_token_ids(tensors, vocab_size)
    layers = stored.get(_LAYER_IDS)  # vLLM: the layer that reads a state
    if written := (stored.get("eagle_config") or {}).get(_LAYER_IDS):
        layers = [index + 1 for index in written]  # SGLang: the layer that writes it
    large: PreTrainedConfig = target.config.get_text_config(decoder=True)
    known = {
        "draft_vocab_size": len(token_ids),
        "target_layers": layers or usual_layers(large.num_hidden_layers),
    }
    draft: Any = Eagle3Draft(EagleConfig.from_dict(stored | known))
    head = None if _HEAD in tensors else reduced_rows(target, token_ids)
    ends = _ends(tensors, target, "EAGLE-3 draft", draft, head)
    draft.set_ends(*ends, token_ids.to(target.device), vocab_size)
    return draft


def _ends(
    tensors: dict[str, Tensor], target: PreTrainedModel, kind: str, draft: Any, head: Tensor | None
) -> list[Tensor]:
    """Copy a draft's own weights; return its embeddings and head, placed on the device.

    Args:
        kind: kind of draft, for errors.
        head: the target's head, for a draft without one.
    Raises:
        ValueError: a weight is missing, unexpected, or of another shape.
    """
    draft.to(target.dtype)
    embeddings = tensors.pop(_EMBEDDINGS, cast(Any, target.get_input_embeddings()).weight)
    head = tensors.pop(_HEAD, head)
    own = dict(draft.named_parameters())
    own.pop(_EMBEDDINGS)
    fill(own, tensors, kind)
    config: EagleConfig = draft.config
    ends = {
        _EMBEDDINGS: whole(embeddings.detach())[: config.vocab_size],
        _HEAD: whole(cast(Tensor, head).detach()),
    }
    check_shape(_EMBEDDINGS, ends[_EMBEDDINGS], (config.vocab_size, config.hidden_size))
    check_shape(_HEAD, ends[_HEAD], (config.draft_vocab_size, config.hidden_size))
    return [part.to(target.device, target.dtype) for part in ends.values()]


def _config(path: str | Path) -> dict[str, Any]:
    """Read the configuration of a draft; fields that `speculators` nests move to the top level."""
    stored, _ = PreTrainedConfig.get_config_dict(path)
    kind = stored.get(SPECULATORS)
    if kind is None:
        return stored
    if kind != "eagle3":
        raise ValueError(f"{SPECULATORS}: expected 'eagle3', got {kind!r}")
    layer = stored.pop("transformer_layer_config", None)
    if not isinstance(layer, dict):
        raise ValueError(f"transformer_layer_config: expected a mapping, got {layer!r:.60}")
    return layer | stored


def _by_own_names(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    # Rotary frequencies are computed, and not always stored.
    return {
        _own_name(name): weight
        for name, weight in weights.items()
        if not name.endswith("rotary_emb.inv_freq")
    }


def _own_name(name: str) -> str:
    return name.removeprefix("model.").replace("layers.0.", "midlayer.")
