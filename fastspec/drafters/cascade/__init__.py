"""Cascades: drafters that review each other's drafts."""

from dataclasses import replace
from pathlib import Path
from typing import cast

from transformers import PreTrainedModel

from fastspec.config.checks import refuse
from fastspec.drafters import mag
from fastspec.drafters.auto import BUILDERS, kind_of
from fastspec.drafters.base import Drafter
from fastspec.drafters.cascade.drafter import CascadeDrafter
from fastspec.drafters.cascade.levels import CopyingLevel, Level, ModelLevel
from fastspec.drafters.context import DrafterContext, DrafterPlan, DraftSource, as_plan
from fastspec.drafters.draft_model import DraftModelDrafter
from fastspec.drafters.on_target import OnTargetDrafter
from fastspec.drafters.quantized import QuantizedDrafter
from fastspec.models.blocks import Blocks
from fastspec.models.paged_model import PagedModel
from fastspec.models.runner import ModelRunner

Part = PagedModel | DrafterPlan | Drafter


def build(context: DrafterContext) -> DrafterPlan:
    """Build method "cascade": the given levels, plus MaG if k_matrix has one more.

    With draft_bits a copy of the target comes first, and drafts that read what the target computes
    read it from the copy.
    """
    spec, given = context.spec, context.drafter
    sources = list(given) if isinstance(given, (list, tuple)) else [cast(DraftSource, given)]
    parts = [_part(source, context) for source in sources if source is not None]
    num_levels = len(parts) + spec.copies_target
    if len(spec.cascade_matrix) == num_levels + 1:
        parts.append(mag.build(context))
    elif len(spec.cascade_matrix) == num_levels:
        refuse("bigram_path", spec.bigram_path, "k_matrix leaves no level to MaG")
        if all(isinstance(part, (PagedModel, DrafterPlan)) for part in parts):
            refuse("mag_surplus", spec.mag_surplus or None, "k_matrix leaves no level to MaG")
    models = [part for part in parts if isinstance(part, PagedModel)]
    readers = [model for part in parts if isinstance(part, DrafterPlan) for model in part.models]
    vocab_size = min([context.vocab_size, *(model.vocab_size for model in models)])
    probabilistic = spec.draws_drafts
    options = spec.lenience, context.config.backend

    def level(part: Part, quantized: OnTargetDrafter | None, block_manager: Blocks) -> Level:
        if isinstance(part, DrafterPlan):
            assert quantized is not None
            reader = cast(DraftModelDrafter, part.build(quantized.runner, block_manager))
            return ModelLevel(reader, *options, quantized)
        if not isinstance(part, PagedModel):
            return CopyingLevel(part, vocab_size, spec.mag_surplus)
        runner = context.runner(part, block_manager)
        size = vocab_size if quantized is None else context.vocab_size
        return ModelLevel(DraftModelDrafter(runner, block_manager, size, probabilistic), *options)

    def drafter(target: ModelRunner | None, block_manager: Blocks) -> Drafter:
        quantized, levels = None, []
        if spec.copies_target:
            quantized = QuantizedDrafter.for_target(target, block_manager, context)
            levels = [ModelLevel(quantized, *options)]
        levels += [level(part, quantized, block_manager) for part in parts]
        for each, name in zip(levels, numbered([each.name for each in levels]), strict=True):
            each.name = name
        return CascadeDrafter(
            levels,
            spec.cascade_matrix,
            spec.lenience,
            vocab_size=context.vocab_size,
            probabilistic=probabilistic,
        )

    return DrafterPlan([*models, *readers], drafter)


def numbered(names: list[str]) -> list[str]:
    """Tell equal names of levels apart, by a number from 1."""
    counts = [names[: place + 1].count(name) for place, name in enumerate(names)]
    pairs = zip(names, counts, strict=True)
    return [f"{name}_{count}" if names.count(name) > 1 else name for name, count in pairs]


def _part(source: DraftSource, context: DrafterContext) -> Part:
    """Load one level, or plan one that reads what a copy of the target computes."""
    if isinstance(source, Drafter):
        return source
    if context.spec.copies_target and isinstance(source, (str, Path, PreTrainedModel)):
        build_own = BUILDERS.get(kind_of(source, context.read_config))
        if build_own is not None:
            return as_plan(build_own(replace(context, drafter=source)))
    return context.load(source)
