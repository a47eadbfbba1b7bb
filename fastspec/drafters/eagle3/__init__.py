"""EAGLE draft models, which continue from their target's hidden states."""

from fastspec.drafters.eagle3.drafter import Eagle3Drafter, build
from fastspec.drafters.eagle3.loading import is_eagle3, load_eagle3, save_eagle3
from fastspec.drafters.eagle3.model import Eagle1Draft, Eagle3Config, Eagle3Draft, EagleDraft

__all__ = [
    "Eagle1Draft",
    "Eagle3Config",
    "Eagle3Draft",
    "Eagle3Drafter",
    "EagleDraft",
    "build",
    "is_eagle3",
    "load_eagle3",
    "save_eagle3",
]
