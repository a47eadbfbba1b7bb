"""EAGLE: one-layer draft models that continue from their target's hidden states."""

from dataclasses import replace

from fastspec.drafters.base import Drafter
from fastspec.drafters.context import DrafterContext, DrafterPlan
from fastspec.drafters.eagle3.loading import load_eagle
from fastspec.drafters.eagle3.model import Eagle1Draft, EagleDraft
from fastspec.drafters.hidden_states import StateDrafter
from fastspec.models.paged_model import PagedModel


class Eagle3Drafter(StateDrafter):
    """Drafts with an EAGLE-3 draft model.

    With a draft model of EAGLE-1 or EAGLE-2, which reads the last hidden state, its name is
    "eagle". Its arguments are those of `fastspec.drafters.target_reader.TargetReader`.

    Sources: Li et al., "EAGLE-3", arXiv 2503.01840; for the other versions see `Eagle1Draft`.
    """

    name, kind = "eagle3", "EAGLE"
    model_class = EagleDraft

    def __init__(self, model: PagedModel, *args, **kwargs):
        super().__init__(model, *args, **kwargs)
        if isinstance(model.model, Eagle1Draft):
            self.name = "eagle"


def build(context: DrafterContext) -> Drafter | DrafterPlan:
    """Build method "eagle3"; a given Drafter must be of its own class."""
    context = replace(context, tokenizer=None)  # the draft model has none of its own
    return Eagle3Drafter.plan(context, load_eagle)
