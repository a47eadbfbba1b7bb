"""Reference of the op that drafts: the passes of a small decoder that reads what it draws."""

from typing import NamedTuple

import torch
from torch import Tensor

from fastspec_kernels.reference.layers import LayerWeights, decoder_layers, product, rms_norm
from fastspec_kernels.reference.sampling import sample


class DraftWeights(NamedTuple):
    """The weights of a draft model, see `draft_chain`; all have one dtype, except packed ones.

    Attributes:
        embedding: [V, E].
        layers: at least one.
        norm: [E], of what the head reads.
        head: [C', E], or packed by `quantize_weight`; its first C outputs are the columns.
        head_bias: [C'], or [C] float32 if the head is packed; None = none.
        head_tokens: [C] int32, the tokens of the columns; None = column x is token x.
        embedding_norm: [E], of embeddings that each layer's attention reads in front of its rows,
            as in EAGLE-3; None = the embeddings are the input of the first layer.
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
    states: Tensor | None,
    own_states: Tensor | None,
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
    least_probability: float,
    keeps_logits: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run a pass over the tokens, draw one after each text, run a pass over these, and so on."""
    batch, num_steps = uniform_samples.shape
    dtype, block_size = norm.dtype, key_caches[0].shape[1]
    drawn = token_ids.new_full((batch, num_steps), -1, dtype=torch.int32)
    logits = norm.new_zeros((batch, num_steps, num_columns))
    counts, chain_logprobs = num_tokens.clone(), uniform_samples.new_zeros(batch)
    drafting = torch.arange(batch, device=token_ids.device)  # [B'], the texts that go on
    for step in range(num_steps):
        if not len(drafting):
            break
        table, lens = block_table[drafting], context_lens[drafting]
        batch_row = torch.arange(len(drafting), device=drafting.device)
        owner = batch_row.repeat_interleave(cu_rows.diff())  # [T], the text of each row
        row = torch.arange(len(token_ids), device=drafting.device)
        place = (lens - cu_rows[1:])[owner] + row  # [T], positions
        slots = table[owner, place // block_size].long() * block_size + place % block_size
        embedded = embedding[token_ids]
        if embedding_norm is not None:
            embedded = rms_norm(embedded, norm_shift + embedding_norm.double(), eps)
        inputs = embedded if states is None else states
        cos_rows, sin_rows = (x if x is None else x[place] for x in (cos, sin))
        beside = None if embedding_norm is None else embedded
        caches, options = (key_caches, value_caches), (eps, norm_shift, activation)
        given = *caches, *options, cos_rows, sin_rows, beside, [], [], slots, table, lens, cu_rows
        hidden = decoder_layers(inputs, layers, *given, scale, sliding_window, softcap, None)
        hidden = hidden.to(dtype)
        if own_states is not None:
            own_states[slots] = hidden
        last = hidden[cu_rows[1:].long() - 1]  # [B', E]
        normed = rms_norm(last, norm_shift + norm.double(), eps)
        found = product(normed, head, num_columns, head_bias)
        sampling = (x if x is None else x[drafting] for x in (temperature, top_k, top_p, min_p))
        columns, logprobs = sample(found, uniform_samples[drafting, step], *sampling, None)
        tokens = columns if head_tokens is None else head_tokens[columns.clamp(min=0).long()]
        tokens = torch.where(columns < 0, -1, tokens)
        drawn[drafting, step], logits[drafting, step] = tokens, found
        chain_logprobs[drafting] += logprobs
        is_unsure = ~(chain_logprobs.exp() >= least_probability) & (least_probability > 0)
        counts[drafting] = torch.where(is_unsure, counts.clamp(max=step + 1), counts)[drafting]
        goes_on = counts[drafting] > step + 1
        drafting, token_ids = drafting[goes_on], tokens[goes_on].clamp(min=0).long()
        states = None if states is None else last[goes_on]
        context_lens = context_lens + 1
        cu_rows = torch.arange(len(drafting) + 1, dtype=torch.int32, device=drafting.device)
    return drawn, counts, logits if keeps_logits else logits[:, :0].clone()
