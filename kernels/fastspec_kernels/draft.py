"""All steps of a draft in one call."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fastspec_kernels.attention import check_attention
from fastspec_kernels.backend import run_checked
from fastspec_kernels.cache import check_rotation
from fastspec_kernels.checks import (
    INT32_MAX,
    LOGITS_DTYPES,
    check_dense,
    check_flag,
    check_int,
    check_number,
    check_sampling,
    check_width,
)
from fastspec_kernels.decoder import check_layer_options, check_layers, first_of
from fastspec_kernels.quantized import check_quantized
from fastspec_kernels.reference.draft import DraftWeights
from fastspec_kernels.reference.layers import LayerWeights


def draft_chain(
    token_ids: Tensor,
    weights: DraftWeights,
    key_caches: Sequence[Tensor],
    value_caches: Sequence[Tensor],
    block_table: Tensor,
    context_lens: Tensor,
    cu_rows: Tensor,
    num_tokens: Tensor,
    uniform_samples: Tensor,
    *,
    eps: float,
    num_columns: int,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    hidden: Tensor | None = None,
    hidden_cache: Tensor | None = None,
    norm_shift: float = 0.0,
    activation: str = "silu",
    scale: float | None = None,
    sliding_window: int = 0,
    softcap: float = 0.0,
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    confidence_threshold: float = 0.0,
    keeps_logits: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Draft up to K tokens after each of B sequences with a Llama-type model.

    A pass looks up the embeddings of its tokens, runs `decoder_layers`, which stores keys and
    values in the slots that block_table gives the tokens' positions, and rounds the hidden states
    to the dtype of the caches. At each sequence's last row, the first num_columns outputs of
    head(`rms_norm`(hidden, norm)) are the logits from which `sample` draws. The first pass reads
    token_ids, each later one the last token of every draft that goes on. A draft ends after
    num_tokens[b] tokens, or with the token that brings the product of its tokens' probabilities
    (exp of the logprobs of `sample`) below confidence_threshold.

    With embedding_norm, as in EAGLE-3, the layers read hidden states instead: those given, then
    the last ones computed; attention reads the normed embeddings in front of them.

    Args:
        token_ids: [T] int64, contiguous, packed; the last tokens of each sequence, at least one.
        weights: see `DraftWeights`.
        key_caches, value_caches: one per layer, as in `decoder_layers`, all with one block size.
        block_table: [B, M] int32, as in `tree_attention`, with room for all tokens that are read.
        context_lens: [B] int32, contiguous, tokens of each sequence, those in token_ids included.
        cu_rows: [B + 1] int32, contiguous, prefix sums of the sequences' tokens in token_ids.
        num_tokens: [B] int32, contiguous, from 1 to K.
        uniform_samples: [B, K] float32 in [0, 1), contiguous.
        eps: eps of all norms, > 0 in float32.
        num_columns: C >= 1.
        cos, sin: [P, R] float32 by position, as in `decoder_layers`; None = no rotation.
        hidden: [T, E], dtype of the caches, contiguous; hidden states for the first pass, with
            embedding_norm.
        hidden_cache: [N * block_size or more, E], dtype of the caches, contiguous; the rounded
            hidden state of each row is stored at its slot; None = nothing is stored.
        norm_shift, activation, scale, sliding_window, softcap: as in `decoder_layers`.
        temperature, top_k, top_p, min_p: [B] each, see `row_stats`.
        confidence_threshold: from 0, which is off, to 1.
        keeps_logits: whether to return logits.
        backend: "auto", "cpu" or "reference".
    Returns:
        token_ids: [B, K] int32, -1 after the end of a draft, and where a row of logits is invalid;
            the next pass then reads token 0.
        num_drawn: [B] int32, tokens of each draft.
        logits: [B, K, C], dtype of the caches, 0 after the end of a draft; [B, 0, C] if not kept.
    Raises:
        ValueError: as in the ops it is made of, before anything is written.

    A sequence's results have the bits of these ops run in turn, and never depend on the other
    sequences. What is written must not share memory with other arguments, and no two tokens may
    share a slot.
    """
    if not isinstance(weights, DraftWeights):
        raise ValueError(f"weights: expected DraftWeights, got {type(weights).__name__}")
    first_of("weights.layers", weights.layers, LayerWeights)
    cache: Tensor = first_of("key_caches", key_caches, Tensor)
    first_of("value_caches", value_caches, Tensor)
    options = eps, norm_shift, activation, scale, sliding_window, softcap
    eps, norm_shift, scale, softcap = check_layer_options(key_caches, *options)
    check_int("num_columns", num_columns, 1)
    check_flag("keeps_logits", keeps_logits)
    expected = "a number from 0 to 1"
    least = check_number("confidence_threshold", confidence_threshold, 0.0, expected)
    if least > 1:
        raise ValueError(f"confidence_threshold: expected {expected}, got {least}")

    def check():
        device = cache.device
        if cache.dtype not in LOGITS_DTYPES:
            raise ValueError(f"key_caches: expected one of {LOGITS_DTYPES}, got {cache.dtype}")
        check_dense("token_ids", token_ids, (None,), (torch.int64,), device)
        _check_embedding_and_head(weights, num_columns, cache)
        vocab_size, size = weights.embedding.shape
        _check_tokens("token_ids", token_ids, vocab_size)
        num_rows, reads_hidden = len(token_ids), weights.embedding_norm is not None
        sizes = num_rows, size, 2 * size if reads_hidden else size
        pages = block_table, context_lens, cu_rows
        check_layers("weights.layers", weights.layers, key_caches, value_caches, sizes, pages, None)
        for keys in key_caches:
            if keys.shape[1] != cache.shape[1]:
                raise ValueError(f"key_caches: block sizes {cache.shape[1]} and {keys.shape[1]}")
            check_rotation(cos, sin, None, keys.shape[-1], (torch.float32,), device)
        _check_hidden(hidden, hidden_cache, num_rows if reads_hidden else None, size, cache)
        batch = len(block_table)
        check_dense("uniform_samples", uniform_samples, (batch, None), (torch.float32,), device)
        check_dense("num_tokens", num_tokens, (batch,), (torch.int32,), device)
        check_sampling(batch, device, temperature, top_k, top_p, min_p)
        most = uniform_samples.shape[1]
        if not all(1 <= num <= most for num in num_tokens.tolist()):
            raise ValueError(f"num_tokens: expected from 1 to {most}, got {num_tokens.tolist()}")
        if not all(count > 0 for count in cu_rows.diff().tolist()):
            raise ValueError(f"cu_rows: expected a row of each sequence, got {cu_rows.tolist()}")
        last_lens = context_lens.long() + num_tokens - 1
        if (longest := max(last_lens.tolist(), default=0)) > INT32_MAX:
            raise ValueError(f"num_tokens: expected room for as many positions, got {longest}")
        if cos is not None and longest > len(cos):
            raise ValueError(f"cos: expected factors of {longest} positions, got {len(cos)}")
        last_cu_rows = torch.arange(batch + 1, dtype=torch.int32, device=device)
        last_pages = block_table, last_lens.int(), last_cu_rows
        for keys, values in zip(key_caches, value_caches, strict=True):
            query = keys.new_empty((batch, *keys.shape[2:]))
            check_attention(query, keys, values, *last_pages, None, None)

    w = weights
    arguments = (token_ids, w.embedding, w.embedding_norm)
    arguments += ([each for layer in w.layers for each in layer], w.norm, w.head, w.head_bias)
    arguments += (w.head_tokens, num_columns, list(key_caches), list(value_caches), hidden)
    arguments += (hidden_cache, eps, norm_shift, activation, cos, sin, block_table, context_lens)
    arguments += (cu_rows, scale, sliding_window, softcap, num_tokens, uniform_samples)
    arguments += (temperature, top_k, top_p, min_p, least, keeps_logits)
    return run_checked("draft_chain", backend, cache, arguments, check)


def _check_tokens(name: str, tokens: Tensor, vocab_size: int) -> None:
    if bool(((tokens < 0) | (tokens >= vocab_size)).any()):
        found = tokens.min().item(), tokens.max().item()
        raise ValueError(
            f"{name}: expected tokens from 0 to {vocab_size - 1}, got {found[0]} to {found[1]}"
        )


def _check_embedding_and_head(weights: DraftWeights, num_columns: int, cache: Tensor) -> None:
    """Check embeddings, norms and head."""
    dtypes = (cache.dtype,)

    def check_weight(name: str, shape: tuple[int | None, ...]) -> None:
        tensor = getattr(weights, name)
        check_dense(f"weights.{name}", tensor, shape, dtypes, cache.device)

    check_weight("embedding", (None, None))
    vocab_size, size = weights.embedding.shape
    check_width("weights.embedding", size)
    check_weight("norm", (size,))
    if weights.embedding_norm is not None:
        check_weight("embedding_norm", (size,))
    head, bias, tokens = weights.head, weights.head_bias, weights.head_tokens
    is_packed = isinstance(head, Tensor) and head.dtype == torch.uint8
    if is_packed:
        check_quantized("weights.head", head, num_columns, size, cache.device)
    else:
        check_weight("head", (None, size))
    if not is_packed and len(head) < num_columns:
        raise ValueError(f"num_columns: expected at most {len(head)} (head), got {num_columns}")
    if bias is not None:
        bias_dtypes = (torch.float32,) if is_packed else dtypes
        check_dense("weights.head_bias", bias, (None,), bias_dtypes, cache.device)
        if len(bias) < num_columns:
            raise ValueError(f"weights.head_bias: expected {num_columns} values, got {len(bias)}")
    if tokens is None and num_columns > vocab_size:
        raise ValueError(f"num_columns: expected at most {vocab_size} tokens, got {num_columns}")
    if tokens is not None:
        check_dense("weights.head_tokens", tokens, (num_columns,), (torch.int32,), cache.device)
        _check_tokens("weights.head_tokens", tokens, vocab_size)


def _check_hidden(
    hidden: Tensor | None, kept: Tensor | None, num_rows: int | None, size: int, cache: Tensor
) -> None:
    """Check the hidden states that are read, of num_rows rows if any are, and those kept."""
    if (hidden is None) != (num_rows is None):
        raise ValueError("hidden: expected with weights.embedding_norm, and only then")
    if hidden is not None:
        check_dense("hidden", hidden, (num_rows, size), (cache.dtype,), cache.device)
    if kept is None:
        return
    if hidden is None:
        raise ValueError("hidden_cache: expected None without hidden")
    check_dense("hidden_cache", kept, (None, size), (cache.dtype,), cache.device)
    num_slots = cache.shape[0] * cache.shape[1]
    if len(kept) < num_slots:
        raise ValueError(f"hidden_cache: expected a row for each of {num_slots} slots")
