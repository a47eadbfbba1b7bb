"""Folders of EAGLE drafts as they are published: their configuration and their weights."""

import json
from collections.abc import Iterator
from pathlib import Path
from pickletools import genops
from typing import Any
from zipfile import ZipFile

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.utils.hub import cached_file

from fastspec.models.loading import SPECULATORS

WEIGHTS = "model.safetensors"
_PICKLED = "pytorch_model.bin"
_INDEX = ".index.json"  # of weights in several files
_FILES = (WEIGHTS, WEIGHTS + _INDEX, _PICKLED, _PICKLED + _INDEX)


def read_config(path: str | Path) -> dict[str, Any]:
    """The configuration of a draft; what `speculators` nests in it comes to the top.

    Raises:
        ValueError: another kind of draft, or it does not say what its layer is.
    """
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


def read_weights(path: str | Path, use_safetensors: bool = False) -> dict[str, Tensor]:
    """The weights of a folder or hub id by the names of our modules.

    Args:
        use_safetensors: read no others.
    Raises:
        ValueError: there are none.
    """
    weights: dict[str, Tensor] = {}
    for file in _files(path, _FILES[:2] if use_safetensors else _FILES):
        is_pickled = file.endswith(".bin")
        weights |= torch.load(file, "cpu", weights_only=True) if is_pickled else load_file(file)
    # The frequencies are computed, and not always stored.
    return {
        _own_name(name): weight
        for name, weight in weights.items()
        if not name.endswith("rotary_emb.inv_freq")
    }


def weight_names(path: str | Path) -> set[str]:
    """Names of the weights, which are not read; of a pickle every text, and it runs nothing.

    Raises:
        ValueError: there are none.
    """
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
    """The files that hold weights, of the first of some kinds that there is."""
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
