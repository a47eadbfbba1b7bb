"""Multi-token prediction: the target's own extra layer, which guesses the token after the next."""

from typing import Any

from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel

from fastspec.config.checks import one_line
from fastspec.drafters.context import DrafterContext, DrafterPlan
from fastspec.drafters.hidden_states import StateDrafter, StateReader
from fastspec.models.layout import PagedStep


class MtpDraft(StateReader):
    """The first MTP layer of a target, with the target's embeddings and head.

    Args:
        layers: the layers as transformers loads them.
    """

    # Whatever the target's layers can; attention is then the engine's.
    _can_set_attn_implementation: Any = MtpModel._can_set_attn_implementation
    _can_set_experts_implementation: Any = MtpModel._can_set_experts_implementation
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = True

    def __init__(self, layers: MtpModel):
        super().__init__(layers.config)
        self.mtp = layers
        self.embed_tokens, self.lm_head = layers.embed_tokens, layers.shared_head
        self.norm = nn.Identity()  # its states are normed

    def advance(
        self, embeddings: Tensor, hidden: Tensor, position_ids: Tensor, paged_step: PagedStep
    ) -> Tensor:
        return self.mtp.forward_layer(
            0, hidden, position_ids, None, inputs_embeds=embeddings, paged_step=paged_step
        )


class MtpDrafter(StateDrafter):
    """Drafts with the first MTP layer of the target, over and over.

    Sources: Gloeckle et al., "Better & Faster Large Language Models via Multi-token Prediction",
    arXiv 2404.19737; DeepSeek-AI, "DeepSeek-V3", arXiv 2412.19437.
    """

    name, kind = "mtp", "MTP"
    needs_whole_target = True
    model_class = MtpDraft


def load_mtp(target: PreTrainedModel) -> MtpDraft:
    """Load the first MTP layer of a target from the folder or hub id that it was loaded from.

    Raises:
        ValueError: it has none, or it cannot be loaded.
    """
    name, config = type(target).__name__, target.config.get_text_config(decoder=True)
    what = f"method: 'mtp' needs MTP layers, but {name}"
    if not getattr(config, "num_mtp_layers", None):
        raise ValueError(f"{what} has none (num_mtp_layers in its configuration)")
    if not hasattr(MtpModel, "forward_layer"):
        raise ValueError("method: 'mtp' needs transformers 5.20 or newer")
    if not target.config.name_or_path:
        raise ValueError(f"{what} was not loaded from a folder or hub id, where they are")
    try:
        layers = MtpModel.from_pretrained(target, device_map={"": target.device})
    except (OSError, KeyError, RuntimeError, ValueError, SafetensorError) as error:
        raise ValueError(
            f"method: 'mtp' cannot load the layers of {name}: {one_line(error)}"
        ) from error
    first: Any = layers.layers[0]
    if first.eh_proj.weight.dtype != target.dtype:
        first.to(target.dtype)  # transformers reads it as it read the target
    config = layers.config
    del layers.layers[1:]
    config.num_hidden_layers = 1
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1]
    return MtpDraft(layers).eval()


def build(context: DrafterContext) -> DrafterPlan:
    """Build method "mtp"."""
    model = context.on_pages(load_mtp(MtpDrafter.target_of(context)))
    return MtpDrafter.plan_with(model, context)
