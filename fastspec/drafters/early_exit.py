"""Early exit: the target's first layers, with its norm and head, serve as the draft model."""

from collections.abc import Sequence

from torch import Tensor

from fastspec.config.checks import require
from fastspec.drafters.base import Batch, Drafter, Request
from fastspec.drafters.context import DrafterContext, DrafterPlan
from fastspec.drafters.draft_model import DraftModelDrafter
from fastspec.models.cache_size import Blocks
from fastspec.models.encoder_decoder import paged_model_of
from fastspec.models.layout import Span
from fastspec.models.runner import ModelRunner
from fastspec.models.twin import first_layers


class EarlyExitDrafter(DraftModelDrafter):
    """Drafts with the first layers of the target, on the target's own pages.

    The keys and values of committed tokens are already there from the target's passes. Those that
    drafting writes are overwritten, with the same values, when the target verifies the drafts. If
    the target is split over processes, all of them run these passes, on rank 0's tokens.

    Sources: Elhoushi et al., "LayerSkip", arXiv 2404.16710; transformers' `assistant_early_exit`.
    """

    name = "early_exit"

    def commit(self, batch: Batch, accepted: list[int]) -> None:
        """Do nothing: accepted tokens are in the target's cache."""

    def _unread(
        self, requests: Sequence[Request], texts: list[list[int]], num_rows: list[int]
    ) -> tuple[Tensor, list[Span]]:
        self._num_cached.update((request.request_id, request.num_cached) for request in requests)
        return super()._unread(requests, texts, num_rows)


def build(context: DrafterContext) -> DrafterPlan:
    """Build method "early_exit"."""
    target, count, config = context.target_model, context.spec.exit_layer, context.config

    def drafter(runner: ModelRunner | None, block_manager: Blocks) -> Drafter:
        if runner is None or target is None or count is None:
            raise ValueError("method: 'early_exit' runs the target's layers; there is no target")
        name = runner.paged_model.name
        if target.config.is_encoder_decoder or runner.paged_model.recurrent is not None:
            kind = "an encoder-decoder" if target.config.is_encoder_decoder else "recurrent"
            raise ValueError(f"method: 'early_exit' needs a plain decoder, but {name} is {kind}")
        most: int = target.config.get_text_config(decoder=True).num_hidden_layers - 1
        require("exit_layer", count, count <= most, f"an int from 1 to {most} for {name}")
        if runner.paged_model.ranks is not None:
            runner.paged_model.ranks.check(call="early_exit", exit_layer=count)
        model = paged_model_of(first_layers(target, count), config)
        own = context.runner(model, block_manager, runner.caches)
        options = context.spec.draws_drafts, context.spec.confidence_threshold
        return EarlyExitDrafter(own, block_manager, context.vocab_size, *options)

    return DrafterPlan([], drafter)
