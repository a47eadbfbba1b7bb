"""EAGLE-3: a draft of one layer that goes on from its target's hidden states."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from fastspec.drafters.base import Blocks, Drafter, Request, SamplingTensors
from fastspec.drafters.context import DrafterContext, DrafterPlan
from fastspec.drafters.draft_model import DraftModelDrafter
from fastspec.drafters.eagle3.loading import load_eagle3
from fastspec.drafters.eagle3.model import Eagle3Draft
from fastspec.drafters.eagle3.paged import Eagle3Runner
from fastspec.models.paged_model import PagedModel
from fastspec.models.runner import ModelRunner


class Eagle3Drafter(DraftModelDrafter):
    """Drafts with an EAGLE-3 draft.

    What it has drafted it reads again once that is committed, with the target's hidden states in
    place of its own.

    Args:
        model: the draft, for our pages.
        target: the runner whose hidden states are read; it keeps them from now on.
        block_manager: of the blocks that both share.
        chunk_size: tokens of one pass while a prompt is read.
        probabilistic: sample drafts, or take the best.
        confidence_threshold: see `DraftModelDrafter`.
    Raises:
        ValueError: the target lacks a layer that the draft reads.

    Source: Li et al., "EAGLE-3", arXiv 2503.01840.
    """

    name = "eagle3"

    def __init__(
        self,
        model: PagedModel,
        target: ModelRunner,
        block_manager: Blocks,
        chunk_size: int,
        probabilistic: bool,
        confidence_threshold: float | None = None,
    ):
        inputs = target.keep_inputs(model.model.config.target_layers)
        block_manager.share_with_next()
        num_blocks, block_size = block_manager.num_blocks, block_manager.block_size
        runner = Eagle3Runner(model, inputs, num_blocks, block_size, chunk_size)
        options = probabilistic, confidence_threshold
        super().__init__(runner, block_manager, target.vocab_size, *options)

    def write(
        self,
        requests: Sequence[Request],
        texts: list[list[int]],
        limits: list[int],
        sampling: SamplingTensors,
        uniforms: Tensor,
        keeps_logits: bool,
        coupled_keys: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, list[int]]:
        written = super().write(
            requests, texts, limits, sampling, uniforms, keeps_logits, coupled_keys
        )
        for request, text in zip(requests, texts, strict=True):
            self.shorten(request.request_id, len(text))
        return written

    def room(self, length: int) -> int:
        """As ever, and none after one token: there is no hidden state to begin with."""
        return super().room(length) if length > 1 else 0


def build(context: DrafterContext) -> Drafter | DrafterPlan:
    """The method "eagle3"; of drafters that are given, only one of its own kind."""
    given = context.drafter
    if isinstance(given, Eagle3Drafter):
        return given
    if isinstance(given, Drafter):
        raise ValueError(f"drafter: EAGLE-3 needs an EAGLE-3 draft, got {given.name!r}")
    if (target_model := context.target_model) is None:
        raise ValueError("drafter: EAGLE-3 reads the target's hidden states; there is no target")
    # It has no tokenizer of its own.
    context = replace(context, tokenizer=None)
    model = context.load(given, partial(load_eagle3, target=target_model))
    draft = model.model
    if not isinstance(draft, Eagle3Draft):
        raise ValueError(f"drafter: EAGLE-3 needs an EAGLE-3 draft, got {model.name}")
    num_kept = draft.fc.in_features + draft.fc.out_features
    model.bytes_beside = num_kept * model.dtype.itemsize
    chunk_size, spec = context.config.prefill_chunk_size, context.spec
    options = chunk_size, spec.draws_drafts, spec.confidence_threshold

    def drafter(target: ModelRunner | None, block_manager: Blocks) -> Drafter:
        if target is None:
            raise ValueError("drafter: EAGLE-3 reads the target's hidden states; there is none")
        return Eagle3Drafter(model, target, block_manager, *options)

    return DrafterPlan([model], drafter)
