"""The target itself drafts, with weights of 4 or 8 bits."""

from transformers import PreTrainedModel

from fastspec.drafters.context import DrafterContext
from fastspec.drafters.on_target import OnTargetDrafter
from fastspec.models.model_kinds import paged_model_of
from fastspec.models.paged_model import PagedModel
from fastspec.models.twin import copy_of_modules


class QuantizedDrafter(OnTargetDrafter):
    """Drafts with a copy of the target whose linear layers have weights of 4 or 8 bits.

    Decoding reads all weights for every token, so the copy's passes take about a quarter or half of
    the time of the target's in bfloat16. It needs no training, and no memory but that of the packed
    weights. Verification overwrites the approximate keys and values that drafting wrote.

    Sources: Georganas et al., "ML-SpecQD", arXiv 2503.13565; Tiwari et al., "QuantSpec", arXiv
    2502.10424.
    """

    name = "quantized"

    @classmethod
    def copy_of(
        cls, target_model: PreTrainedModel, paged_target: PagedModel, context: DrafterContext
    ) -> PagedModel:
        if paged_target.ranks is not None:
            name = paged_target.name
            raise ValueError(f"method: 'quantized' needs a whole target, {name} is split")
        bits = context.spec.value_of("draft_bits")
        return paged_model_of(copy_of_modules(target_model), context.config, bits)


build = QuantizedDrafter.plan
