"""Drafters: what proposes the tokens that the target checks."""

from fastspec.drafters.base import Drafter, Proposal
from fastspec.drafters.draft_model import DraftModelDrafter
from fastspec.drafters.lookup import PromptLookupDrafter

__all__ = ["DraftModelDrafter", "Drafter", "PromptLookupDrafter", "Proposal"]
