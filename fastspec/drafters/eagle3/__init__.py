"""EAGLE draft models, which continue from their target's hidden states."""

from fastspec.drafters.eagle3.drafter import Eagle3Drafter, build
from fastspec.drafters.eagle3.loading import is_eagle, load_eagle, save_eagle3
from fastspec.drafters.eagle3.model import Eagle1Draft, Eagle3Draft, EagleConfig, EagleDraft

__all__ = [
    "Eagle1Draft",
    "Eagle3Draft",
    "Eagle3Drafter",
    "EagleConfig",
    "EagleDraft",
    "build",
    "is_eagle",
    "load_eagle",
    "save_eagle3",
]
