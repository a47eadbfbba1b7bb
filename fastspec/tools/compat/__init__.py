"""Published scripts' functions and classes, see `fastspec.compat`; imported when a name is used."""

from importlib import import_module
from typing import Any

_MODULES = {
    "fastspec.tools.csd": ("csd",),
    "fastspec.tools.compat.cs_drafting": (
        "CSDraftingDecoderModel",
        "CSDraftingDecoderModelKVCache",
        "CSDraftingEncoderDecoderModel",
        "CSDraftingMaGModel",
        "CSDraftingModel",
        "CountedCSDraftingCachedDecoderModel",
        "CountedCSDraftingCachedEncoderDecoderModel",
        "CountedCSDraftingDecoderModel",
        "CountedCSDraftingDecoderModelKVCache",
        "CountedCSDraftingEncoderDecoderModel",
        "DummyModel",
        "get_mag_model",
    ),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}

__all__ = sorted(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fastspec.compat' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
