"""Models with short names: those in the package, and those that can be fetched."""

import os
from importlib.resources import files
from pathlib import Path
from typing import Any

ASSETS = Path(str(files("fastspec"))) / "assets"
BUNDLED = {
    "tiny": ASSETS / "tiny-target",
    "tiny-draft": ASSETS / "tiny-draft",
    "tiny-glide": ASSETS / "tiny-glide",
    "smollm2-eagle3": ASSETS / "smollm2-eagle3",
    "smollm2-glide": ASSETS / "smollm2-glide",
}
FETCHED = ("smollm2",)
# Draft models by target and method; "" for all other methods.
_DRAFTS: dict[str, dict[str, str | None]] = {
    "tiny": {"": "tiny-draft", "glide": "tiny-glide", "eagle3": None},
    "smollm2": {"eagle3": "smollm2-eagle3", "glide": "smollm2-glide"},
}


def cache_folder() -> Path:
    """Return the folder of fetched models: `fastspec` in XDG_CACHE_HOME, by default ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "fastspec"


def folder_of(field: str, name: str) -> Path | None:
    """Return the folder of a model with a short name; None for any other name.

    Raises:
        ValueError: the folder does not exist; `field` names the argument.
    """
    if name in FETCHED:
        folder = cache_folder() / name
        if not folder.is_dir():
            raise ValueError(f"{field}: {name!r} has not been fetched: run `fastspec fetch {name}`")
        return folder
    if (folder := BUNDLED.get(name)) and not folder.is_dir():
        raise ValueError(f"{field}: {name!r} is missing from this copy of fastspec")
    return folder


def shown_name(source: str) -> str:
    """Return the name of a model's folder or file, and a hub id or short name as it is."""
    return Path(source).resolve().name if Path(source).exists() else source


def own_draft(target: Any, method: str) -> str | None:
    """Return the draft model bundled with a short-named target for a method; None for others."""
    drafts = _DRAFTS.get(target, {}) if isinstance(target, str) else {}
    return drafts.get(method, drafts.get(""))
