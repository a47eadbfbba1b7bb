"""A draft model of any kind, or a drafter as it is: what "auto" and token trees run."""

from pathlib import Path

from transformers import PreTrainedModel

from fastspec.drafters import draft_model, eagle3, glide
from fastspec.drafters.base import Drafter
from fastspec.drafters.context import DrafterContext, DrafterPlan
from fastspec.drafters.kinds import kind_of


def build(context: DrafterContext) -> Drafter | DrafterPlan:
    """A GLIDE model where one is wanted, else what the model's configuration says that it is."""
    given = context.drafter
    is_model = isinstance(given, (str, Path, PreTrainedModel))
    kind = kind_of(given, context.read_config) if is_model else "model"
    if context.wants_glide or kind == "glide":
        return glide.build(context)
    return (eagle3 if kind == "eagle3" else draft_model).build(context)
