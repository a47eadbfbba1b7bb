"""The engine: requests, rounds of propose, verify and commit, and what it hands back."""

from fastspec.engine.engine import Engine

__all__ = ["Engine"]
