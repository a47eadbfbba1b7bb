"""The input and the result of a method's build function."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fastspec.config import EngineConfig, SpecConfig
from fastspec.drafters.base import Drafter
from fastspec.models.blocks import Blocks
from fastspec.models.loading import (
    ReadConfig,
    check_same_tokenizer,
    load_config,
    load_model,
    load_tokenizer,
)
from fastspec.models.model_kinds import paged_model_of
from fastspec.models.paged_model import PagedModel
from fastspec.models.reduced_vocabulary import is_reduced, read_reduced
from fastspec.models.runner import ModelRunner
from fastspec.models.shared_vocabulary import with_vocabulary_of

ModelSource = str | Path | PreTrainedModel
DraftSource = ModelSource | Drafter
DrafterSource = DraftSource | Sequence[DraftSource]
Loader = Callable[[ModelSource, EngineConfig], PreTrainedModel]


@dataclass(frozen=True)
class DrafterPlan:
    """A drafter whose models are loaded, but that has no caches yet.

    Attributes:
        models: models that need a cache in addition to the target's; all are sized together.
        build: makes the drafter, given the target's runner (None if stored outputs replace the
            target) and the blocks that all caches share.
        heterogeneous_vocab: how it drafts if its tokenizer differs from the target's.
    """

    models: list[PagedModel]
    build: Callable[[ModelRunner | None, Blocks], Drafter]
    heterogeneous_vocab: str | None = None


def as_plan(made: Any) -> DrafterPlan:
    """Return a build function's result as a plan; ValueError if it is not a drafter."""
    if isinstance(made, Drafter) and not isinstance(made, type):
        return DrafterPlan([], lambda target, block_manager: made)
    if not isinstance(made, DrafterPlan):
        raise ValueError(f"build: expected it to make a Drafter or DrafterPlan, got {made!r:.80}")
    return made


@dataclass(frozen=True)
class DrafterContext:
    """The target and the options that a drafter is made for.

    Attributes:
        spec: the method and its options.
        config: device, dtype, backend and cache.
        tokenizer: the target's tokenizer, if it has one.
        vocab_size: the target's vocabulary size.
        target: the target as the user named it, or the loaded model.
        target_model: the loaded target; None if stored outputs replace it.
        drafter: the drafter as the user named or passed it; None if the method needs no model.
        wants_glide: whether a draft model must be a GLIDE model.
        read_tokenizer, read_config: read those of a draft model, each once.
    """

    spec: SpecConfig
    config: EngineConfig
    tokenizer: PreTrainedTokenizerBase | None
    vocab_size: int
    target: ModelSource
    drafter: DrafterSource | None = None
    wants_glide: bool = False
    target_model: PreTrainedModel | None = None
    read_tokenizer: Callable[[str, str | Path], PreTrainedTokenizerBase] = field(
        default_factory=lambda: cache(load_tokenizer)
    )
    read_config: ReadConfig = field(default_factory=lambda: cache(load_config))

    def load(self, source: DrafterSource | None, load: Loader | None = None) -> PagedModel:
        """Load a draft model for the engine to run; see `load_pretrained`."""
        if isinstance(source, Drafter):
            raise ValueError(f"drafter: expected a draft model, got the drafter {source.name!r}")
        if not isinstance(source, (str, Path, PreTrainedModel)):
            raise ValueError("drafter: a list of several needs spec.method 'cascade'")
        return self.on_pages(self.load_pretrained(source, load))

    @property
    def config_of_files(self) -> EngineConfig:
        """The config that draft models are read with, onto the device of the target."""
        if self.target_model is None:
            return self.config
        return replace(self.config, device=str(self.target_model.device))

    def on_pages(self, model: PreTrainedModel) -> PagedModel:
        """Put a loaded draft model on pages, with as many bits a weight as the options say."""
        return paged_model_of(model, self.config, self.spec.bits_of_draft_model)

    def load_pretrained(
        self, source: ModelSource, load: Loader | None = None, field: str = "drafter"
    ) -> PreTrainedModel:
        """Load a draft model; a reduced one takes the parts it lacks from the target.

        A model with a tokenizer of its own is converted to the target's token ids.

        Args:
            load: loads a complete draft model that must have the target's tokenizer; None = any.
            field: names the model in errors.
        Raises:
            ValueError: the model cannot be loaded, or cannot draft for this target.
        """
        read = load or partial(load_model, field)
        if isinstance(source, PreTrainedModel):
            if self.spec.heterogeneous_vocab == "intersection":
                expected = "a draft model by its path or hub id, whose tokenizer is read"
                raise ValueError(f"heterogeneous_vocab: 'intersection' needs {expected}")
            return read(source, self.config)
        config = self.config_of_files
        if is_reduced(self.read_config(field, source)):
            target = load_model("target", self.target_model or self.target, self.config)
            read_with = partial(read_reduced, target=target)
            return load_model(field, source, config, read_with, target)
        if self.tokenizer is None:
            return read(source, config)
        own = self.read_tokenizer(field, source)
        if load is not None:
            check_same_tokenizer(self.tokenizer, own)
        model = read(source, config)
        if self.tokenizer.get_vocab() == own.get_vocab():
            return model
        if model.config.is_encoder_decoder:
            check_same_tokenizer(self.tokenizer, own)
        return with_vocabulary_of(model, own, self.tokenizer, self.vocab_size)

    def runner(self, model: PagedModel, block_manager: Blocks) -> ModelRunner:
        """A runner over the blocks of the target's cache, with caches of its own."""
        return ModelRunner(model, block_manager.num_blocks, self.config)
