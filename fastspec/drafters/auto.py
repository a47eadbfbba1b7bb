"""A draft model of any kind, or a drafter as it is: what "auto" and token trees run."""

from pathlib import Path

from transformers import PreTrainedModel

from fastspec.drafters import draft_model, eagle3, glide
from fastspec.drafters.base import Drafter
from fastspec.drafters.context import DrafterContext, DrafterPlan


def build(context: DrafterContext) -> Drafter | DrafterPlan:
    """A GLIDE model where one is wanted, else what the model's configuration says that it is."""
    given = context.drafter
    is_model = isinstance(given, (str, Path, PreTrainedModel))
    if context.wants_glide or (is_model and glide.is_glide(given)):
        return glide.build(context)
    if is_model and eagle3.is_eagle3(given):
        return eagle3.build(context)
    return draft_model.build(context)
