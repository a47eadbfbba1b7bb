"""Early exit: the target's first layers, with its norm and head, serve as the draft model."""

from transformers import PreTrainedModel

from fastspec.config.checks import require
from fastspec.drafters.context import DrafterContext
from fastspec.drafters.on_target import OnTargetDrafter
from fastspec.models.model_kinds import paged_model_of
from fastspec.models.paged_model import PagedModel
from fastspec.models.twin import first_layers


class EarlyExitDrafter(OnTargetDrafter):
    """Drafts with the first layers of the target.

    Verification overwrites the keys and values that drafting wrote with the same ones. If the
    target is split over processes, all of them run these passes, on rank 0's tokens.

    Sources: Elhoushi et al., "LayerSkip", arXiv 2404.16710; transformers' `assistant_early_exit`.
    """

    name = "early_exit"

    @classmethod
    def copy_of(
        cls, target_model: PreTrainedModel, paged_target: PagedModel, context: DrafterContext
    ) -> PagedModel:
        count = context.spec.exit_layer
        assert count is not None
        most: int = target_model.config.get_text_config(decoder=True).num_hidden_layers - 1
        expected = f"an int from 1 to {most} for {paged_target.name}"
        require("exit_layer", count, count <= most, expected)
        if paged_target.ranks is not None:
            paged_target.ranks.check(call="early_exit", exit_layer=count)
        return paged_model_of(first_layers(target_model, count), context.config)


build = EarlyExitDrafter.plan
