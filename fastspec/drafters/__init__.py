"""Drafters: what proposes the tokens that the target checks."""

from fastspec.drafters.base import Drafter, Proposal, TreeProposer
from fastspec.drafters.draft_model import DraftModelDrafter
from fastspec.drafters.glide import GlideDrafter
from fastspec.drafters.lookup import PromptLookupDrafter
from fastspec.drafters.mag import MagDrafter
from fastspec.drafters.tree import CapePlan, TreeDrafter, TreePlan

__all__ = [
    "CapePlan",
    "DraftModelDrafter",
    "Drafter",
    "GlideDrafter",
    "MagDrafter",
    "PromptLookupDrafter",
    "Proposal",
    "TreeDrafter",
    "TreePlan",
    "TreeProposer",
]
