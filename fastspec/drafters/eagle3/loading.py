"""Loads EAGLE draft models from folders of the published layouts."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from pickletools import genops
from typing import Any, cast
from zipfile import BadZipFile, ZipFile

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils.hub import cached_file

from fastspec.config import EngineConfig
from fastspec.config.checks import require
from fastspec.drafters.eagle3.model import (
    Eagle1Draft,
    Eagle3Draft,
    EagleConfig,
    EagleDraft,
    usual_layers,
)
from fastspec.models.loading import SPECULATORS, ReadConfig, load_config, load_model
from fastspec.models.named import folder_of
from fastspec.models.reduced_vocabulary import reduced_rows
from fastspec.models.sharded import whole

_ARCHITECTURE = "LlamaForCausalLMEagle3"
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_EMBEDDINGS, _HEAD = "embed_tokens.weight", "lm_head.weight"
_UNREADABLE = (OSError, ValueError, RuntimeError, SafetensorError, BadZipFile)
_WEIGHTS = "model.safetensors"
_PICKLED = "pytorch_model.bin"
_INDEX = ".index.json"  # index of weights in several files
_FILES = (_WEIGHTS, _WEIGHTS + _INDEX, _PICKLED, _PICKLED + _INDEX)


def is_eagle(source: str | Path | PreTrainedModel, read_config: ReadConfig = load_config) -> bool:
    """Whether a model is an EAGLE draft. For a folder or hub id the config decides, or, if it has
    one layer, the weights: EAGLE-1 and EAGLE-2 are Llamas by their config."""
    if isinstance(source, PreTrainedModel):
        return isinstance(source, EagleDraft)
    config = read_config("drafter", source)
    is_named = any("Eagle3" in name for name in config.architectures or ())
    is_reduced = getattr(config, "draft_vocab_size", None) is not None
    if is_named or is_reduced or hasattr(config, SPECULATORS):
        return True
    folder = folder_of("drafter", str(source)) or Path(source).expanduser()
    if getattr(config, "num_hidden_layers", None) != 1 or folder.is_file():
        return False
    try:
        return "fc.weight" in _weight_names(folder if folder.is_dir() else source)
    except _UNREADABLE:
        return False  # loading it will report what is wrong


def load_eagle(
    source: str | Path | PreTrainedModel, config: EngineConfig, target: PreTrainedModel | None
) -> PreTrainedModel:
    """Load a draft model of EAGLE-1, 2 or 3 onto the device, in the target's dtype.

    If a folder lacks embeddings or a head, the target's are used.

    Raises:
        ValueError: there is no target, or the model cannot be loaded or does not fit the target.
    """
    if target is None:
        raise ValueError("drafter: EAGLE reads the target's hidden states, but there is no target")
    if target.config.is_encoder_decoder:
        raise ValueError("drafter: EAGLE drafts for decoders, but the target is an encoder-decoder")
    return load_model("drafter", source, config, partial(_read, target=target), target)


def save_eagle3(draft: Eagle3Draft, folder: Path) -> None:
    """Write a draft model in bfloat16, without the embeddings and head, which are the target's."""
    head: Any = draft.lm_head
    token_ids = head.token_ids.cpu()
    is_known = torch.zeros(head.out_features, dtype=torch.bool, device="cpu")
    is_known[token_ids] = True
    tensors = {
        name: weight.detach().to(torch.bfloat16).contiguous()
        for name, weight in draft.named_parameters()
        if not name.startswith(("embed_tokens.", "lm_head."))
    }
    tensors |= {"d2t": token_ids - torch.arange(len(token_ids), device="cpu"), "t2d": is_known}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / _WEIGHTS, metadata={"format": "pt"})
    config = draft.config.to_diff_dict() | {"model_type": "llama", "architectures": [_ARCHITECTURE]}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _read(
    path: str | Path, target: PreTrainedModel, use_safetensors: bool = False, **options: Any
) -> EagleDraft:
    tensors = _weights(path, use_safetensors)
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
    token_ids = _token_ids(tensors, vocab_size)
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


def _token_ids(tensors: dict[str, Tensor], vocab_size: int) -> Tensor:
    """Return the tokens [R] that a draft can write; removes the maps for them from `tensors`."""
    offsets, is_known = tensors.pop("d2t", None), tensors.pop("t2d", None)
    num_ids = vocab_size if offsets is None else len(offsets)
    token_ids = torch.arange(num_ids, device="cpu") + (0 if offsets is None else offsets.long())
    if not 0 <= int(token_ids.min()) <= int(token_ids.max()) < vocab_size:
        raise ValueError(f"d2t: names tokens outside the target's vocabulary of {vocab_size}")
    named, counts = token_ids.unique(return_counts=True)
    if len(named) < num_ids:
        raise ValueError(f"d2t: names token {int(named[counts > 1][0])} more than once")
    if is_known is not None:
        marked = is_known.flatten().nonzero().flatten()
        if not torch.equal(marked, named):
            says = "there is no d2t" if offsets is None else "d2t names other tokens"
            raise ValueError(f"t2d: marks {len(marked)} of {vocab_size} tokens, but {says}")
    return token_ids


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
    if names := own.keys() ^ tensors.keys():
        is_missing = min(names) in own
        raise ValueError(f"is no {kind}: {min(names)} is {'missing' if is_missing else 'new'}")
    config: EagleConfig = draft.config
    ends = {
        _EMBEDDINGS: whole(embeddings.detach())[: config.vocab_size],
        _HEAD: whole(cast(Tensor, head).detach()),
    }
    shapes = {name: tuple(weight.shape) for name, weight in own.items()}
    shapes[_EMBEDDINGS] = config.vocab_size, config.hidden_size
    shapes[_HEAD] = config.draft_vocab_size, config.hidden_size
    for name, weight in (tensors | ends).items():
        if tuple(weight.shape) != shapes[name]:
            raise ValueError(
                f"{name} has shape {tuple(weight.shape)}, but for this target it is {shapes[name]}"
            )
    with torch.no_grad():
        for name, weight in own.items():
            weight.copy_(tensors[name])
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


def _weights(path: str | Path, use_safetensors: bool = False) -> dict[str, Tensor]:
    """Read the weights of a folder or hub id, by the names of our modules.

    Args:
        use_safetensors: read only safetensors files.
    """
    weights: dict[str, Tensor] = {}
    for file in _files(path, _FILES[:2] if use_safetensors else _FILES):
        is_pickled = file.endswith(".bin")
        weights |= torch.load(file, "cpu", weights_only=True) if is_pickled else load_file(file)
    # Rotary frequencies are computed, and not always stored.
    return {
        _own_name(name): weight
        for name, weight in weights.items()
        if not name.endswith("rotary_emb.inv_freq")
    }


def _weight_names(path: str | Path) -> set[str]:
    """Return weight names without reading weights; all strings of a pickle, without running it."""
    names: set[str] = set()
    for file in _files(path, _FILES):
        if file.endswith(".bin"):
            with ZipFile(file) as stored:
                (inner,) = (name for name in stored.namelist() if name.endswith("/data.pkl"))
                names |= {arg for _, arg, _ in genops(stored.read(inner)) if isinstance(arg, str)}
        else:
            with safe_open(file, "pt") as stored:
                names |= {*stored.keys()}
    return {_own_name(name) for name in names}


def _own_name(name: str) -> str:
    return name.removeprefix("model.").replace("layers.0.", "midlayer.")


def _files(path: str | Path, kinds: tuple[str, ...]) -> Iterator[str]:
    """Yield the weight files of the first of these kinds that exists."""
    for name in kinds:
        file = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
        if file is None:
            continue
        if not name.endswith(_INDEX):
            yield file
            return
        index = json.loads(Path(file).read_text(encoding="utf-8"))
        places = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(places, dict):
            raise ValueError(f"{name}: expected a weight_map")
        for part in sorted({str(part) for part in places.values()}):
            yield str(cached_file(path, part))
        return
    raise ValueError(f"has none of {kinds}")
