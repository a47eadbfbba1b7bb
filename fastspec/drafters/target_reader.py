"""Drafting with a model whose passes also read pages of the target."""

from collections.abc import Callable
from typing import Any

from fastspec.config import EngineConfig
from fastspec.drafters.base import Drafter
from fastspec.drafters.context import DrafterContext, DrafterPlan, Loader
from fastspec.drafters.draft_model import DraftModelDrafter
from fastspec.models.blocks import Blocks
from fastspec.models.paged_model import PagedModel
from fastspec.models.runner import ModelRunner


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

    kind: str  # name of its method and its models, for errors
    reads: str  # what it reads of the target, for errors
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
        """Return what its passes read of the target, which keeps that from now on."""
        raise NotImplementedError

    @classmethod
    def plan(cls, context: DrafterContext, load: Loader) -> Drafter | DrafterPlan:
        """Plan its method with a model that `load` loads, or accept a drafter of its own class."""
        given = context.drafter
        if isinstance(given, cls):
            return given
        if isinstance(given, Drafter):
            raise ValueError(f"drafter: {cls.kind} needs a {cls.kind} model, got {given.name!r}")
        model = context.load(given, load)
        if not isinstance(model.model, cls.model_class):
            raise ValueError(f"drafter: {cls.kind} needs a {cls.kind} model, got {model.name}")
        return cls.plan_with(model, context)

    @classmethod
    def plan_with(cls, model: PagedModel, context: DrafterContext) -> DrafterPlan:
        """Plan its method with a loaded model."""
        spec = context.spec
        options = context.config, spec.draws_drafts, spec.confidence_threshold

        def drafter(target: ModelRunner | None, block_manager: Blocks) -> Drafter:
            if target is None:
                raise ValueError(f"drafter: {cls.kind} reads {cls.reads}, but there is no target")
            return cls(model, target, block_manager, *options)

        return DrafterPlan([model], drafter)
