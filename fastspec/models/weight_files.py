"""Checks which files contain a model's weights: safetensors, or pickles, which may be refused."""

import json
from pathlib import Path
from typing import Any

from transformers.utils.hub import cached_file
from transformers.utils.import_utils import is_peft_available

_SAFE = ".safetensors"
_WHOLE, _INDEX = f"model{_SAFE}", f"model{_SAFE}.index.json"
_ADAPTER = f"adapter_model{_SAFE}"


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
    named = (_read(base, "config.json") or {}).get("transformers_weights")
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


def _find(source: str | Path, name: str) -> str | None:
    return cached_file(source, name, _raise_exceptions_for_missing_entries=False)


def _read(source: str | Path, name: str) -> dict[str, Any] | None:
    file = _find(source, name)
    return None if file is None else json.loads(Path(file).read_text(encoding="utf-8"))
