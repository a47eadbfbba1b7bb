"""Drafting with a changed copy of the target, on the target's own pages."""

from collections.abc import Sequence

from transformers import PreTrainedModel

from fastspec.drafters.base import Batch, Request
from fastspec.drafters.context import DrafterContext, DrafterPlan
from fastspec.drafters.draft_model import DraftModelDrafter
from fastspec.models.blocks import Blocks
from fastspec.models.layout import KVCache, Span
from fastspec.models.paged_model import PagedModel
from fastspec.models.runner import ModelRunner


class OnTargetDrafter(DraftModelDrafter):
    """Drafts with a copy of the target that is cheaper to run, on the target's own pages.

    The keys and values of committed tokens are already there from the target's passes. Those that
    drafting writes, from the last committed token on, are overwritten when the target verifies.
    """

    reads_target = True

    @classmethod
    def copy_of(
        cls, target_model: PreTrainedModel, paged_target: PagedModel, context: DrafterContext
    ) -> PagedModel:
        """Return the copy that drafts; `paged_target` is the target as the engine runs it.

        Raises:
            ValueError: there is no such copy of this target.
        """
        raise NotImplementedError

    @classmethod
    def for_target(
        cls, target: ModelRunner | None, block_manager: Blocks, context: DrafterContext
    ) -> "OnTargetDrafter":
        """Return the drafter for a target that is a plain decoder, on the pages of its runner."""
        target_model, name = context.target_model, cls.name
        if target is None or target_model is None:
            raise ValueError(f"method: {name!r} runs the target's layers; there is no target")
        paged_target = target.paged_model
        if target_model.config.is_encoder_decoder or paged_target.recurrent is not None:
            kind = "an encoder-decoder" if target_model.config.is_encoder_decoder else "recurrent"
            raise ValueError(
                f"method: {name!r} needs a plain decoder, but {paged_target.name} is {kind}"
            )
        copy = cls.copy_of(target_model, paged_target, context)
        own = OnTargetRunner(copy, target, block_manager, context)
        options = context.spec.draws_drafts, context.spec.confidence_threshold
        return cls(own, block_manager, context.vocab_size, *options)

    @classmethod
    def plan(cls, context: DrafterContext) -> DrafterPlan:
        """Plan its method."""
        return DrafterPlan([], lambda target, blocks: cls.for_target(target, blocks, context))

    def num_cached(self, request: Request) -> int:
        """Return how many leading tokens of a text the target or, in this step, the copy read."""
        return max(self._num_cached.get(request.request_id, 0), request.num_cached)

    def commit(self, batch: Batch, accepted: list[int]) -> None:
        """Forget what the copy read in this step: accepted tokens are in the target's cache."""
        for request in batch.requests:
            self._num_cached.pop(request.request_id, None)

    def _unread(
        self, requests: Sequence[Request], texts: list[list[int]], num_rows: list[int]
    ) -> tuple[list[int], list[Span]]:
        # Never less than the target's, whose exact keys and values must not be written again.
        self._num_cached.update((r.request_id, self.num_cached(r)) for r in requests)
        return super()._unread(requests, texts, num_rows)


class OnTargetRunner(ModelRunner):
    """Runs a copy of the target on the pages of the target's runner, also those for inputs."""

    def __init__(
        self, model: PagedModel, target: ModelRunner, blocks: Blocks, context: DrafterContext
    ):
        super().__init__(model, blocks.num_blocks, context.config, target.caches)
        self._target = target

    def keep_inputs(self, layers: list[int]) -> KVCache:
        """See `ModelRunner.keep_inputs`; the target's runner keeps them as well."""
        pages = self._target.keep_inputs(layers)
        if self.inputs is None:
            self.inputs = inputs = self._target.inputs
            self.paged_model.watch_inputs(layers)
            if self.graphs is not None and inputs is not None:
                self.graphs.keep_inputs(inputs)
        return pages
