"""Drafting with a model whose passes also read pages of the target."""

from collections.abc import Callable
from functools import partial
from typing import Any

from transformers import PreTrainedModel

from fastspec.config import EngineConfig
from fastspec.config.methods import method_named
from fastspec.drafters.base import Drafter
from fastspec.drafters.context import DrafterContext, DrafterPlan
from fastspec.drafters.draft_model import DraftModelDrafter
from fastspec.models.blocks import Blocks
from fastspec.models.paged_model import PagedModel
from fastspec.models.runner import ModelRunner
from fastspec.models.sharded import ranks_of


class TargetReader(DraftModelDrafter):
    """Drafts with a model whose passes read pages of the target as well as its own.

    Args:
        model: the draft model, in its paged form.
        target: the runner whose pages are read.
        block_manager: manages the blocks that both share.
        config: see `ModelRunner`.
        probabilistic: sample drafts; False takes the most probable tokens.
        confidence_threshold: see `DraftModelDrafter`.
    Raises:
        ValueError: the draft model was made for another target.
    """

    reads_target = True
    kind: str  # name of its method and its models, for errors
    needs_whole_target = False  # not one that is split over processes
    model_class: type
    runner_class: Callable[..., ModelRunner]

    def __init__(
        self,
        model: PagedModel,
        target: ModelRunner,
        block_manager: Blocks,
        config: EngineConfig,
        probabilistic: bool,
        confidence_threshold: float | None = None,
    ):
        pages = self.pages(model, target, block_manager)
        runner = self.runner_class(model, pages, block_manager.num_blocks, config)
        options = probabilistic, confidence_threshold
        super().__init__(runner, block_manager, target.vocab_size, *options)

    @staticmethod
    def pages(model: PagedModel, target: ModelRunner, blocks: Blocks) -> Any:
        """Return what its passes read of the target, which keeps that from now on: by default
        hidden states, the inputs of some layers."""
        kept = target.keep_inputs(model.model.target_layers)
        # Blocks filled before have no states, and those of a draft may depend on the next token.
        blocks.share_with_next()
        return kept

    @classmethod
    def target_of(cls, context: DrafterContext) -> PreTrainedModel:
        """Return the target; ValueError if there is none that it can read."""
        if (target := context.target_model) is None:
            reads = method_named(cls.name).reads_target
            raise ValueError(f"method: {cls.name!r} reads {reads}, but there is no target")
        if cls.needs_whole_target and ranks_of(target) is not None:
            name = type(target).__name__
            raise ValueError(f"method: {cls.name!r} needs a whole target, {name} is split")
        return target

    @classmethod
    def plan(
        cls, context: DrafterContext, load: Callable[..., PreTrainedModel]
    ) -> Drafter | DrafterPlan:
        """Plan its method with a model that `load` loads, given its source, the config and the
        target; or accept a drafter of its own class."""
        given = context.drafter
        if isinstance(given, cls):
            return given
        if isinstance(given, Drafter):
            raise ValueError(f"drafter: {cls.kind} needs a {cls.kind} model, got {given.name!r}")
        model = context.load(given, partial(load, target=cls.target_of(context)))
        if not isinstance(model.model, cls.model_class):
            raise ValueError(f"drafter: {cls.kind} needs a {cls.kind} model, got {model.name}")
        return cls.plan_with(model, context)

    @classmethod
    def plan_with(cls, model: PagedModel, context: DrafterContext) -> DrafterPlan:
        """Plan its method with a loaded model."""
        spec = context.spec
        options = context.config, spec.draws_drafts, spec.confidence_threshold

        def drafter(target: ModelRunner | None, block_manager: Blocks) -> Drafter:
            assert target is not None
            return cls(model, target, block_manager, *options)

        return DrafterPlan([model], drafter)
