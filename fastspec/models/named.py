"""Models with short names: those in the package, and those that can be fetched."""

import os
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from fastspec.config import SpecConfig
from fastspec.config.methods import OWN_DRAFTS, methods

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
    "tiny": {
        **dict.fromkeys(OWN_DRAFTS),
        "": "tiny-draft",
        "glide": "tiny-glide",
    },
    "smollm2": {"eagle3": "smollm2-eagle3", "glide": "smollm2-glide"},
}

# What method "auto" stands for with a target whose own draft needs a method of its own: the options
# that were fastest on CPUs.
_USUAL: dict[str, dict[str, Any]] = {
    "smollm2": {
        "method": "eagle3",
        "num_speculative_tokens": 3,
        "confidence_threshold": 0.3,
        "suffix_tokens": 8,
        "draft_bits": 8,
    },
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


def other_drafts(target: Any) -> str:
    """Return the end of a message about a missing draft: for which methods the target has one."""
    names = [m.name for m in methods().values() if m.needs_draft and own_draft(target, m.name)]
    return f"; {target} comes with drafts for {', '.join(names)}" if names else ""


def usual_spec(spec: SpecConfig, target: Any, on_cpu: bool) -> SpecConfig:
    """Return the spec with what method "auto" stands for if a short-named target is given alone.

    Options that `spec` sets are kept, and those that cannot be combined with them left out.
    """
    usual = _USUAL.get(target) if isinstance(target, str) and spec.method == "auto" else None
    if usual is None:
        return spec
    left_out = {name for name in usual if name != "method" and getattr(spec, name) is not None}
    if not on_cpu:
        left_out.add("draft_bits")
    if spec.cape or spec.schedule != "constant":
        left_out.add("confidence_threshold")
    if spec.step_costs is not None:  # one for each number of draft tokens
        left_out.add("num_speculative_tokens")
    return replace(spec, **{name: value for name, value in usual.items() if name not in left_out})
