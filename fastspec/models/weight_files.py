"""The files that contain a model's weights: safetensors, or pickles, which may be refused."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from pickletools import genops
from typing import Any
from zipfile import ZipFile

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers.utils.hub import cached_file
from transformers.utils.import_utils import is_peft_available

_SAFE = ".safetensors"
_WHOLE, _INDEX = f"model{_SAFE}", f"model{_SAFE}.index.json"
_ADAPTER = f"adapter_model{_SAFE}"
_PICKLED = "pytorch_model.bin"
_FILES = (_WHOLE, _INDEX, _PICKLED, f"{_PICKLED}.index.json")


def check_safetensors(source: str | Path) -> None:
    """Refuse a folder or hub id for which transformers would read files other than safetensors.

    It would if the configuration or the index of the weights names them, and it always reads
    pickled adapters.

    Raises:
        ValueError: not all weights are stored as safetensors.
    """
    base, files = source, []
    adapter = _read(source, "adapter_config.json") if is_peft_available() else None
    if adapter is not None:
        base = adapter.get("base_model_name_or_path", source)
        files.append(_ADAPTER if _find(source, _ADAPTER) else "adapter_model.bin")
    if (config := _read(base, "config.json")) is None:
        return  # there is no model; loading it will say why
    named = config.get("transformers_weights")
    found = [name for name in ([named] if named else [_WHOLE, _INDEX]) if _find(base, name)]
    index = _read(base, found[0]) if found and found[0].endswith(".json") else None
    files += found[:1] if index is None else [*index["weight_map"].values()]
    others = [name for name in files if not name.endswith(_SAFE)]
    if others or not found:
        what = f"{others[0]} is not safetensors" if others else f"there is no {_WHOLE}"
        raise ValueError(
            f"{what}; load_format is 'safetensors'; 'auto' (--load-format auto) also reads pickled"
            " weights"
        )


def read_weights(path: str | Path, use_safetensors: bool = False) -> dict[str, Tensor]:
    """Read the weights of a folder or hub id onto the CPU, by name.

    Args:
        use_safetensors: read only safetensors files.
    """
    weights: dict[str, Tensor] = {}
    for file in _files(path, _FILES[:2] if use_safetensors else _FILES):
        is_pickled = file.endswith(".bin")
        weights |= torch.load(file, "cpu", weights_only=True) if is_pickled else load_file(file)
    return weights


def weight_names(path: str | Path) -> set[str]:
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
    return names


def fill(own: Mapping[str, Tensor], tensors: Mapping[str, Tensor], kind: str) -> None:
    """Copy stored weights to a draft's own; `kind` names it in errors.

    Raises:
        ValueError: a weight is missing, unexpected, or of another shape.
    """
    if names := own.keys() ^ tensors.keys():
        is_missing = min(names) in own
        raise ValueError(f"is no {kind}: {min(names)} is {'missing' if is_missing else 'new'}")
    for name, weight in own.items():
        check_shape(name, tensors[name], weight.shape)
    with torch.no_grad():
        for name, weight in own.items():
            weight.copy_(tensors[name])


def check_shape(name: str, weight: Tensor, shape: tuple[int | None, ...]) -> None:
    """Raise ValueError unless a weight has the shape that its target asks for."""
    if tuple(weight.shape) != tuple(shape):
        given = tuple(weight.shape)
        raise ValueError(f"{name} has shape {given}, but for this target it is {tuple(shape)}")


def _files(path: str | Path, kinds: tuple[str, ...]) -> Iterator[str]:
    """Yield the weight files of the first of these kinds that exists."""
    for name in kinds:
        file = _find(path, name)
        if file is None:
            continue
        if not name.endswith(".index.json"):
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


def _find(source: str | Path, name: str) -> str | None:
    return cached_file(source, name, _raise_exceptions_for_missing_entries=False)


def _read(source: str | Path, name: str) -> dict[str, Any] | None:
    file = _find(source, name)
    return None if file is None else json.loads(Path(file).read_text(encoding="utf-8"))
