"""The GLIDE draft model: a Llama whose layers also attend to the target's keys and values."""

from copy import deepcopy
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRotaryEmbedding,
    rotate_half,
)

from fastspec.models.flat import FlatPass, has_layer_kernels
from fastspec.models.layout import PagedStep
from fastspec.models.paged_model import paged_attention
from fastspec.models.rotary import RotaryTable
from fastspec.models.twin import is_plain


class GlideLlamaConfig(LlamaConfig):
    """Shape of a GLIDE draft model; fields named large_... describe its target.

    A folder may lack them; `load_glide` then takes them from the target itself.

    Args:
        large_hidden_size: used only to derive large_head_dim if that is not given.
        large_num_attention_heads: heads of a query to the target's keys, a multiple of
            large_num_key_value_heads.
        large_num_key_value_heads: None = one for each attention head.
        large_head_dim: None = large_hidden_size / large_num_attention_heads.
        block_size: B of the training mask, see `block_mask`.
        use_remap: must be False; an early version of the model remapped the target's keys and
            values.
    Raises:
        ValueError: the fields do not fit together.
    """

    model_type = "glide_llama"

    large_hidden_size: int = 4096
    large_num_attention_heads: int = 32
    large_num_key_value_heads: int | None = None
    large_head_dim: int | None = None
    block_size: int = 5
    use_remap: bool = False

    def __post_init__(self, **kwargs):
        if self.large_num_key_value_heads is None:
            self.large_num_key_value_heads = self.large_num_attention_heads
        if self.large_head_dim is None:
            self.large_head_dim = self.large_hidden_size // self.large_num_attention_heads
        super().__post_init__(**kwargs)
        heads, kv_heads = self.large_num_attention_heads, self.large_num_key_value_heads
        if not kv_heads or heads % kv_heads:
            raise ValueError(
                f"large_num_attention_heads: {heads}, not a multiple of {kv_heads} key-value heads"
            )
        if self.block_size < 1:
            raise ValueError(f"block_size: expected an int >= 1, got {self.block_size}")
        if self.use_remap:
            raise ValueError("use_remap: True is not supported, only False")


class Glimpse(Protocol):
    """The view of the target that a pass of the draft model has."""

    def attend(self, layer: int, query: Tensor) -> Tensor:
        """Attend with rotated queries [B, H, Q, D] of a draft layer; return [B, Q, H, D]."""
        ...


class GlideCrossAttention(nn.Module):
    """Attention to the target's keys and values, which are used without projection.

    The query is rotated by its absolute position with the draft model's own rotary settings, at the
    target's head size; the target's keys are already rotated.
    """

    def __init__(self, config: GlideLlamaConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.head_dim: int = config.large_head_dim  # pyright: ignore[reportAttributeAccessIssue]
        size = config.large_num_attention_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, size, bias=False)
        self.o_proj = nn.Linear(size, config.hidden_size, bias=False)
        self.rotary_emb = None
        if config.head_dim != self.head_dim:
            large = deepcopy(config)
            large.head_dim = self.head_dim
            self.rotary_emb = LlamaRotaryEmbedding(large)

    def forward(
        self,
        hidden_states: Tensor,  # [B, Q, E]
        position_ids: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        glimpse: Glimpse,
    ) -> Tensor:
        query = self.q_proj(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        if self.rotary_emb is not None:
            position_embeddings = self.rotary_emb(query, position_ids)
        cos, sin = (part.unsqueeze(1) for part in position_embeddings)
        rotated = query * cos + rotate_half(query) * sin
        return self.o_proj(glimpse.attend(self.layer_idx, rotated).flatten(2))


class GlideDecoderLayer(LlamaDecoderLayer):
    """Self-attention, cross-attention without a norm before it, feed-forward block."""

    def __init__(self, config: GlideLlamaConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.cross_attn = GlideCrossAttention(config, layer_idx)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        hidden_states: Tensor,
        position_ids: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        glimpse: Glimpse | None = None,
        paged_step: Any = None,
        **kwargs,
    ) -> Tensor:
        attended, _ = self.self_attn(
            hidden_states=self.input_layernorm(hidden_states),
            position_ids=position_ids,
            position_embeddings=position_embeddings,
            paged_step=paged_step,
            **kwargs,
        )
        hidden_states = hidden_states + attended
        if glimpse is None and paged_step is not None:
            glimpse = paged_step.target_view
        if glimpse is not None:
            hidden_states = hidden_states + self.cross_attn(
                hidden_states, position_ids, position_embeddings, glimpse
            )
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class GlideLlamaForCausalLM(LlamaForCausalLM):
    """A wide and shallow Llama that also reads the target's cache; weights have published names.

    Draft layer i of L reads target layer L_target - L + i. `forward` takes `glimpse`, the view of
    the target; without it there is no cross-attention. Source: Du et al., "GLIDE with a CaPE",
    arXiv 2402.02082.
    """

    config: GlideLlamaConfig
    config_class = GlideLlamaConfig
    _no_split_modules: ClassVar[list[str]] = ["GlideDecoderLayer"]

    def __init__(self, config: GlideLlamaConfig):
        super().__init__(config)
        self.model.layers = nn.ModuleList(
            GlideDecoderLayer(config, index) for index in range(config.num_hidden_layers)
        )
        self.post_init()

    def flat_pass(self, backend: str, cache_dtype: torch.dtype) -> tuple[FlatPass, list] | None:
        """Return the pass without the model's own code, whose layers stay modules (none in the
        list); None if the device or a module does not support it."""
        on_cpu = self.device.type == "cpu" and has_layer_kernels(self.device, backend)
        if not on_cpu or not all(map(is_plain, self.modules())):
            return None
        return FlatGlide(self), []

    @property
    def numbers_read(self) -> int:
        """Numbers read from the target's cache for each token in it."""
        config: Any = self.config
        return (
            2 * config.num_hidden_layers * config.large_num_key_value_heads * config.large_head_dim
        )


class FlatGlide:
    """Runs passes on a CPU, see `PagedModel.flat`: only the modules of the layers,
    without transformers' code around them, which takes longer than they do.

    Args:
        draft: the twin to run, whose modules use our kernels.
    """

    def __init__(self, draft: GlideLlamaForCausalLM):
        self._draft, base = draft, draft.model
        self._table = RotaryTable(base.rotary_emb)
        layers: Any = base.layers
        rotations = (layer.cross_attn.rotary_emb for layer in layers)
        # Each layer, and the rotation of its queries if the target's head size differs.
        self._layers = [(a, b and RotaryTable(b)) for a, b in zip(layers, rotations, strict=True)]

    def forward(
        self, input_ids: Tensor, positions: Tensor, rows: Tensor | None, step: PagedStep
    ) -> Tensor:
        """See `PagedModel.forward`."""
        base = self._draft.model
        hidden = base.embed_tokens(input_ids)
        factors = _factors(self._table, positions)
        for layer, table in self._layers:
            hidden = hidden + _attend(layer, layer.input_layernorm(hidden), factors, step)
            if step.target_view is not None:
                crossing = factors if table is None else _factors(table, positions)
                hidden = hidden + _cross(layer, hidden, crossing, step.target_view)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        hidden = hidden if rows is None else hidden[rows]
        return self._draft.lm_head(base.norm(hidden))

    def chain_parts(self) -> None:
        """None: `draft_chain` does not read the target's cache, as these layers do."""


def _factors(table: RotaryTable, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin [T, 1, D] float32, for `_rotated`."""
    cos, sin = table.factors(positions)
    first, second = sin.chunk(2, dim=-1)
    return cos[:, None], torch.cat((-first, second), dim=-1)[:, None]


def _rotated(states: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Return states [T, H, D] rotated, pairing the two halves of each head."""
    turned = states * cos + states.roll(states.shape[-1] // 2, dims=-1) * signed_sin
    return turned.to(states.dtype)


def _attend(
    layer: GlideDecoderLayer, normed: Tensor, factors: tuple[Tensor, Tensor], step: PagedStep
) -> Tensor:
    """Compute self-attention of rows [T, E], and store their keys and values."""
    part = layer.self_attn
    query, key, value = (
        project(normed).unflatten(-1, (-1, part.head_dim))
        for project in (part.q_proj, part.k_proj, part.v_proj)
    )
    query, key, value = (
        states.transpose(0, 1)[None]
        for states in (_rotated(query, *factors), _rotated(key, *factors), value)
    )
    out, _ = paged_attention(part, query, key, value, None, part.scaling, paged_step=step)
    return part.o_proj(out[0].flatten(1))


def _cross(
    layer: GlideDecoderLayer,
    hidden: Tensor,
    factors: tuple[Tensor, Tensor],
    glimpse: Glimpse,
) -> Tensor:
    """Compute cross-attention of rows [T, E] to the target."""
    part = layer.cross_attn
    query = _rotated(part.q_proj(hidden).unflatten(-1, (-1, part.head_dim)), *factors)
    seen = glimpse.attend(part.layer_idx, query.transpose(0, 1)[None])
    return part.o_proj(seen[0].flatten(1))


AutoConfig.register(GlideLlamaConfig.model_type, GlideLlamaConfig, exist_ok=True)
AutoModelForCausalLM.register(GlideLlamaConfig, GlideLlamaForCausalLM, exist_ok=True)
