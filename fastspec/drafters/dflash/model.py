"""DFlash draft models, which guess a whole block of tokens in one pass."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3Attention,
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    rotate_half,
)

from fastspec.config.checks import is_int, require
from fastspec.config.k_matrix import MAX_DRAFT_TOKENS
from fastspec.models.layout import KVCache, PagedStep
from fastspec_kernels import cross_attention, store_kv, tree_attention


class DFlashConfig(Qwen3Config):
    """Shape of a DFlash draft: a shallow Qwen3 with these additional fields.

    Args:
        block_size: tokens of a block, the last one of the text among them.
        mask_token_id: stands for the tokens of a block that are to be guessed.
        target_layers: layers of the target whose inputs it reads.
        target_hidden_size: size of each of these; None = its own.
        draft_vocab_size: number of tokens that it can write; None = all.
        input_embedding_scale: factor of the target's embeddings.
        output_multiplier: factor of the head's logits.
        final_logit_softcapping: c, makes c * tanh(logits / c) of them; None or 0 = nothing.
        windows_are_causal: whether a row of a layer with a sliding window W sees only the W tokens
            up to itself; otherwise it sees its block and W tokens before that, and in layers
            without a window, which are never causal, the block and all tokens before it.
    Raises:
        ValueError: a field is out of range.
    """

    model_type = "dflash"

    block_size: int = 16
    mask_token_id: int = 0
    target_layers: list[int] | None = None
    target_hidden_size: int | None = None
    draft_vocab_size: int | None = None
    windows_are_causal: bool = False
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        self.target_hidden_size = self.target_hidden_size or self.hidden_size
        self.draft_vocab_size = self.draft_vocab_size or self.vocab_size
        size, mask, most = self.block_size, self.mask_token_id, self.vocab_size - 1
        fits = is_int(size) and 2 <= size <= MAX_DRAFT_TOKENS
        require("block_size", size, fits, f"an int from 2 to {MAX_DRAFT_TOKENS}")
        require(
            "mask_token_id", mask, is_int(mask) and 0 <= mask <= most, f"an int from 0 to {most}"
        )
        layers = self.target_layers or []  # transformers before 5.20 makes one of defaults
        fits = isinstance(layers, list) and all(is_int(layer) and layer >= 0 for layer in layers)
        require("target_layers", layers, fits, "numbers of layers")


@dataclass(frozen=True)
class BlockView:
    """Which rows of a pass have states of the target, and which are those of blocks.

    Attributes:
        states: [C, L * E], the target's states of the C rows that it has read.
        order: [T] int64, these rows, and then the Q rows of blocks.
        blocks: the pass with only the rows of blocks.
        kept: [R] int64, of the rows of blocks those whose logits are kept.
    """

    states: Tensor
    order: Tensor
    blocks: PagedStep
    kept: Tensor

    @property
    def rows(self) -> Tensor:
        """The rows of blocks [Q]."""
        return self.order[len(self.states) :]


class DFlashAttention(Qwen3Attention):
    """Attention from a block to itself and to the text before it, known by the target's states."""

    def __init__(self, config: DFlashConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.windows_are_causal = config.windows_are_causal
        self.block_len = config.block_size

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        block: Tensor,  # [1, Q, E]
        context: Tensor,  # [1, C, E]
        position_embeddings: tuple[Tensor, Tensor],  # of the context's rows, then the block's
        slots: Tensor,  # [C + Q] int64
        step: PagedStep,  # with only the block's rows
    ) -> Tensor:
        """Store keys and values of all rows; return the output of the block's rows [1, Q, E]."""
        both = torch.cat([context, block], dim=1)
        key, value, query = (
            project(states).unflatten(-1, (-1, self.head_dim))
            for project, states in ((self.k_proj, both), (self.v_proj, both), (self.q_proj, block))
        )
        of_block = tuple(part[:, context.shape[1] :] for part in position_embeddings)
        query = rotated(self.q_norm(query), of_block)
        key = rotated(self.k_norm(key), position_embeddings)
        cache = step.caches.get(self.layer_idx)
        window = self.sliding_window or 0
        if cache is None:
            cache = step.probed_cache(self.layer_idx, key[0], value[0], window, self.scaling)
        store_kv(key[0], value[0], *cache, slots, backend=step.backend)
        attended = self._attend(query[0], cache, window, step)
        return self.o_proj(attended.flatten(1))[None]

    def _attend(self, query: Tensor, cache: KVCache, window: int, step: PagedStep) -> Tensor:
        options = {"scale": self.scaling, "backend": step.backend}
        if window and not self.windows_are_causal:
            step, window = step.row_by_row(), window + self.block_len
        pages = step.block_table, step.context_lens, step.cu_rows
        if window:
            attended = tree_attention(query, *cache, *pages, sliding_window=window, **options)
        else:
            attended = cross_attention(query, *cache, *pages, **options)
        assert isinstance(attended, Tensor)
        return attended


def rotated(states: Tensor, factors: tuple[Tensor, ...]) -> Tensor:
    """Return states [B, T, H, D] rotated by the cosines and sines [B, T, D] of their places."""
    cos, sin = (part[:, :, None] for part in factors)
    return states * cos + rotate_half(states) * sin


class DFlashLayer(nn.Module):
    """A decoder layer whose attention also reads the states of a text."""

    def __init__(self, config: DFlashConfig, layer_idx: int):
        super().__init__()
        self.self_attn = DFlashAttention(config, layer_idx)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden: Tensor, *attended: Any) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), *attended)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class DFlashDraft(PreTrainedModel, GenerationMixin):
    """A DFlash draft, with the published names of its weights and the embeddings of its target.

    Row 0 of a block reads the last token of the text, row i > 0 the mask token, and guesses the
    token at its own place. Rows attend to each other and to the text before the block, whose keys
    and values each layer computes directly from the target's states; for layers with a window see
    `DFlashConfig`.

    Source: Chen et al., "DFlash: Block Diffusion for Flash Speculative Decoding", arXiv 2602.06036.
    """

    config: DFlashConfig
    config_class = DFlashConfig
    base_model_prefix = "model"
    _supports_attention_backend = True
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = True

    def __init__(self, config: DFlashConfig):
        super().__init__(config)
        size, layers = config.hidden_size, range(config.num_hidden_layers)
        read = len(config.target_layers or ()) * (config.target_hidden_size or size)
        self.fc = nn.Linear(read, size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(size, config.rms_norm_eps)
        self.layers = nn.ModuleList(DFlashLayer(config, index) for index in layers)
        self.norm = Qwen3RMSNorm(size, config.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config)
        self.embed_tokens: nn.Module = nn.Identity()  # this and the head are set later
        self.lm_head: nn.Module = nn.Identity()
        self.post_init()

    @property
    def target_layers(self) -> list[int]:
        """Layers of the target whose inputs it reads."""
        return self.config.target_layers or []

    @property
    def numbers_beside(self) -> int:
        """Numbers per token in pages other than keys and values: the target's states."""
        return self.fc.in_features

    def forward(
        self,
        input_ids: Tensor,  # [1, T]
        position_ids: Tensor,
        logits_to_keep: int | Tensor = 0,  # the view knows which
        paged_step: Any = None,
        **unused,  # the cache, through which keys and values only pass
    ) -> CausalLMOutputWithPast:
        view: BlockView | None = paged_step.target_view
        if view is None:  # the pass that probes the model has no states
            order = torch.arange(input_ids.shape[1], device=input_ids.device)
            states = self.fc.weight.new_zeros((0, self.fc.in_features))
            view = BlockView(states, order, paged_step, order[:1])
        config = self.config
        hidden = self.embed_tokens(input_ids[:, view.rows]) * config.input_embedding_scale
        context = self.hidden_norm(self.fc(view.states))[None]
        factors = self.rotary_emb(hidden, position_ids[:, view.order])
        slots = paged_step.slot_mapping[view.order]
        for layer in self.layers:
            hidden = layer(hidden, context, factors, slots, view.blocks)
        logits = self.lm_head(self.norm(hidden[:, view.kept]))
        if config.output_multiplier != 1:  # rows are wide
            logits = logits * config.output_multiplier
        if cap := config.final_logit_softcapping:
            logits = cap * torch.tanh(logits / cap)
        return CausalLMOutputWithPast(logits=logits)


def block_embeddings(target: PreTrainedModel) -> nn.Embedding:
    """Return the target's embeddings as blocks read them: without the scale or norm of its own."""
    embeddings: Any = target.get_input_embeddings()
    return nn.Embedding.from_pretrained(embeddings.weight.detach())
