"""GLIDE: a draft model that also attends to the target's keys and values."""

from fastspec.drafters.base import Drafter
from fastspec.drafters.context import DrafterContext, DrafterPlan
from fastspec.drafters.glide.loading import load_glide
from fastspec.drafters.glide.model import GlideLlamaConfig, GlideLlamaForCausalLM
from fastspec.drafters.glide.paged import GlideRunner
from fastspec.drafters.target_reader import TargetReader
from fastspec.models.blocks import Blocks
from fastspec.models.layout import KVCache
from fastspec.models.paged_model import PagedModel
from fastspec.models.runner import ModelRunner


class GlideDrafter(TargetReader):
    """Drafts a chain with a GLIDE model, whose layer i of L reads target layer L_target - L + i.

    Its arguments are those of `fastspec.drafters.target_reader.TargetReader`.

    Source: Du et al., "GLIDE with a CaPE", arXiv 2402.02082.
    """

    name = "glide"
    kind = "GLIDE"
    model_class, runner_class = GlideLlamaForCausalLM, GlideRunner

    @staticmethod
    def pages(model: PagedModel, target: ModelRunner, blocks: Blocks) -> list[KVCache]:
        """Return the caches of the target's last layers, one for each layer of the draft."""
        num_layers = len(model.cache_shapes)
        if num_layers > len(target.caches):
            raise ValueError(f"drafter: has {num_layers} layers, the target {len(target.caches)}")
        caches = target.whole_caches(sorted(target.caches)[-num_layers:])
        config: GlideLlamaConfig = model.model.config
        expected = (config.large_num_key_value_heads, config.large_head_dim)
        for cache in caches:
            for part in cache:
                heads = tuple(part.shape[2:])
                if heads != expected or part.device != model.device:
                    raise ValueError(
                        "drafter: was made for key-value heads and head size"
                        f" {expected} on {model.device}, but the target has {heads} on"
                        f" {part.device}"
                    )
        return caches


def build(context: DrafterContext) -> Drafter | DrafterPlan:
    """Build method "glide"; a given Drafter must be of its own class."""
    return GlideDrafter.plan(context, load_glide)
