"""The engine: requests, rounds of propose, verify and commit, and their outputs."""

from fastspec.engine.engine import Engine

__all__ = ["Engine"]
