"""Drafters, which propose the tokens that the target verifies."""

from fastspec.config.methods import unregister
from fastspec.drafters.base import Drafter, Proposal, TreeProposer
from fastspec.drafters.bigram_table import load_bigram
from fastspec.drafters.cascade.drafter import CascadeDrafter
from fastspec.drafters.context import DrafterContext, DrafterPlan
from fastspec.drafters.draft_model import DraftModelDrafter
from fastspec.drafters.eagle3.drafter import Eagle3Drafter
from fastspec.drafters.glide.drafter import GlideDrafter
from fastspec.drafters.mag import MagDrafter
from fastspec.drafters.ngram import NgramDrafter
from fastspec.drafters.prompt_lookup import PromptLookupDrafter
from fastspec.drafters.registry import register
from fastspec.drafters.tree.drafter import CapePlan, TreeDrafter, TreePlan

__all__ = [
    "CapePlan",
    "CascadeDrafter",
    "DraftModelDrafter",
    "Drafter",
    "DrafterContext",
    "DrafterPlan",
    "Eagle3Drafter",
    "GlideDrafter",
    "MagDrafter",
    "NgramDrafter",
    "PromptLookupDrafter",
    "Proposal",
    "TreeDrafter",
    "TreePlan",
    "TreeProposer",
    "load_bigram",
    "register",
    "unregister",
]
