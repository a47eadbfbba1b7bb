"""Speculative decoding for Hugging Face language models: faster generation, the same output."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastspec import compat as compat
    from fastspec import drafters as drafters
    from fastspec.config import EngineConfig, SamplingParams, SpecConfig
    from fastspec.engine.engine import Engine
    from fastspec.engine.outputs import RequestOutput, StreamEvent
    from fastspec.engine.stats import SpecStats
    from fastspec.hf import HFGenerator, hf_generate
    from fastspec.tools.csd import csd

__version__ = "0.1.0"

__all__ = [
    "Engine",
    "EngineConfig",
    "HFGenerator",
    "RequestOutput",
    "SamplingParams",
    "SpecConfig",
    "SpecStats",
    "StreamEvent",
    "csd",
    "hf_generate",
]

# Imported on first use, because most import torch and transformers.
_PACKAGES = ("compat", "config", "drafters", "engine", "models", "tools", "train")
_MODULES = {
    "Engine": "fastspec.engine.engine",
    "EngineConfig": "fastspec.config",
    "HFGenerator": "fastspec.hf",
    "RequestOutput": "fastspec.engine.outputs",
    "SamplingParams": "fastspec.config",
    "SpecConfig": "fastspec.config",
    "SpecStats": "fastspec.engine.stats",
    "StreamEvent": "fastspec.engine.outputs",
    "csd": "fastspec.tools.csd",
    "hf_generate": "fastspec.hf",
}


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"fastspec.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PACKAGES})
