"""DFlash draft models, which guess a block of tokens in one pass."""

from fastspec.drafters.dflash.drafter import DFlashDrafter, build
from fastspec.drafters.dflash.loading import is_dflash, load_dflash, save_dflash
from fastspec.drafters.dflash.model import DFlashConfig, DFlashDraft

__all__ = [
    "DFlashConfig",
    "DFlashDraft",
    "DFlashDrafter",
    "build",
    "is_dflash",
    "load_dflash",
    "save_dflash",
]
