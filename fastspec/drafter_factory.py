"""Drafters from what users pass: a path, a hub id, a model or a drafter of their own."""

from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fastspec.bigram import load_bigram
from fastspec.block_manager import BlockManager
from fastspec.config import EngineConfig, SpecConfig
from fastspec.drafters import Drafter, DraftModelDrafter, MagDrafter, PromptLookupDrafter
from fastspec.loading import bigram_beside, check_same_tokenizer, load_model, load_tokenizer
from fastspec.paged_model import PagedModel
from fastspec.runner import ModelRunner

DrafterSource = str | Path | PreTrainedModel | Drafter


class DrafterFactory:
    """Makes drafters for one target, with its options and its tokenizer."""

    def __init__(
        self, spec: SpecConfig, config: EngineConfig, tokenizer: PreTrainedTokenizerBase | None
    ):
        self._spec = spec
        self._config = config
        self._tokenizer = tokenizer

    def source(
        self,
        target: str | Path | PreTrainedModel,
        drafter: DrafterSource | None,
        target_vocab_size: int,
    ) -> DrafterSource | None:
        """The drafter that target, drafter and spec.method together name, or None."""
        spec = self._spec
        if spec.method == "none":
            return None
        if spec.method in ("prompt_lookup", "mag"):
            if drafter is not None:
                raise ValueError(f"drafter: method {spec.method!r} takes none")
            if spec.method == "prompt_lookup":
                return PromptLookupDrafter(*spec.lookup_lengths, self._config.backend)
            file = spec.bigram_path or bigram_beside(target)
            bigram = load_bigram(file, target_vocab_size) if file else None
            return MagDrafter(bigram, self._config.backend)
        if drafter is None and isinstance(target, str) and target == "tiny":
            return "tiny-draft"
        if drafter is None and spec.method == "draft_model":
            raise ValueError("drafter: method 'draft_model' needs a draft model, got None")
        return drafter

    def load_model(self, source: str | Path | PreTrainedModel) -> PagedModel:
        """A draft model; ValueError when its token ids mean something else."""
        if not isinstance(source, PreTrainedModel):
            check_same_tokenizer(self._tokenizer, load_tokenizer("drafter", source))
        return PagedModel(load_model("drafter", source, self._config), self._config.backend)

    def from_model(
        self, draft_model: PagedModel, block_manager: BlockManager, target_vocab_size: int
    ) -> DraftModelDrafter:
        """A drafter that runs a draft model over the blocks of the target's cache."""
        num_blocks, block_size = block_manager.num_blocks, block_manager.block_size
        chunk_size = self._config.prefill_chunk_size
        runner = ModelRunner(draft_model, num_blocks, block_size, chunk_size)
        probabilistic = self._spec.draft_sample_method == "probabilistic"
        return DraftModelDrafter(runner, block_manager, target_vocab_size, probabilistic)
