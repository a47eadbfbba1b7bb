"""Decoder layers with few launches: matrix products, and the parts between them fused."""

import torch
import triton
from torch import Tensor

from fastspec_kernels.reference.layers import LayerWeights
from fastspec_kernels.triton.attention import check_head_size, tree_attention
from fastspec_kernels.triton.cache import store_kv
from fastspec_kernels.triton.decoder_kernels import heads_kernel, norm_kernel
from fastspec_kernels.triton.launch import launch
from fastspec_kernels.triton.products import gated, linear


def decoder_layers(
    hidden: Tensor,
    layers: list[Tensor | None],
    key_caches: list[Tensor],
    value_caches: list[Tensor],
    eps: float,
    norm_shift: float,
    activation: str,
    cos: Tensor | None,
    sin: Tensor | None,
    embeddings: Tensor | None,
    kept_layers: list[int],
    kept_caches: list[Tensor],
    slot_mapping: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    cu_rows: Tensor,
    scale: float,
    sliding_window: int,
    softcap: float,
    ancestor_mask: Tensor | None,
) -> Tensor:
    """Run 4 products and 4 other launches per layer, and 1 launch at the end.

    With torch's products (more than 16 rows, or float32) there is 1 more launch, and there are 7
    products unless weights of the same rows lie next to each other. Split contexts need 1 more
    launch, sequences with few or many rows 1 more, and each head that keeps the layer's input 2.
    """
    pages = block_table, context_lens, cu_rows
    norms = float(eps), float(norm_shift)
    size, x, added, added_norm = len(LayerWeights._fields), hidden, None, None
    if any(weight is not None and weight.dtype == torch.uint8 for weight in layers):
        raise ValueError("layers: 'triton' has no products with packed weights")
    if len(hidden) == 0:
        return hidden.clone()
    for cache in key_caches:
        check_head_size("key_caches", cache.shape[-1], cache.dtype)
    for index, caches in enumerate(zip(key_caches, value_caches, strict=True)):
        w = LayerWeights(*layers[index * size : (index + 1) * size])  # pyright: ignore
        x, rows = _add_and_norm(x, added, added_norm, w.attention_norm, *norms)
        for head in (head for head, layer in enumerate(kept_layers) if layer == index):
            kept = [cache.narrow(2, head, 1) for cache in kept_caches]
            left, right = x.to(kept[0].dtype).unflatten(1, (2, 1, -1)).unbind(1)
            store_kv(left, right, kept[0], kept[1], slot_mapping, None, None, 1.0, 1.0)
        if embeddings is not None:
            rows = torch.cat([embeddings.to(rows.dtype), rows], dim=-1)
        weights = w.query_weight, w.key_weight, w.value_weight
        biases = w.query_bias, w.key_bias, w.value_bias
        query, key, value = linear(rows, weights, biases)
        query = _turn_and_store(query, key, value, w, caches, slot_mapping, cos, sin, *norms)
        options = scale, sliding_window, softcap, w.sinks, ancestor_mask
        attended, _ = tree_attention(query, *caches, *pages, *options, False, 1.0)
        (added,) = linear(attended.flatten(1), (w.output_weight,), (w.output_bias,))
        x, rows = _add_and_norm(x, added, w.attention_out_norm, w.mlp_norm, *norms)
        gate = gated(rows, w.gate_weight, w.up_weight, activation)
        (added,), added_norm = linear(gate, (w.down_weight,), (None,)), w.mlp_out_norm
    return _add_and_norm(x, added, added_norm, None, *norms)[0]


def _add_and_norm(
    hidden: Tensor,
    added: Tensor | None,
    added_norm: Tensor | None,
    norm: Tensor | None,
    eps: float,
    shift: float,
) -> tuple[Tensor, Tensor]:
    """Add norm(added) to hidden; return it and its norm in the weights' dtype, all [T, E]."""
    num_rows, size = hidden.shape
    total = hidden if added is None else torch.empty_like(hidden)
    rows = hidden if norm is None else hidden.new_empty(hidden.shape, dtype=norm.dtype)
    block = triton.next_power_of_2(size)
    launch(
        norm_kernel,
        num_rows,
        hidden,
        added,
        added_norm,
        norm,
        total,
        rows,
        size,
        eps,
        shift,
        BLOCK=block,
        INTERPRETED=hidden.device.type == "cpu",
        num_warps=min(16, max(1, block // 512)),
    )
    return total, rows


def _turn_and_store(
    query: Tensor,  # [T, H * D]; rows may be parts of longer ones, also those of key and value
    key: Tensor,  # [T, G * D]
    value: Tensor,
    weights: LayerWeights,
    caches: tuple[Tensor, Tensor],
    slot_mapping: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    eps: float,
    shift: float,
) -> Tensor:
    """Normalise and rotate queries and keys, store keys and values; return queries [T, H, D]."""
    num_blocks, block_size, num_kv_heads, head_size = caches[0].shape
    num_tokens, num_heads = len(query), query.shape[1] // head_size
    out = query.new_empty((num_tokens, num_heads, head_size))
    cos_rows, sin_rows = (query, query) if cos is None or sin is None else (cos, sin)
    launch(
        heads_kernel,
        (num_tokens, num_heads + 2 * num_kv_heads),
        query,
        key,
        value,
        out,
        *caches,
        slot_mapping,
        cos_rows,
        sin_rows,
        weights.query_norm,
        weights.key_norm,
        query.stride(0),
        key.stride(0),
        value.stride(0),
        num_blocks * block_size,
        caches[0].stride(0),
        caches[0].stride(1),
        cos_rows.stride(0),
        sin_rows.stride(0),
        eps,
        shift,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_SIZE=head_size,
        BLOCK_SIZE=block_size,
        ROTARY_SIZE=0 if cos is None else cos.shape[1],
        BLOCK_D=triton.next_power_of_2(head_size),
        INTERPRETED=query.device.type == "cpu",
        num_warps=1,
    )
    return out
