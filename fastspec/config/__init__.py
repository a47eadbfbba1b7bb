"""The configs: sampling of one request, speculation, and the engine."""

from fastspec.config.engine import EngineConfig
from fastspec.config.sampling import SamplingParams
from fastspec.config.speculation import SpecConfig

__all__ = ["EngineConfig", "SamplingParams", "SpecConfig"]
