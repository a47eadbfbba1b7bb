"""Drafters: what proposes the tokens that the target checks."""

from fastspec.drafters.base import Drafter, Proposal, TreeProposer
from fastspec.drafters.cascade import CascadeDrafter
from fastspec.drafters.draft_model import DraftModelDrafter
from fastspec.drafters.glide import GlideDrafter
from fastspec.drafters.lookup import PromptLookupDrafter
from fastspec.drafters.mag import MagDrafter
from fastspec.drafters.ngram import NgramDrafter
from fastspec.drafters.tree import CapePlan, TreeDrafter, TreePlan

__all__ = [
    "CapePlan",
    "CascadeDrafter",
    "DraftModelDrafter",
    "Drafter",
    "GlideDrafter",
    "MagDrafter",
    "NgramDrafter",
    "PromptLookupDrafter",
    "Proposal",
    "TreeDrafter",
    "TreePlan",
    "TreeProposer",
]
