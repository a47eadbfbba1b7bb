"""Speculative decoding for Hugging Face language models: faster generation, the same output."""

from fastspec.config import EngineConfig, SamplingParams, SpecConfig
from fastspec.csd import csd
from fastspec.engine import Engine
from fastspec.outputs import RequestOutput, StreamEvent
from fastspec.stats import SpecStats

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
