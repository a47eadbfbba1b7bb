"""A draft model of either kind, or a drafter as it is: what "auto" and token trees run."""

from pathlib import Path

from transformers import PreTrainedModel

from fastspec.drafters import draft_model, glide
from fastspec.drafters.base import Drafter
from fastspec.drafters.context import DrafterContext, DrafterPlan


def build(context: DrafterContext) -> Drafter | DrafterPlan:
    """A GLIDE model where one is wanted, or where the model's configuration says that it is one."""
    given = context.drafter
    is_model = isinstance(given, (str, Path, PreTrainedModel))
    if context.wants_glide or (is_model and glide.is_glide(given)):
        return glide.build(context)
    return draft_model.build(context)
