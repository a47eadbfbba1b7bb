"""Cascades: drafters that review each other's drafts."""

from typing import cast

from fastspec.config.checks import refuse
from fastspec.drafters import mag
from fastspec.drafters.base import Drafter
from fastspec.drafters.cascade.drafter import CascadeDrafter
from fastspec.drafters.cascade.levels import CopyingLevel, Level, ModelLevel
from fastspec.drafters.context import DrafterContext, DrafterPlan, DraftSource
from fastspec.drafters.draft_model import DraftModelDrafter
from fastspec.models.cache_size import Blocks
from fastspec.models.paged_model import PagedModel
from fastspec.models.runner import ModelRunner


def build(context: DrafterContext) -> DrafterPlan:
    """Build method "cascade": the given levels, plus MaG if k_matrix has one more."""
    spec, given = context.spec, context.drafter
    sources = list(given) if isinstance(given, (list, tuple)) else [cast(DraftSource, given)]
    parts = [s if isinstance(s, Drafter) else context.load(s) for s in sources]
    if len(spec.cascade_matrix) == len(parts) + 1:
        parts.append(mag.build(context))
    elif len(spec.cascade_matrix) == len(parts):
        refuse("bigram_path", spec.bigram_path, "k_matrix leaves no level to MaG")
        if all(isinstance(part, PagedModel) for part in parts):
            refuse("mag_surplus", spec.mag_surplus or None, "k_matrix leaves no level to MaG")
    models = [part for part in parts if isinstance(part, PagedModel)]
    vocab_size = min([context.vocab_size, *(model.vocab_size for model in models)])
    probabilistic = spec.draws_drafts

    def level(part: PagedModel | Drafter, block_manager: Blocks) -> Level:
        if not isinstance(part, PagedModel):
            return CopyingLevel(part, vocab_size, spec.mag_surplus)
        runner = context.runner(part, block_manager)
        model = DraftModelDrafter(runner, block_manager, vocab_size, probabilistic)
        number = f"_{models.index(part) + 1}" if len(models) > 1 else ""
        return ModelLevel(model, f"{model.name}{number}", spec.lenience, context.config.backend)

    def drafter(target: ModelRunner | None, block_manager: Blocks) -> Drafter:
        return CascadeDrafter(
            [level(part, block_manager) for part in parts],
            spec.cascade_matrix,
            spec.lenience,
            vocab_size=context.vocab_size,
            probabilistic=probabilistic,
        )

    return DrafterPlan(models, drafter)
