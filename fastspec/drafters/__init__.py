"""Drafters: what proposes the tokens that the target checks."""

from fastspec.drafters.base import Drafter, Proposal, TreeProposer
from fastspec.drafters.draft_model import DraftModelDrafter
from fastspec.drafters.glide import GlideDrafter
from fastspec.drafters.lookup import PromptLookupDrafter
from fastspec.drafters.mag import MagDrafter

__all__ = [
    "DraftModelDrafter",
    "Drafter",
    "GlideDrafter",
    "MagDrafter",
    "PromptLookupDrafter",
    "Proposal",
    "TreeProposer",
]
