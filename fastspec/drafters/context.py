"""What a method's build function is given, and what it makes of that."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fastspec.config import EngineConfig, SpecConfig
from fastspec.drafters.base import Drafter
from fastspec.models.cache_size import Blocks
from fastspec.models.encoder_decoder import paged_model_of
from fastspec.models.loading import (
    ReadConfig,
    check_same_tokenizer,
    load_config,
    load_model,
    load_tokenizer,
)
from fastspec.models.paged_model import PagedModel
from fastspec.models.reduced_vocabulary import is_reduced, read_reduced
from fastspec.models.runner import ModelRunner
from fastspec.models.shared_vocabulary import with_vocabulary_of

ModelSource = str | Path | PreTrainedModel
DraftSource = ModelSource | Drafter
DrafterSource = DraftSource | Sequence[DraftSource]
Loader = Callable[[ModelSource, EngineConfig], PreTrainedModel]


def load_draft(
    field: str,
    source: ModelSource,
    config: EngineConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    target: ModelSource,
    load: Loader,
    keeps_ids: bool = False,
    read_tokenizer: Callable[[str, str | Path], PreTrainedTokenizerBase] = load_tokenizer,
    read_config: ReadConfig = load_config,
) -> PreTrainedModel:
    """A draft model; what it takes from its target comes from there, as does its tokenizer.

    One with another tokenizer beside it becomes one for the target's ids.

    Args:
        field: names it in errors.
        tokenizer: of the target; None = the draft's is not looked at.
        load: reads a draft that is complete.
        keeps_ids: refuse a draft with another tokenizer.
        read_tokenizer, read_config: read the draft's.
    Raises:
        ValueError: it cannot be loaded, or is no draft for this target.
    """
    if isinstance(source, PreTrainedModel):
        return load(source, config)
    if is_reduced(field, source, read_config):
        model = load_model("target", target, config)
        return load_model(field, source, config, partial(read_reduced, target=model), model)
    if tokenizer is None:
        return load(source, config)
    own = read_tokenizer(field, source)
    if keeps_ids:
        check_same_tokenizer(tokenizer, own)
    model = load(source, config)
    if own is None or tokenizer.get_vocab() == own.get_vocab():
        return model
    if model.config.is_encoder_decoder:
        check_same_tokenizer(tokenizer, own)
    target_config = (
        target.config if isinstance(target, PreTrainedModel) else load_config("target", target)
    )
    vocab_size = target_config.get_text_config(decoder=True).vocab_size
    return with_vocabulary_of(model, own, tokenizer, vocab_size)


@dataclass(frozen=True)
class DrafterPlan:
    """A drafter whose models are loaded, and that has no caches yet.

    Attributes:
        models: those that need a cache beside the target's, so that all are sized together.
        build: makes the drafter, given the target's runner (None where stored outputs stand for the
            target) and the blocks that all caches share.
        heterogeneous_vocab: how it drafts where its tokenizer is not the target's.
    """

    models: list[PagedModel]
    build: Callable[[ModelRunner | None, Blocks], Drafter]
    heterogeneous_vocab: str | None = None


def as_plan(made: Any) -> DrafterPlan:
    """What a build function has made; ValueError when that is no drafter."""
    if isinstance(made, Drafter) and not isinstance(made, type):
        return DrafterPlan([], lambda target, block_manager: made)
    if not isinstance(made, DrafterPlan):
        raise ValueError(f"build: expected a Drafter or a DrafterPlan from it, got {made!r:.80}")
    return made


@dataclass(frozen=True)
class DrafterContext:
    """The target and the options that a drafter is made for.

    Attributes:
        spec: the method and its options.
        config: device, dtype, backend and cache.
        tokenizer: of the target, if it has one.
        vocab_size: of the target.
        target: what the user named, or the loaded model.
        target_model: the loaded model; None where stored outputs stand for it.
        drafter: what the user named or passed; a method that needs no draft model gets None.
        wants_glide: whether a draft model has to be one of GLIDE.
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
        """A draft model as the engine runs it.

        Raises:
            ValueError: it cannot be loaded, or its tokenizer is not the target's.
        """
        if isinstance(source, Drafter):
            raise ValueError(f"drafter: expected a draft model, got the drafter {source.name!r}")
        if not isinstance(source, (str, Path, PreTrainedModel)):
            raise ValueError("drafter: several make a cascade, which spec.method has to be")
        target = self.target_model or self.target
        reader = load or partial(load_model, "drafter")
        given = self.config, self.tokenizer, target, reader
        readers = self.read_tokenizer, self.read_config
        model = load_draft("drafter", source, *given, load is not None, *readers)
        return paged_model_of(model, self.config)

    def runner(self, model: PagedModel, block_manager: Blocks) -> ModelRunner:
        """A runner over the blocks of the target's cache."""
        num_blocks, block_size = block_manager.num_blocks, block_manager.block_size
        chunk_size, cuda_graphs = self.config.prefill_chunk_size, self.config.cuda_graphs
        return ModelRunner(model, num_blocks, block_size, chunk_size, cuda_graphs)
