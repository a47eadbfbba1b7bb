"""EAGLE-3 drafts in folders of the published layout."""

import json
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils.hub import cached_file

from fastspec.config import EngineConfig
from fastspec.drafters.eagle3.model import Eagle3Config, Eagle3Draft
from fastspec.models.captured import usual_layers
from fastspec.models.loading import ReadConfig, load_config, load_model
from fastspec.models.reduced_vocabulary import reduced_rows
from fastspec.models.sharded import whole

_ARCHITECTURE = "LlamaForCausalLMEagle3"
_FILES = ("model.safetensors", "pytorch_model.bin")
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


def is_eagle3(source: str | Path | PreTrainedModel, read_config: ReadConfig = load_config) -> bool:
    """Whether a model is an EAGLE-3 draft; of a folder or hub id, whether its config says so."""
    if isinstance(source, PreTrainedModel):
        return isinstance(source, Eagle3Draft)
    config = read_config("drafter", source)
    is_named = any("Eagle3" in name for name in config.architectures or ())
    return is_named or getattr(config, "draft_vocab_size", None) is not None


def load_eagle3(
    source: str | Path | PreTrainedModel, config: EngineConfig, target: PreTrainedModel | None
) -> PreTrainedModel:
    """An EAGLE-3 draft on the device, in the target's type.

    A folder that lacks embeddings or a head takes the target's.

    Raises:
        ValueError: it cannot be loaded, or is no EAGLE-3 draft for this target; there is none.
    """
    if target is None:
        raise ValueError("drafter: EAGLE-3 reads the target's hidden states; there is no target")
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
    config = draft.config.to_diff_dict() | {"model_type": "llama", "architectures": [_ARCHITECTURE]}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _read(
    path: str | Path, target: PreTrainedModel, use_safetensors: bool = False, **options: Any
) -> Eagle3Draft:
    tensors = _tensors(path, _FILES[:1] if use_safetensors else _FILES)
    if (
        "midlayer.self_attn.q_proj.weight" in tensors
        and "midlayer.hidden_norm.weight" not in tensors
    ):
        raise ValueError("is a draft of EAGLE-1 or EAGLE-2, which are not supported: EAGLE-3 is")
    large = target.config.get_text_config(decoder=True)
    embeddings, head = (
        tensors.pop(name, None) for name in ("embed_tokens.weight", "lm_head.weight")
    )
    offsets = tensors.pop("d2t", None)
    tensors.pop("t2d", None)  # says the same
    vocab_size = len(cast(Any, target.get_output_embeddings()).weight)
    num_ids = vocab_size if offsets is None else len(offsets)
    token_ids = torch.arange(num_ids) + (0 if offsets is None else offsets.long())
    if not 0 <= int(token_ids.min()) <= int(token_ids.max()) < vocab_size:
        raise ValueError(f"d2t: names tokens outside of the target's vocabulary of {vocab_size}")
    draft: Any = Eagle3Draft(_config_of(path, large, vocab_size, num_ids))
    draft.to(target.dtype)
    own = dict(draft.named_parameters())
    own.pop("embed_tokens.weight")
    if names := own.keys() ^ tensors.keys():
        is_missing = min(names) in own
        raise ValueError(
            f"is no EAGLE-3 draft: {min(names)} is {'missing' if is_missing else 'new'}"
        )
    if embeddings is None:
        embeddings = whole(cast(Any, target.get_input_embeddings()).weight)
    if head is None:
        head = reduced_rows(target, token_ids)
    size = draft.config.hidden_size
    ends = {"embed_tokens.weight": embeddings[:vocab_size], "lm_head.weight": head}
    shapes = {"embed_tokens.weight": (vocab_size, size), "lm_head.weight": (num_ids, size)}
    shapes |= {name: tuple(weight.shape) for name, weight in own.items()}
    for name, weight in (tensors | ends).items():
        if tuple(weight.shape) != shapes[name]:
            raise ValueError(
                f"{name} has the shape {tuple(weight.shape)}; for this target it is {shapes[name]}"
            )
    with torch.no_grad():
        for name, weight in own.items():
            weight.copy_(tensors[name])
    embeddings, head = (part.to(target.device, target.dtype) for part in (embeddings, head))
    draft.set_ends(embeddings, head, token_ids.to(target.device), vocab_size)
    return draft.eval()


def _tensors(path: str | Path, files: tuple[str, ...]) -> dict[str, Tensor]:
    """The weights of a folder or hub id by the names of our modules, from the first file there."""
    for name in files:
        file = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
        if file is not None:
            break
    else:
        raise ValueError(f"has none of {files}")
    is_pickled = name.endswith(".bin")
    stored = torch.load(file, "cpu", weights_only=True) if is_pickled else load_file(file)
    return {
        name.removeprefix("model.").replace("layers.0.", "midlayer."): weight
        for name, weight in stored.items()
        if not name.endswith("rotary_emb.inv_freq")  # computed, and not always stored
    }


def _config_of(
    path: str | Path, large: PreTrainedConfig, vocab_size: int, num_ids: int
) -> Eagle3Config:
    """The folder's configuration; what depends on the target is as the target has it."""
    stored, _ = Eagle3Config.get_config_dict(path)
    layers = stored.get(_LAYER_IDS)  # the number of a layer that reads a state, as vLLM has it
    if written := (stored.get("eagle_config") or {}).get(_LAYER_IDS):
        layers = [index + 1 for index in written]  # that of one that writes it, as SGLang has it
    return Eagle3Config.from_dict(
        stored
        | {
            "vocab_size": vocab_size,
            "draft_vocab_size": num_ids,
            "target_hidden_size": large.hidden_size,
            "target_layers": layers or usual_layers(large.num_hidden_layers),
            "max_position_embeddings": large.max_position_embeddings,
        }
    )
