"""Drafters from what users pass: a path, a hub id, a model or a drafter of their own."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fastspec.config import EngineConfig, SpecConfig
from fastspec.drafters import (
    Drafter,
    DraftModelDrafter,
    GlideDrafter,
    MagDrafter,
    PromptLookupDrafter,
)
from fastspec.drafters.base import Blocks
from fastspec.drafters.bigram_table import load_bigram
from fastspec.drafters.cascade.drafter import CascadeDrafter
from fastspec.drafters.cascade.levels import CopyingLevel, Level, ModelLevel
from fastspec.drafters.glide import is_glide, load_glide
from fastspec.drafters.ngram import NgramDrafter
from fastspec.drafters.tree.factory import as_trees
from fastspec.models.encoder_decoder import paged_model_of
from fastspec.models.loading import bigram_beside, check_same_tokenizer, load_model, load_tokenizer
from fastspec.models.paged_model import PagedModel
from fastspec.models.runner import ModelRunner

ModelSource = str | Path | PreTrainedModel
DraftSource = ModelSource | Drafter
DrafterSource = DraftSource | Sequence[DraftSource]


@dataclass(frozen=True)
class DrafterPlan:
    """A drafter whose models are loaded, and that has no caches yet.

    Attributes:
        models: those that need a cache beside the target's, so that all are sized together.
        build: makes the drafter, given the target's runner (None where stored outputs stand for the
            target) and the blocks that all caches share.
    """

    models: list[PagedModel]
    build: Callable[[ModelRunner | None, Blocks], Drafter]


class DrafterFactory:
    """Makes drafters for one target, with its options and its tokenizer."""

    def __init__(
        self,
        spec: SpecConfig,
        config: EngineConfig,
        tokenizer: PreTrainedTokenizerBase | None,
        target_vocab_size: int,
    ):
        self._spec = spec
        self._config = config
        self._tokenizer = tokenizer
        self._target_vocab_size = target_vocab_size

    def plan(self, target: ModelSource, drafter: DrafterSource | None) -> DrafterPlan | None:
        """The drafter that target, drafter and spec.method together name, or None.

        Raises:
            ValueError: a drafter that is missing, not wanted, or cannot be loaded.
        """
        method = self._spec.method
        if drafter is not None:
            _check_type(drafter)
        if method == "none":
            return None
        if method in ("prompt_lookup", "mag", "ngram"):
            if drafter is not None:
                raise ValueError(f"drafter: method {method!r} takes none")
            return _ready(self._copying(target))
        if drafter is None and isinstance(target, str) and target == "tiny":
            drafter = "tiny-glide" if method == "glide" else "tiny-draft"
        if drafter is None and method in ("draft_model", "glide", "cascade", "tree"):
            raise ValueError(f"drafter: method {method!r} needs a draft model, got None")
        if drafter is None and self._spec.cape:
            raise ValueError("drafter: cape needs a draft model, got None")
        if method == "cascade" and drafter is not None:
            return self._cascade(target, drafter)
        if method == "draft_model" and isinstance(drafter, (str, Path, PreTrainedModel)):
            self._refuse_glide(drafter)
        return None if drafter is None else self.plan_given(drafter, method == "glide")

    def plan_given(self, drafter: DrafterSource, wants_glide: bool = False) -> DrafterPlan:
        """A drafter as it is, or one that runs the draft model that is named or passed.

        A folder or hub id is read as a GLIDE model if that is wanted, or its configuration says so.
        Either drafts trees if the options ask for them.
        """
        _check_type(drafter)
        plan = self._draft_plan(drafter, wants_glide)

        def build(target: ModelRunner | None, block_manager: Blocks) -> Drafter:
            draft = plan.build(target, block_manager)
            return as_trees(draft, self._spec, self._config.backend)

        return DrafterPlan(plan.models, build)

    def _draft_plan(self, drafter: DrafterSource, wants_glide: bool) -> DrafterPlan:
        if isinstance(drafter, Drafter):
            if wants_glide and not isinstance(drafter, GlideDrafter):
                raise ValueError(f"drafter: GLIDE needs a GLIDE model, got {drafter.name!r}")
            return _ready(drafter)
        if not isinstance(drafter, (str, Path, PreTrainedModel)):
            raise ValueError("drafter: several make a cascade, which spec.method has to be")
        self._check_tokenizer(drafter)
        if wants_glide or is_glide(drafter):
            return self._glide(drafter)
        model = self._load(drafter)
        probabilistic = self._spec.draws_drafts

        def build(target: ModelRunner | None, block_manager: Blocks) -> Drafter:
            runner = self._runner(model, block_manager)
            return DraftModelDrafter(runner, block_manager, self._target_vocab_size, probabilistic)

        return DrafterPlan([model], build)

    def _glide(self, source: ModelSource) -> DrafterPlan:
        model = paged_model_of(load_glide(source, self._config), self._config)
        probabilistic = self._spec.draws_drafts
        chunk_size = self._config.prefill_chunk_size

        def build(target: ModelRunner | None, block_manager: Blocks) -> Drafter:
            if target is None:
                raise ValueError("drafter: GLIDE reads the target's cache, and there is no target")
            return GlideDrafter(model, target, block_manager, chunk_size, probabilistic)

        return DrafterPlan([model], build)

    def _copying(self, target: ModelSource) -> Drafter:
        if self._spec.method == "prompt_lookup":
            return PromptLookupDrafter(*self._spec.lookup_lengths, self._config.backend)
        if self._spec.method == "ngram":
            return NgramDrafter(*self._spec.ngram_counts)
        return self._mag(target)

    def _mag(self, target: ModelSource) -> MagDrafter:
        file = self._spec.bigram_path or bigram_beside(target)
        bigram = load_bigram(file, self._target_vocab_size) if file else None
        return MagDrafter(bigram, self._config.backend)

    def _cascade(self, target: ModelSource, drafter: DrafterSource) -> DrafterPlan:
        """Levels as they are given, and MaG after them where k_matrix has one more."""
        spec, backend = self._spec, self._config.backend
        parts = [s if isinstance(s, Drafter) else self._level_model(s) for s in _as_list(drafter)]
        if len(spec.cascade_matrix) == len(parts) + 1:
            parts.append(self._mag(target))
        models = [part for part in parts if isinstance(part, PagedModel)]
        vocab_size = min([self._target_vocab_size, *(model.vocab_size for model in models)])
        probabilistic = spec.draws_drafts

        def level(part: PagedModel | Drafter, block_manager: Blocks) -> Level:
            if not isinstance(part, PagedModel):
                return CopyingLevel(part, vocab_size)
            runner = self._runner(part, block_manager)
            model = DraftModelDrafter(runner, block_manager, vocab_size, probabilistic)
            number = f"_{models.index(part) + 1}" if len(models) > 1 else ""
            return ModelLevel(model, f"{model.name}{number}", spec.lenience, backend)

        def build(target: ModelRunner | None, block_manager: Blocks) -> Drafter:
            levels = [level(part, block_manager) for part in parts]
            return CascadeDrafter(
                levels,
                spec.cascade_matrix,
                spec.lenience,
                vocab_size=self._target_vocab_size,
                probabilistic=probabilistic,
            )

        return DrafterPlan(models, build)

    def _level_model(self, source: ModelSource) -> PagedModel:
        self._check_tokenizer(source)
        self._refuse_glide(source)
        return self._load(source)

    def _load(self, source: ModelSource) -> PagedModel:
        return paged_model_of(load_model("drafter", source, self._config), self._config)

    def _refuse_glide(self, source: ModelSource) -> None:
        """Refuse a model that reads the target's cache where it would not be given that."""
        if is_glide(source):
            method = self._spec.method
            raise ValueError(f"drafter: a GLIDE model needs method 'glide', not {method!r}")

    def _check_tokenizer(self, source: ModelSource) -> None:
        """Refuse a folder or hub id whose token ids mean something else."""
        if not isinstance(source, PreTrainedModel):
            check_same_tokenizer(self._tokenizer, load_tokenizer("drafter", source))

    def _runner(self, model: PagedModel, block_manager: Blocks) -> ModelRunner:
        """A runner over the blocks of the target's cache."""
        num_blocks, block_size = block_manager.num_blocks, block_manager.block_size
        chunk_size, cuda_graphs = self._config.prefill_chunk_size, self._config.cuda_graphs
        return ModelRunner(model, num_blocks, block_size, chunk_size, cuda_graphs)


def _check_type(drafter: Any) -> None:
    one = (str, Path, PreTrainedModel, Drafter)
    parts = drafter if isinstance(drafter, (list, tuple)) else [drafter]
    for part in parts:
        if isinstance(part, PreTrainedTokenizerBase):
            raise ValueError(
                "drafter: got a tokenizer; the second argument is the drafter, and tokenizer= takes"
                " the tokenizer"
            )
        if not isinstance(part, one):
            raise ValueError(
                "drafter: expected a path, a hub id, a PreTrainedModel, a Drafter, or several in a"
                f" list, got {type(part).__name__}"
            )


def _as_list(drafter: DrafterSource) -> list[DraftSource]:
    is_one = isinstance(drafter, (str, Path, PreTrainedModel, Drafter))
    return [drafter] if is_one else list(drafter)


def _ready(drafter: Drafter) -> DrafterPlan:
    return DrafterPlan([], lambda runner, block_manager: drafter)
