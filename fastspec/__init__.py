"""Speculative decoding for Hugging Face language models: faster generation, the same output."""

from fastspec.config import EngineConfig, SamplingParams, SpecConfig
from fastspec.engine.engine import Engine
from fastspec.engine.outputs import RequestOutput, StreamEvent
from fastspec.engine.stats import SpecStats
from fastspec.tools.csd import csd

__version__ = "0.1.0"

__all__ = [
    "Engine",
    "EngineConfig",
    "RequestOutput",
    "SamplingParams",
    "SpecConfig",
    "SpecStats",
    "StreamEvent",
    "csd",
]
