"""All steps of a draft in one call."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fastspec_kernels.attention import (
    check_attention,
    check_options,
    check_score_scale,
    scale_of_stored,
)
from fastspec_kernels.backend import run_checked
from fastspec_kernels.cache import check_rotation
from fastspec_kernels.checks import (
    FLOAT32,
    LOGITS_DTYPES,
    check_choice,
    check_contiguous,
    check_flag,
    check_int,
    check_number,
    check_positive,
    check_sampling,
    check_tensor,
    check_width,
)
from fastspec_kernels.decoder import ACTIVATIONS, check_layers, first_of
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
    states: Tensor | None = None,
    own_states: Tensor | None = None,
    norm_shift: float = 0.0,
    activation: str = "silu",
    scale: float | None = None,
    sliding_window: int = 0,
    softcap: float = 0.0,
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    least_probability: float = 0.0,
    keeps_logits: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Continue B texts with a Llama-type draft model, which reads each token that it draws.

    A pass looks up the embeddings of its tokens, runs `decoder_layers`, which stores keys and
    values in the slots that the block table gives the tokens' positions, and rounds the hidden
    states to the dtype of the caches. The logits of a text's last row are the first num_columns
    outputs of head(`rms_norm`(hidden, norm)), from which `sample` draws. The first pass reads the
    given tokens, and each further one the token drawn last, of the texts that go on. A text ends
    after num_tokens[b] tokens, or with the first one at which the product of their probabilities,
    as `sample` returns them, is below least_probability.

    With embedding_norm, as in EAGLE-3, layers read hidden states instead: those given for the first
    pass, later the one that the pass before computed; their attention reads the normed embeddings
    in front.

    Args:
        token_ids: [T] int64, packed; the last tokens of the texts, at least one of each.
        weights: see `DraftWeights`.
        key_caches, value_caches: one per layer, as in `decoder_layers`, all with one block size.
        block_table: [B, M] int32, as in `tree_attention`, with room for all tokens that are read.
        context_lens: [B] int32, lengths of the texts; the last token's position is one less.
        cu_rows: [B + 1] int32, prefix sums of the texts' tokens in token_ids.
        num_tokens: [B] int32, from 1 to K.
        uniform_samples: [B, K] float32 in [0, 1), contiguous.
        eps: eps of all norms, > 0 in float32.
        num_columns: C >= 1.
        cos, sin: [P, R] float32 by position, as in `decoder_layers`; None = no rotation.
        states: [T, E], hidden states for the first pass, with embedding_norm.
        own_states: [N * block_size or more, E], gets the rounded hidden states of all rows, each in
            the row of its slot; None = they are not kept.
        norm_shift, activation, scale, sliding_window, softcap: as in `decoder_layers`.
        temperature, top_k, top_p, min_p: [B] each, see `row_stats`.
        least_probability: from 0, which is off, to 1.
        keeps_logits: whether to return logits.
        backend: "auto", "cpu" or "reference".
    Returns:
        token_ids: [B, K] int32, -1 after a text's end, and where a row of logits is invalid, after
            which token 0 is read.
        num_tokens: [B] int32, how many were drawn.
        logits: [B, K, C], dtype of the caches, 0 after a text's end; [B, 0, C] if not kept.
    Raises:
        ValueError: as in the ops it is made of, before anything is written.

    A text's tokens, logits and states have the bits that these ops give in turn, and do not depend
    on the other texts. On the CPU there is no host synchronisation.
    """
    if not isinstance(weights, DraftWeights):
        raise ValueError(f"weights: expected DraftWeights, got {type(weights).__name__}")
    first_of("weights.layers", weights.layers, LayerWeights)
    cache: Tensor = first_of("key_caches", key_caches, Tensor)
    first_of("value_caches", value_caches, Tensor)
    given_scale, scale = scale, scale_of_stored(cache, scale, 1.0)
    softcap, _ = check_options(cache, sliding_window, softcap, None, False)
    check_score_scale(scale, softcap)
    eps = check_positive("eps", eps)
    norm_shift = check_number("norm_shift", norm_shift, -FLOAT32.max, "a finite float32 number")
    check_choice("activation", activation, ACTIVATIONS)
    if given_scale is None and len({cache.shape[-1:] for cache in key_caches}) > 1:
        raise ValueError("scale: expected a number, as layers differ in head size, got None")
    check_int("num_columns", num_columns, 1)
    check_flag("keeps_logits", keeps_logits)
    least = check_number("least_probability", least_probability, 0.0, "a number from 0 to 1")
    if least > 1:
        raise ValueError(f"least_probability: expected a number from 0 to 1, got {least}")

    def check():
        device = cache.device
        check_tensor("token_ids", token_ids, (None,), (torch.int64,), device)
        check_contiguous("token_ids", token_ids)
        _check_ends(weights, num_columns, cache)
        vocab_size, size = weights.embedding.shape
        if bool(((token_ids < 0) | (token_ids >= vocab_size)).any()):
            raise ValueError(f"token_ids: expected tokens below {vocab_size}")
        num_rows, beside = len(token_ids), weights.embedding_norm is not None
        sizes = num_rows, size, 2 * size if beside else size
        pages = block_table, context_lens, cu_rows
        given = weights.layers, key_caches, value_caches, sizes, pages, None
        for own in check_layers("weights.layers", *given):
            if own.shape[1] != cache.shape[1]:
                raise ValueError(f"key_caches: block sizes {cache.shape[1]} and {own.shape[1]}")
            positions = len(cos) if isinstance(cos, Tensor) and cos.dim() else 0
            check_rotation(cos, sin, positions, own.shape[-1], (torch.float32,), device)
        _check_states(states, own_states, num_rows if beside else None, size, cache)
        batch = len(block_table)
        check_tensor("uniform_samples", uniform_samples, (batch, None), (torch.float32,), device)
        check_contiguous("uniform_samples", uniform_samples)
        check_tensor("num_tokens", num_tokens, (batch,), (torch.int32,), device)
        check_contiguous("num_tokens", num_tokens)
        check_sampling(batch, device, temperature, top_k, top_p, min_p)
        most = uniform_samples.shape[1]
        if not all(1 <= num <= most for num in num_tokens.tolist()):
            raise ValueError(f"num_tokens: expected from 1 to {most}, got {num_tokens.tolist()}")
        if not all(count > 0 for count in cu_rows.diff().tolist()):
            raise ValueError(f"cu_rows: expected a row of each text, got {cu_rows.tolist()}")
        last_lens = context_lens + num_tokens - 1
        longest = max(last_lens.tolist(), default=0)
        if cos is not None and longest > len(cos):
            raise ValueError(f"cos: expected factors of {longest} positions, got {len(cos)}")
        ones = torch.arange(batch + 1, dtype=torch.int32, device=device)
        for keys, values in zip(key_caches, value_caches, strict=True):
            query = keys.new_empty((batch, *keys.shape[2:]))
            check_attention(query, keys, values, block_table, last_lens, ones, None, None)

    w = weights
    arguments = (token_ids, w.embedding, w.embedding_norm)
    arguments += ([each for layer in w.layers for each in layer], w.norm, w.head, w.head_bias)
    arguments += (w.head_tokens, num_columns, list(key_caches), list(value_caches), states)
    arguments += (own_states, eps, norm_shift, activation, cos, sin, block_table, context_lens)
    arguments += (cu_rows, scale, sliding_window, softcap, num_tokens, uniform_samples)
    arguments += (temperature, top_k, top_p, min_p, least, keeps_logits)
    return run_checked("draft_chain", backend, cache, arguments, check)


def _check_ends(weights: DraftWeights, num_columns: int, cache: Tensor) -> None:
    """Check embeddings, norms and head."""
    dtypes = (cache.dtype,) if cache.dtype in LOGITS_DTYPES else LOGITS_DTYPES

    def check_weight(name: str, shape: tuple[int | None, ...]) -> None:
        tensor = getattr(weights, name)
        check_tensor(f"weights.{name}", tensor, shape, dtypes, cache.device)
        check_contiguous(f"weights.{name}", tensor)

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
        check_tensor("weights.head_bias", bias, (None,), bias_dtypes, cache.device)
        check_contiguous("weights.head_bias", bias)
        if len(bias) < num_columns:
            raise ValueError(f"weights.head_bias: expected {num_columns} values, got {len(bias)}")
    if tokens is None and num_columns > vocab_size:
        raise ValueError(f"num_columns: expected at most {vocab_size} tokens, got {num_columns}")
    if tokens is not None:
        check_tensor("weights.head_tokens", tokens, (num_columns,), (torch.int32,), cache.device)
        check_contiguous("weights.head_tokens", tokens)
        if bool(((tokens < 0) | (tokens >= vocab_size)).any()):
            raise ValueError(f"weights.head_tokens: expected tokens below {vocab_size}")


def _check_states(
    states: Tensor | None, own: Tensor | None, num_rows: int | None, size: int, cache: Tensor
) -> None:
    """Check hidden states that are read and kept; num_rows is None if none are read."""
    if (states is None) != (num_rows is None):
        raise ValueError("states: expected with weights.embedding_norm, and only then")
    if num_rows is not None:
        check_tensor("states", states, (num_rows, size), (cache.dtype,), cache.device)  # pyright: ignore
        check_contiguous("states", states)  # pyright: ignore
    if own is None:
        return
    if states is None:
        raise ValueError("own_states: expected None without states")
    check_tensor("own_states", own, (None, size), (cache.dtype,), cache.device)
    check_contiguous("own_states", own)
    num_slots = cache.shape[0] * cache.shape[1]
    if len(own) < num_slots:
        raise ValueError(f"own_states: expected a row for each of {num_slots} slots")
