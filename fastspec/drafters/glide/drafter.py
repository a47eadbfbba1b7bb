"""GLIDE: a draft model that also attends to the target's keys and values."""

from functools import partial

from fastspec.drafters.base import Blocks, Drafter
from fastspec.drafters.context import DrafterContext, DrafterPlan
from fastspec.drafters.draft_model import DraftModelDrafter
from fastspec.drafters.glide.loading import load_glide
from fastspec.drafters.glide.model import GlideLlamaConfig, GlideLlamaForCausalLM
from fastspec.drafters.glide.paged import GlideRunner
from fastspec.models.paged_model import KVCache, PagedModel
from fastspec.models.runner import ModelRunner


class GlideDrafter(DraftModelDrafter):
    """Drafts a chain with a GLIDE model, whose layer i of L reads target layer L_target - L + i.

    Args:
        model: the draft model, for our pages.
        target: the runner whose pages are read.
        block_manager: of the blocks that both share.
        chunk_size: tokens of one pass while a prompt is read.
        probabilistic: sample drafts, or take the best.
        confidence_threshold: see `DraftModelDrafter`.
    Raises:
        ValueError: the draft was made for a target of another shape.

    Source: Du et al., "GLIDE with a CaPE", arXiv 2402.02082.
    """

    name = "glide"

    def __init__(
        self,
        model: PagedModel,
        target: ModelRunner,
        block_manager: Blocks,
        chunk_size: int,
        probabilistic: bool,
        confidence_threshold: float | None = None,
    ):
        caches = _top_caches(model, target)
        num_blocks, block_size = block_manager.num_blocks, block_manager.block_size
        runner = GlideRunner(model, caches, num_blocks, block_size, chunk_size)
        options = probabilistic, confidence_threshold
        super().__init__(runner, block_manager, target.vocab_size, *options)


def _top_caches(model: PagedModel, target: ModelRunner) -> list[KVCache]:
    """The caches of the target's last layers, one for each layer of the draft."""
    num_layers = len(model.cache_shapes)
    if num_layers > len(target.caches):
        raise ValueError(f"drafter: has {num_layers} layers, the target {len(target.caches)}")
    caches = [target.caches[layer] for layer in sorted(target.caches)[-num_layers:]]
    config: GlideLlamaConfig = model.model.config
    expected = (config.large_num_key_value_heads, config.large_head_dim)
    for cache in caches:
        for part in cache:
            heads = tuple(part.shape[2:])
            if heads != expected or part.device != model.device:
                raise ValueError(
                    "drafter: was made for key-value heads and head size"
                    f" {expected} on {model.device}, the target has {heads} on {part.device}"
                )
    return caches


def build(context: DrafterContext) -> Drafter | DrafterPlan:
    """The method "glide"; of drafters that are given, only one of its own kind."""
    given = context.drafter
    if isinstance(given, GlideDrafter):
        return given
    if isinstance(given, Drafter):
        raise ValueError(f"drafter: GLIDE needs a GLIDE model, got {given.name!r}")
    model = context.load(given, partial(load_glide, target=context.target_model))
    if not isinstance(model.model, GlideLlamaForCausalLM):
        raise ValueError(f"drafter: GLIDE needs a GLIDE model, got {model.name}")
    chunk_size, spec = context.config.prefill_chunk_size, context.spec
    options = chunk_size, spec.draws_drafts, spec.confidence_threshold

    def drafter(target: ModelRunner | None, block_manager: Blocks) -> Drafter:
        if target is None:
            raise ValueError("drafter: GLIDE reads the target's cache, and there is no target")
        return GlideDrafter(model, target, block_manager, *options)

    return DrafterPlan([model], drafter)
