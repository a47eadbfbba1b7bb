"""Reference of the op that drafts: the passes of a small decoder that reads what it draws."""

from typing import NamedTuple

import torch
from torch import Tensor

from fastspec_kernels.reference.layers import LayerWeights, decoder_layers, product, rms_norm
from fastspec_kernels.reference.sampling import sample


class DraftWeights(NamedTuple):
    """The weights of a draft model, see `draft_chain`; contiguous, in the dtype of the caches.

    V tokens, hidden size E, C columns of logits (num_columns).

    Attributes:
        embedding: [V, E].
        layers: at least one; see `LayerWeights`, also for packed weights.
        norm: [E], before the head.
        head: [C or more, E], or C outputs packed by `quantize_weight`.
        head_bias: [C or more], float32 if the head is packed; None = none.
        head_tokens: [C] int32, the token of each column; None = column x is token x.
        embedding_norm: [E]; attention then reads the normed embeddings in front of hidden states,
            as in EAGLE-3; None = the first layer reads the embeddings.
    """

    embedding: Tensor
    layers: list[LayerWeights]
    norm: Tensor
    head: Tensor
    head_bias: Tensor | None = None
    head_tokens: Tensor | None = None
    embedding_norm: Tensor | None = None


def draft_chain(
    token_ids: Tensor,
    embedding: Tensor,
    embedding_norm: Tensor | None,
    layers: list[Tensor | None],
    norm: Tensor,
    head: Tensor,
    head_bias: Tensor | None,
    head_tokens: Tensor | None,
    num_columns: int,
    key_caches: list[Tensor],
    value_caches: list[Tensor],
    hidden: Tensor | None,
    hidden_cache: Tensor | None,
    eps: float,
    norm_shift: float,
    activation: str,
    cos: Tensor | None,
    sin: Tensor | None,
    block_table: Tensor,
    context_lens: Tensor,
    cu_rows: Tensor,
    scale: float,
    sliding_window: int,
    softcap: float,
    num_tokens: Tensor,
    uniform_samples: Tensor,
    temperature: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    confidence_threshold: float,
    keeps_logits: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run a pass over the tokens, draw one after each sequence, run a pass over these, etc."""
    batch, num_steps = uniform_samples.shape
    dtype, device, block_size = norm.dtype, token_ids.device, key_caches[0].shape[1]
    drawn = token_ids.new_full((batch, num_steps), -1, dtype=torch.int32)
    logits = norm.new_zeros((batch, num_steps, num_columns))
    num_drawn, chain_logprobs = num_tokens.clone(), uniform_samples.new_zeros(batch)
    least_logprob = uniform_samples.new_tensor(confidence_threshold, dtype=torch.float64).log()
    drafting = torch.arange(batch, device=device)  # [B'], the sequences that go on
    for step in range(num_steps):
        if not len(drafting):
            break
        table, lens = block_table[drafting], context_lens[drafting] + step
        owner = torch.arange(len(drafting), device=device).repeat_interleave(cu_rows.diff())
        row = torch.arange(len(token_ids), device=device)
        positions = (lens - cu_rows[1:])[owner] + row  # [T]
        slots = table[owner, positions // block_size].long() * block_size + positions % block_size
        embedded = embedding[token_ids]
        if embedding_norm is not None:
            embedded = rms_norm(embedded, norm_shift + embedding_norm.double(), eps)
        inputs = embedded if hidden is None else hidden
        cos_rows, sin_rows = (x if x is None else x[positions] for x in (cos, sin))
        in_front = None if embedding_norm is None else embedded
        caches, options = (key_caches, value_caches), (eps, norm_shift, activation)
        given = *caches, *options, cos_rows, sin_rows, in_front, [], [], slots, table, lens, cu_rows
        out = decoder_layers(inputs, layers, *given, scale, sliding_window, softcap, None).to(dtype)
        if hidden_cache is not None:
            hidden_cache[slots] = out
        last = out[cu_rows[1:].long() - 1]  # [B', E]
        normed = rms_norm(last, norm_shift + norm.double(), eps)
        found = product(normed, head, num_columns, head_bias)
        sampling = (x if x is None else x[drafting] for x in (temperature, top_k, top_p, min_p))
        columns, logprobs = sample(found, uniform_samples[drafting, step], *sampling, None)
        tokens = columns if head_tokens is None else head_tokens[columns.clamp(min=0).long()]
        tokens = torch.where(columns < 0, -1, tokens)
        drawn[drafting, step], logits[drafting, step] = tokens, found
        chain_logprobs[drafting] += logprobs
        if confidence_threshold > 0:
            is_unsure = ~(chain_logprobs[drafting] >= least_logprob)
            num_drawn[drafting[is_unsure]] = step + 1
        goes_on = num_drawn[drafting] > step + 1
        drafting, token_ids = drafting[goes_on], tokens[goes_on].clamp(min=0).long()
        hidden = None if hidden is None else last[goes_on]
        cu_rows = torch.arange(len(drafting) + 1, dtype=torch.int32, device=device)
    return drawn, num_drawn, logits if keeps_logits else logits[:, :0].clone()
