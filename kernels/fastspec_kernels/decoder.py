"""A whole decoder layer in one call, for the few rows of a decoding step."""

import torch
from torch import Tensor

from fastspec_kernels.attention import check_attention, check_options, scale_of_stored
from fastspec_kernels.backend import run_checked
from fastspec_kernels.cache import check_rotation, check_slots
from fastspec_kernels.checks import (
    FLOAT32,
    LOGITS_DTYPES,
    check_caches,
    check_choice,
    check_contiguous,
    check_number,
    check_positive,
    check_tensor,
)

ACTIVATIONS = ("silu", "gelu_tanh")


def decoder_layer(
    hidden: Tensor,
    attention_norm: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    value_weight: Tensor,
    output_weight: Tensor,
    mlp_norm: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    cu_rows: Tensor,
    *,
    eps: float,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    query_bias: Tensor | None = None,
    key_bias: Tensor | None = None,
    value_bias: Tensor | None = None,
    output_bias: Tensor | None = None,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    attention_out_norm: Tensor | None = None,
    mlp_out_norm: Tensor | None = None,
    norm_shift: float = 0.0,
    activation: str = "silu",
    ancestor_mask: Tensor | None = None,
    scale: float | None = None,
    sliding_window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Run few rows through a decoder layer of the Llama kind, their keys and values into the cache.

    rows = norm(hidden, attention_norm); query, key and value are their projections, queries and
    keys normalised head by head where query_norm and key_norm are given, then rotated as in
    `store_kv`. Keys and values go to their slots, and `tree_attention` reads the pages. With
    hidden = hidden + norm(output projection, attention_out_norm) and
    rows = norm(hidden, mlp_norm) the result is
    hidden + norm((activation(rows @ gate_weight.T) * (rows @ up_weight.T)) @ down_weight.T,
    mlp_out_norm). norm is `rms_norm` with the weights norm_shift + weight, or nothing without.

    Args:
        hidden: [T, E] float32, contiguous; made for the 1 to about 64 rows of a step.
        attention_norm, mlp_norm: [E].
        query_weight: [H * D, E].
        key_weight, value_weight: [G * D, E].
        output_weight: [E, H * D].
        gate_weight, up_weight: [I, E].
        down_weight: [E, I].
        key_cache, value_cache: as in `store_kv`, float32, bfloat16 or float16. All weights,
            biases and norms have their dtype and are contiguous.
        slot_mapping: [T] int64, as in `store_kv`.
        block_table, context_lens, cu_rows: as in `tree_attention`.
        eps: of the norms, > 0 in float32.
        cos, sin: [T, R] float32, R even and at most D, last dimension contiguous; None: no
            rotation.
        query_bias, key_bias, value_bias, output_bias: a value for each output.
        query_norm, key_norm: [D].
        attention_out_norm, mlp_out_norm: [E].
        norm_shift: added to the weights of all norms: 0, or 1 for Gemma's.
        activation: "silu" or "gelu_tanh".
        ancestor_mask, scale, sliding_window, softcap, sinks: as in `tree_attention`.
        backend: "auto", "cpu" or "reference".
    Returns:
        [T, E] float32.
    Raises:
        ValueError: as the ops it is made of, before anything is written.

    Sums and what passes from one part to the next are float32 (reference: float64); queries, keys,
    values and what attention gives have the dtype of the cache, and on processors that multiply
    bfloat16 also what enters a product with bfloat16 weights. A row's bits do not depend on the
    other rows. No host synchronisation.
    """
    scale = scale_of_stored(key_cache, scale, 1.0)
    softcap, sinks = check_options(key_cache, sliding_window, softcap, sinks, False)
    eps = check_positive("eps", eps)
    norm_shift = check_number("norm_shift", norm_shift, -FLOAT32.max, "a finite float32 number")
    check_choice("activation", activation, ACTIVATIONS)
    matrices = (query_weight, key_weight, value_weight, output_weight)
    mlp = (gate_weight, up_weight, down_weight)
    biases = (query_bias, key_bias, value_bias, output_bias)
    norms = (query_norm, key_norm, attention_out_norm, mlp_out_norm)
    caches = (key_cache, value_cache)
    pages = (block_table, context_lens, cu_rows)

    def check():
        num_kv_heads, head_size = check_caches(*caches)
        check_tensor("hidden", hidden, (None, None), (torch.float32,), key_cache.device)
        check_contiguous("hidden", hidden)
        num_rows, size = hidden.shape
        check_tensor("query_weight", query_weight, (None, size), LOGITS_DTYPES, key_cache.device)
        check_tensor("gate_weight", gate_weight, (None, size), LOGITS_DTYPES, key_cache.device)
        queries, keys = query_weight.shape[0], num_kv_heads * head_size
        if queries == 0 or queries % keys != 0:
            raise ValueError(
                f"query_weight: {queries} outputs, not a multiple of {num_kv_heads} KV heads of"
                f" {head_size}"
            )
        wide = gate_weight.shape[0]
        for name, tensor, shape in (
            ("attention_norm", attention_norm, (size,)),
            ("query_weight", query_weight, (queries, size)),
            ("key_weight", key_weight, (keys, size)),
            ("value_weight", value_weight, (keys, size)),
            ("output_weight", output_weight, (size, queries)),
            ("mlp_norm", mlp_norm, (size,)),
            ("gate_weight", gate_weight, (wide, size)),
            ("up_weight", up_weight, (wide, size)),
            ("down_weight", down_weight, (size, wide)),
        ):
            _check_weight(name, tensor, shape, key_cache)
        for name, tensor, shape in (
            ("query_bias", query_bias, (queries,)),
            ("key_bias", key_bias, (keys,)),
            ("value_bias", value_bias, (keys,)),
            ("output_bias", output_bias, (size,)),
            ("query_norm", query_norm, (head_size,)),
            ("key_norm", key_norm, (head_size,)),
            ("attention_out_norm", attention_out_norm, (size,)),
            ("mlp_out_norm", mlp_out_norm, (size,)),
        ):
            if tensor is not None:
                _check_weight(name, tensor, shape, key_cache)
        check_rotation(cos, sin, num_rows, head_size, (torch.float32,), key_cache.device)
        check_tensor("slot_mapping", slot_mapping, (num_rows,), (torch.int64,), key_cache.device)
        check_contiguous("slot_mapping", slot_mapping)
        check_slots(slot_mapping, key_cache)
        query = key_cache.new_empty((num_rows, queries // head_size, head_size))
        check_attention(query, *caches, *pages, sinks, ancestor_mask)

    arguments = (hidden, attention_norm, *matrices, mlp_norm, *mlp, *biases, *norms)
    arguments += (eps, norm_shift, activation, cos, sin, *caches, slot_mapping, *pages)
    arguments += (scale, sliding_window, softcap, sinks, ancestor_mask)
    return run_checked("decoder_layer", backend, key_cache, arguments, check)


def _check_weight(name: str, tensor: Tensor, shape: tuple[int, ...], cache: Tensor) -> None:
    dtypes = (cache.dtype,) if cache.dtype in LOGITS_DTYPES else LOGITS_DTYPES
    check_tensor(name, tensor, shape, dtypes, cache.device)
    check_contiguous(name, tensor)
