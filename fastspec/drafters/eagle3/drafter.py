"""EAGLE: drafts of one layer that go on from their target's hidden states."""

from dataclasses import replace
from functools import partial

from fastspec.drafters.base import Batch, Blocks, Drafter, Proposal
from fastspec.drafters.context import DrafterContext, DrafterPlan
from fastspec.drafters.draft_model import TargetReader
from fastspec.drafters.eagle3.eagle1 import Eagle1Draft
from fastspec.drafters.eagle3.loading import load_eagle3
from fastspec.drafters.eagle3.model import EagleDraft
from fastspec.drafters.eagle3.paged import Eagle3Runner
from fastspec.models.layout import KVCache
from fastspec.models.paged_model import PagedModel
from fastspec.models.runner import ModelRunner


class Eagle3Drafter(TargetReader):
    """Drafts with an EAGLE-3 draft; the target's runner keeps its hidden states from now on.

    With a draft of EAGLE-1 or EAGLE-2, which reads the last one, its name is "eagle".

    What it has drafted it reads again once that is committed, with the target's hidden states in
    place of its own. Its arguments are those of `fastspec.drafters.draft_model.TargetReader`.

    Sources: Li et al., "EAGLE-3", arXiv 2503.01840; `Eagle1Draft` names those of the others.
    """

    name = "eagle3"
    kind, reads = "EAGLE", "the target's hidden states"
    model_class, runner_class = EagleDraft, Eagle3Runner

    def __init__(self, model: PagedModel, *args, **kwargs):
        super().__init__(model, *args, **kwargs)
        if isinstance(model.model, Eagle1Draft):
            self.name = "eagle"

    @staticmethod
    def pages(model: PagedModel, target: ModelRunner, blocks: Blocks) -> list[KVCache]:
        kept = target.keep_inputs(model.model.target_layers)
        blocks.share_with_next()
        return kept

    def propose(self, batch: Batch) -> Proposal:
        proposal = super().propose(batch)
        for request in batch.requests:
            self.shorten(request.request_id, len(request.token_ids))
        return proposal

    def room(self, length: int) -> int:
        """As ever, and none after one token: there is no hidden state to begin with."""
        return super().room(length) if length > 1 else 0


def build(context: DrafterContext) -> Drafter | DrafterPlan:
    """The method "eagle3"; of drafters that are given, only one of its own kind."""
    context = replace(context, tokenizer=None)  # it has none of its own
    return Eagle3Drafter.plan(context, partial(load_eagle3, target=context.target_model))
