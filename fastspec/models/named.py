"""Models that are known by a short name: those of the package, and those that can be fetched."""

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
}
FETCHED = ("smollm2",)
# Of targets, by the method that they are for; "" for all others.
_DRAFTS: dict[str, dict[str, str | None]] = {
    "tiny": {"": "tiny-draft", "glide": "tiny-glide", "eagle3": None},
    "smollm2": {"eagle3": "smollm2-eagle3"},
}


def cache_folder() -> Path:
    """Where fetched models are kept: `fastspec` in XDG_CACHE_HOME, by default ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "fastspec"


def folder_of(field: str, name: str) -> Path | None:
    """The folder of a model with a short name; None for any other name.

    Raises:
        ValueError: it is not there; `field` names the argument.
    """
    if name in FETCHED:
        folder = cache_folder() / name
        if not folder.is_dir():
            raise ValueError(f"{field}: {name!r} is not here yet: run `fastspec fetch {name}`")
        return folder
    if (folder := BUNDLED.get(name)) and not folder.is_dir():
        raise ValueError(f"{field}: {name!r} is not in this copy of fastspec")
    return folder


def own_draft(target: Any, method: str) -> str | None:
    """The draft that comes with a target of a short name, for a method; None for other targets."""
    drafts = _DRAFTS.get(target, {}) if isinstance(target, str) else {}
    return drafts.get(method, drafts.get(""))
