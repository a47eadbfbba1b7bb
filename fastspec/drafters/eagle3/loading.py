"""EAGLE-3 drafts in folders of the published layout."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils.hub import cached_file

from fastspec.config import EngineConfig
from fastspec.drafters.eagle3.model import Eagle3Config, Eagle3Draft
from fastspec.models.loading import load_config, load_model
from fastspec.models.reduced_vocabulary import reduced_rows

_ARCHITECTURE = "LlamaForCausalLMEagle3"
_FILES = ("model.safetensors", "pytorch_model.bin")
_ENDS = ("embed_tokens.weight", "lm_head.weight", "d2t", "t2d")
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


def is_eagle3(source: str | Path | PreTrainedModel) -> bool:
    """Whether a model is an EAGLE-3 draft; of a folder or hub id, whether its config says so."""
    if isinstance(source, PreTrainedModel):
        return isinstance(source, Eagle3Draft)
    config = load_config("drafter", source)
    is_named = any("Eagle3" in name for name in config.architectures or ())
    return is_named or getattr(config, "draft_vocab_size", None) is not None


def load_eagle3(
    source: str | Path | PreTrainedModel, config: EngineConfig, target: PreTrainedModel
) -> PreTrainedModel:
    """An EAGLE-3 draft on the device, in the target's type.

    A folder that lacks embeddings or a head takes the target's.

    Raises:
        ValueError: it cannot be loaded, or is no EAGLE-3 draft for this target.
    """
    return load_model("drafter", source, config, partial(_read, target=target))


def save_eagle3(draft: Eagle3Draft, folder: Path) -> None:
    """Write a draft in bfloat16 without embeddings and head, which are its target's."""
    head: Any = draft.lm_head
    token_ids = head.token_ids.cpu()
    is_known = torch.zeros(head.out_features, dtype=torch.bool)
    is_known[token_ids] = True
    tensors = {
        name: weight.detach().to(torch.bfloat16).contiguous()
        for name, weight in draft.named_parameters()
        if not name.startswith(("embed_tokens.", "lm_head."))
    }
    tensors |= {"d2t": token_ids - torch.arange(len(token_ids)), "t2d": is_known}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / _FILES[0], metadata={"format": "pt"})
    config = draft.config.to_dict() | {"model_type": "llama", "architectures": [_ARCHITECTURE]}
    Eagle3Config.from_dict(config).to_json_file(folder / "config.json")


def _read(path: str | Path, target: PreTrainedModel, **options: Any) -> Eagle3Draft:
    tensors = _tensors(path)
    stored, _ = Eagle3Config.get_config_dict(path)
    large = target.config.get_text_config(decoder=True)
    embeddings: Any = target.get_input_embeddings()
    config = Eagle3Config.from_dict(_fields(stored) | _own_fields(tensors, stored, large))
    draft = Eagle3Draft(config).to(target.dtype)
    own = dict(draft.named_parameters())
    own = {name: own[name] for name in own if name not in _ENDS}
    ids = tensors.get("d2t")
    weights = {name: part for name, part in tensors.items() if name not in _ENDS}
    for name, weight in own.items():
        if name not in weights:
            raise ValueError(f"is no EAGLE-3 draft: it lacks {name}")
        if weights[name].shape != weight.shape:
            shapes = f"{tuple(weights[name].shape)}; by its configuration it is {tuple(weight.shape)}"
            raise ValueError(f"{name} has the shape {shapes}")
    if unknown := sorted(weights.keys() - own.keys()):
        raise ValueError(f"is no EAGLE-3 draft: it has a weight {unknown[0]}")
    with torch.no_grad():
        for name, weight in own.items():
            weight.copy_(weights[name])
    return draft
