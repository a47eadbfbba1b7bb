"""Draft models of one decoder layer that reads its target's hidden states; those of EAGLE."""

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from fastspec.config.checks import require
from fastspec.drafters.hidden_states import PagedStates, StateReader
from fastspec.models.flat import (
    ChainParts,
    FlatLayer,
    FlatPass,
    has_layer_kernels,
    linear_weights,
    run_layers,
)
from fastspec.models.layout import PagedStep
from fastspec.models.reduced_vocabulary import ReducedHead
from fastspec.models.rotary import RotaryTable
from fastspec.models.twin import is_plain
from fastspec_kernels import LayerWeights


def usual_layers(num_layers: int) -> list[int]:
    """Return the layers whose inputs published EAGLE-3 drafts read: early, middle and late."""
    return [2, num_layers // 2, num_layers - 3]


class EagleConfig(LlamaConfig):
    """Shape of an EAGLE draft model: a one-layer Llama with these additional fields.

    Args:
        draft_vocab_size: number of tokens that it can write; None = all.
        target_hidden_size: size of each hidden state that it reads; None = its own.
        target_layers: layers of the target whose inputs it reads; None = the three that published
            drafts read, see `usual_layers`.
        norm_before_residual: whether the residual is the hidden state after its norm.
    Raises:
        ValueError: the shape is not that of an EAGLE draft.
    """

    model_type = "eagle3"

    num_hidden_layers: int = 1  # transformers before 5.20 makes one of defaults, to compare with
    draft_vocab_size: int | None = None
    target_hidden_size: int | None = None
    target_layers: list[int] | None = None
    norm_before_residual: bool = False

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        if self.target_hidden_size is None:
            self.target_hidden_size = self.hidden_size
        if self.draft_vocab_size is None:
            self.draft_vocab_size = self.vocab_size
        num = self.num_hidden_layers
        require("num_hidden_layers", num, num == 1, "1, as EAGLE drafts have one layer")
        most = self.vocab_size
        layers = self.target_layers
        fits = all(layer >= 0 for layer in layers or ())
        require("target_layers", layers, fits, "numbers of layers")
        fits = 1 <= self.draft_vocab_size <= most
        require("draft_vocab_size", self.draft_vocab_size, fits, f"1 to vocab_size, {most}")


class EagleLayer(nn.Module):
    """A decoder layer from its attention on; the draft determines what attention reads."""

    def __init__(self, config: EagleConfig):
        super().__init__()
        self.self_attn = LlamaAttention(config, 0)
        self.mlp = LlamaMLP(config)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)

    def weights(self) -> LayerWeights | None:
        """Return weights for `decoder_layers`, after normed embeddings; None if unsupported."""
        return None

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """Return the output of the layer, given that of attention."""
        hidden = residual + attended
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Eagle3Layer(EagleLayer):
    """A decoder layer whose attention reads concatenated embeddings and hidden states."""

    def __init__(self, config: EagleConfig):
        super().__init__(config)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.norm_before_residual = config.norm_before_residual
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = getattr(self.self_attn, name)
            wide = nn.Linear(2 * size, narrow.out_features, bias=narrow.bias is not None)
            setattr(self.self_attn, name, wide)
        self.input_layernorm = LlamaRMSNorm(size, eps)
        self.hidden_norm = LlamaRMSNorm(size, eps)

    def join(self, embeddings: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input of attention [..., 2E], and the residual for its output [..., E]."""
        normed = self.hidden_norm(hidden)
        joined = torch.cat([self.input_layernorm(embeddings), normed], dim=-1)
        return joined, normed if self.norm_before_residual else hidden

    def weights(self) -> LayerWeights | None:
        found = linear_weights(self)
        if found is None or not all(map(is_plain, self.modules())):
            return None
        is_gated = found.keys() <= {*LayerWeights._fields} and self.mlp.config.hidden_act == "silu"
        if self.norm_before_residual or not is_gated:
            return None
        norms = self.hidden_norm.weight, self.post_attention_layernorm.weight
        weights = *norms, *found.values()
        if len({weight.dtype for weight in weights}) > 1:
            return None
        if not all(weight.is_contiguous() for weight in weights):
            return None
        return LayerWeights(attention_norm=norms[0], mlp_norm=norms[1], **found)


class EagleDraft(StateReader):
    """An EAGLE draft; its weights have published names."""

    config: EagleConfig
    config_class = EagleConfig

    midlayer: Any  # an EagleLayer

    def __init__(self, config: EagleConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, device="meta")
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.lm_head: nn.Module = nn.Identity()  # embeddings and head are set later

    def join(self, embeddings: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input of attention, and the residual for its output [..., E]."""
        raise NotImplementedError

    def advance(
        self, embeddings: Tensor, hidden: Tensor, position_ids: Tensor, paged_step: PagedStep
    ) -> Tensor:
        joined, residual = self.join(embeddings, hidden)
        attended, _ = self.midlayer.self_attn(
            hidden_states=joined,
            position_embeddings=self.rotary_emb(embeddings, position_ids),
            attention_mask=None,
            paged_step=paged_step,
        )
        return self.midlayer.finish(residual, attended)


class Eagle3Draft(EagleDraft):
    """The draft model of EAGLE-3, which reads several hidden states.

    Source: Li et al., "EAGLE-3", arXiv 2503.01840.
    """

    def __init__(self, config: EagleConfig):
        super().__init__(config)
        size, read = config.hidden_size, config.target_hidden_size or config.hidden_size
        num_states = len(config.target_layers or range(3))
        self.fc = nn.Linear(num_states * read, size, bias=False)
        self.midlayer = Eagle3Layer(config)
        self.norm = LlamaRMSNorm(size, config.rms_norm_eps)
        self.post_init()

    @property
    def target_layers(self) -> list[int]:
        return self.config.target_layers or []

    @property
    def numbers_beside(self) -> int:
        return self.fc.in_features + self.fc.out_features

    def set_ends(
        self, embeddings: Tensor, head: Tensor, token_ids: Tensor, vocab_size: int
    ) -> None:
        """Set frozen embeddings, and the head's rows [R, E] for R of V tokens."""
        self.embed_tokens = nn.Embedding.from_pretrained(embeddings.detach())
        self.lm_head = ReducedHead(head, token_ids, vocab_size)

    def flat_pass(
        self, backend: str, cache_dtype: torch.dtype
    ) -> tuple[FlatPass, list[FlatLayer]] | None:
        """Return the pass without modules, and the layer that it runs by `decoder_layers`; None if
        the backend or the layer does not support it."""
        has_kernels = has_layer_kernels(self.device, backend) and cache_dtype == self.dtype
        weights = self.midlayer.weights() if has_kernels else None
        if weights is None:
            return None
        flat = FlatEagle3(self, weights)
        return flat, [flat.layer]

    def fuse(self, states: Tensor) -> Tensor:
        return self.fc(states)

    def join(self, embeddings: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return self.midlayer.join(embeddings, hidden)


class Eagle1Draft(EagleDraft):
    """Reads the state that its target's head reads, and writes one for that head, without a norm.

    Its layer has no norm before attention: `fc` joins embedding and hidden state.

    Sources: Li et al., "EAGLE", arXiv 2401.15077, and "EAGLE-2", arXiv 2406.16858, which grows
    other trees with the same draft.
    """

    def __init__(self, config: EagleConfig):
        super().__init__(config)
        size = config.hidden_size
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.midlayer = EagleLayer(config)
        self.norm = nn.Identity()
        self.post_init()

    def set_whole_ends(self, embeddings: Tensor, head: Tensor, bias: Tensor | None) -> None:
        """Set frozen embeddings, and a head [V, E] that may be the target's own."""
        self.embed_tokens = nn.Embedding.from_pretrained(embeddings)
        vocab_size, size = head.shape
        linear = nn.Linear(size, vocab_size, bias=bias is not None, device="meta")
        linear.weight = nn.Parameter(head, requires_grad=False)
        if bias is not None:
            linear.bias = nn.Parameter(bias, requires_grad=False)
        self.lm_head = linear

    def join(self, embeddings: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        joined = self.fc(torch.cat([embeddings, hidden], dim=-1))
        return joined, joined


class FlatEagle3:
    """Runs passes of a draft without its modules, see `PagedModel.flat`.

    Args:
        draft: the draft whose layer the op computes.
        weights: weights of that layer.
    """

    def __init__(self, draft: Eagle3Draft, weights: LayerWeights):
        layer = draft.midlayer
        options = {"eps": layer.hidden_norm.variance_epsilon, "scale": layer.self_attn.scaling}
        self._draft, self.layer = draft, FlatLayer(layer, 0, weights, options)
        self._table = RotaryTable(draft.rotary_emb)

    def forward(
        self, input_ids: Tensor, positions: Tensor, rows: Tensor | None, step: PagedStep
    ) -> Tensor:
        draft, states = self._draft, cast(PagedStates, step.target_view)
        embeddings = draft.midlayer.input_layernorm(draft.embed_tokens(input_ids)).float()
        read, factors = states.read(draft.fc)[0].float(), self._table.factors(positions)
        hidden = run_layers([self.layer], read, *factors, step, embeddings).to(draft.dtype)
        states.keep(hidden[None])
        hidden = hidden if rows is None else hidden[rows]
        return draft.lm_head(draft.norm(hidden))

    def chain_parts(self) -> ChainParts | None:
        """See `FlatPass.chain_parts`."""
        draft = self._draft
        return ChainParts.of(
            draft.embed_tokens,
            [self.layer],
            draft.norm,
            draft.lm_head,
            self._table,
            embedding_norm=draft.midlayer.input_layernorm,
        )
