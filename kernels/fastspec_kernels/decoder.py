"""Whole decoder layers in one call."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from fastspec_kernels.attention import (
    check_attention,
    check_options,
    check_score_scale,
    scale_of_stored,
)
from fastspec_kernels.backend import run_checked
from fastspec_kernels.cache import check_rotation, check_slots
from fastspec_kernels.checks import (
    FLOAT32,
    LOGITS_DTYPES,
    check_caches,
    check_choice,
    check_dense,
    check_number,
    check_positive,
    check_tensor,
    check_width,
)
from fastspec_kernels.quantized import check_quantized
from fastspec_kernels.reference.layers import LayerWeights
from fastspec_kernels.reference.quantized import TILE

ACTIVATIONS = ("silu", "gelu_tanh")


def decoder_layers(
    hidden: Tensor,
    layers: Sequence[LayerWeights],
    key_caches: Sequence[Tensor],
    value_caches: Sequence[Tensor],
    slot_mapping: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    cu_rows: Tensor,
    *,
    eps: float,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    embeddings: Tensor | None = None,
    kept_layers: Sequence[int] = (),
    kept_caches: Sequence[Tensor] = (),
    norm_shift: float = 0.0,
    activation: str = "silu",
    ancestor_mask: Tensor | None = None,
    scale: float | None = None,
    sliding_window: int = 0,
    softcap: float = 0.0,
    backend: str = "auto",
) -> Tensor:
    """Run rows through Llama-type decoder layers and store their keys and values.

    In each layer: rows = norm(hidden, attention_norm), preceded by `embeddings`; query, key and
    value are their projections; queries and keys are normalised per head if query_norm and key_norm
    are given, then rotated as in `store_kv`. Keys and values go to their slots, and
    `tree_attention` reads the pages. With
    hidden = hidden + norm(output projection, attention_out_norm) and
    rows = norm(hidden, mlp_norm) the next layer gets
    hidden + norm((activation(rows @ gate_weight.T) * (rows @ up_weight.T)) @ down_weight.T,
    mlp_out_norm). norm is `rms_norm` with the weights norm_shift + weight; without weights it is
    the identity.

    Args:
        hidden: [T, E] float32, contiguous.
        layers: at least one; weights and norms have the dtype of the caches and are contiguous.
            Weights of products may be packed instead, see `LayerWeights`; not with "triton".
        key_caches, value_caches: one per layer, as in `store_kv`, float32, bfloat16 or float16.
        slot_mapping: [T] int64, as in `store_kv`.
        block_table, context_lens, cu_rows: as in `tree_attention`.
        eps: eps of the norms, > 0 in float32.
        cos, sin: [T, R] float32, R even and <= D, last dimension contiguous; None = no rotation.
        embeddings: [T, S] float32, contiguous; normed token embeddings that each layer's attention
            reads in front of its rows, as in EAGLE-3; None = none.
        kept_layers, kept_caches: store the inputs of layer kept_layers[j] (-1 = no layer) in the
            slots of the rows: the first half in head j of the first of two caches, the second half
            in the other, both [N, block_size, J, E / 2], float32, bfloat16 or float16. Empty =
            nothing is kept.
        norm_shift: added to the weights of all norms: 0, or 1 for Gemma's.
        activation: "silu" or "gelu_tanh".
        ancestor_mask, scale, sliding_window, softcap: as in `tree_attention`; scale is required if
            head sizes differ between layers.
        backend: "auto", "cpu", "triton" or "reference".
    Returns:
        [T, E] float32.
    Raises:
        ValueError: as in the ops it is made of, before anything is written.

    Sums and intermediate results are float32 (reference: float64); queries, keys, values and the
    output of attention have the dtype of the cache, and on processors that multiply bfloat16 so do
    the inputs of products with bfloat16 weights; those of packed weights are quantized as in
    `quantized_linear`. In chains a row's bits do not depend on the other rows. "triton" rounds the
    outputs of products to the dtype of the weights, and leaves products of more than 16 rows, and
    those in float32, to torch, whose bits may depend on the number of rows. Torch multiplies by
    query, key and value weights at once, and by gate and up weights, if these lie next to each
    other in one allocation, in this order. No host synchronisation.
    """
    first_of("layers", layers, LayerWeights)
    cache: Tensor = first_of("key_caches", key_caches, Tensor)
    first_of("value_caches", value_caches, Tensor)
    options = eps, norm_shift, activation, scale, sliding_window, softcap
    eps, norm_shift, scale, softcap = check_layer_options(key_caches, *options)
    pages = (block_table, context_lens, cu_rows)
    _check_kept(kept_layers, kept_caches, len(layers))

    def check():
        check_dense("hidden", hidden, (None, None), (torch.float32,), cache.device)
        num_rows, size = hidden.shape
        check_width("hidden", size)
        num_inputs = size
        if embeddings is not None:
            check_dense("embeddings", embeddings, (num_rows, None), (torch.float32,), cache.device)
            num_inputs += embeddings.shape[1]
        check_dense("slot_mapping", slot_mapping, (num_rows,), (torch.int64,), cache.device)
        sizes = num_rows, size, num_inputs
        check_layers("layers", layers, key_caches, value_caches, sizes, pages, ancestor_mask)
        for keys in key_caches:
            check_rotation(cos, sin, num_rows, keys.shape[-1], (torch.float32,), cache.device)
            check_slots(slot_mapping, keys)
        if kept_caches:
            _check_kept_caches(kept_caches, len(kept_layers), slot_mapping, hidden)

    arguments = (hidden, [weight for layer in layers for weight in layer])
    arguments += (list(key_caches), list(value_caches), eps, norm_shift, activation, cos, sin)
    arguments += (embeddings, list(kept_layers), list(kept_caches), slot_mapping, *pages)
    arguments += (scale, sliding_window, softcap, ancestor_mask)
    return run_checked("decoder_layers", backend, cache, arguments, check)


def first_of(name: str, values: Sequence[Any], kind: type) -> Any:
    """Return the first value; ValueError unless `values` is a non-empty list or tuple of `kind`."""
    is_list = isinstance(values, (list, tuple))
    if not is_list or not values or not all(isinstance(value, kind) for value in values):
        raise ValueError(f"{name}: expected a {kind.__name__} for each layer, got {values!r:.60}")
    return values[0]


def check_layer_options(
    key_caches: Sequence[Tensor],
    eps: float,
    norm_shift: float,
    activation: str,
    scale: float | None,
    sliding_window: int,
    softcap: float,
) -> tuple[float, float, float, float]:
    """Check the options that layers share; return eps, norm_shift, scale and softcap as floats."""
    given_scale, scale = scale, scale_of_stored(key_caches[0], scale, 1.0)
    softcap, _ = check_options(key_caches[0], sliding_window, softcap, None, False)
    check_score_scale(scale, softcap)
    eps = check_positive("eps", eps)
    norm_shift = check_number("norm_shift", norm_shift, -FLOAT32.max, "a finite float32 number")
    check_choice("activation", activation, ACTIVATIONS)
    if given_scale is None and len({cache.shape[-1:] for cache in key_caches}) > 1:
        raise ValueError("scale: expected a number, as layers differ in head size, got None")
    return eps, norm_shift, scale, softcap


def check_layers(
    name: str,
    layers: Sequence[LayerWeights],
    key_caches: Sequence[Tensor],
    value_caches: Sequence[Tensor],
    sizes: tuple[int, int, int],
    pages: tuple[Tensor, Tensor, Tensor],
    ancestor_mask: Tensor | None,
) -> None:
    """Check layers, called `name`, with their caches and the pages that they read.

    sizes: the numbers of rows, of values in a hidden state, and of values that attention reads.
    """
    for field, caches in (("key_caches", key_caches), ("value_caches", value_caches)):
        if len(caches) != len(layers):
            expected = f"one for each of {len(layers)} layers"
            raise ValueError(f"{field}: expected {expected}, got {len(caches)}")
    num_rows, size, num_inputs = sizes
    for index, weights in enumerate(layers):
        keys, values = key_caches[index], value_caches[index]
        names = f"key_caches[{index}]", f"value_caches[{index}]"
        num_kv_heads, head_size = check_caches(keys, values, names)
        widths = size, num_inputs, num_kv_heads
        num_heads = _check_weights(f"{name}[{index}]", weights, keys, *widths)
        query = keys.new_empty((num_rows, num_heads, head_size))
        check_attention(query, keys, values, *pages, None, ancestor_mask)


def _check_kept(layers: Sequence[int], caches: Sequence[Tensor], num_layers: int) -> None:
    """Check the layers whose inputs are kept, and their caches."""
    is_list = isinstance(layers, (list, tuple))
    if not is_list or not all(type(x) is int and -1 <= x < num_layers for x in layers):
        expected = f"numbers from -1 to {num_layers - 1}"
        raise ValueError(f"kept_layers: expected {expected}, got {layers!r:.60}")
    is_pair = isinstance(caches, (list, tuple)) and len(caches) in (0, 2)
    if not is_pair or not all(isinstance(cache, Tensor) for cache in caches):
        raise ValueError(f"kept_caches: expected two caches or none, got {caches!r:.60}")
    if (len(layers) > 0) != (len(caches) > 0):
        empty, other = ("kept_caches", "layers") if layers else ("kept_layers", "caches")
        raise ValueError(f"{empty}: got none, but kept_{other} are given")


def _check_kept_caches(
    caches: Sequence[Tensor], num_heads: int, slot_mapping: Tensor, hidden: Tensor
) -> None:
    names = "kept_caches[0]", "kept_caches[1]"
    heads, head_size = check_caches(caches[0], caches[1], names)
    check_tensor(names[0], caches[0], (None,) * 4, LOGITS_DTYPES, hidden.device)
    if heads != num_heads or 2 * head_size != hidden.shape[1]:
        expected = f"{num_heads} heads of half of {hidden.shape[1]} numbers"
        raise ValueError(f"{names[0]}: expected {expected}, got {heads} of {head_size}")
    check_slots(slot_mapping, caches[0])


def _check_weights(
    name: str, weights: LayerWeights, cache: Tensor, size: int, num_inputs: int, num_kv_heads: int
) -> int:
    """Check a layer's weights, and return its number of query heads."""
    head_size = cache.shape[-1]
    is_packed = getattr(weights.query_weight, "dtype", None) == torch.uint8
    for field, columns in (("query_weight", num_inputs), ("gate_weight", size)):
        tensor = getattr(weights, field)
        if is_packed:
            check_tensor(f"{name}.{field}", tensor, (None,) * 3, (torch.uint8,), cache.device)
            check_quantized(f"{name}.{field}", tensor, len(tensor) * TILE, columns, cache.device)
        else:
            check_tensor(f"{name}.{field}", tensor, (None, columns), LOGITS_DTYPES, cache.device)
    tile = TILE if is_packed else 1
    queries, keys = weights.query_weight.shape[0] * tile, num_kv_heads * head_size
    if queries == 0 or queries % keys != 0:
        raise ValueError(
            f"{name}.query_weight: {queries} outputs, not a multiple of {num_kv_heads} KV heads of"
            f" {head_size}"
        )
    wide = weights.gate_weight.shape[0] * tile
    shapes: dict[str, tuple[int, ...]] = {
        "attention_norm": (size,),
        "query_weight": (queries, num_inputs),
        "key_weight": (keys, num_inputs),
        "value_weight": (keys, num_inputs),
        "output_weight": (size, queries),
        "mlp_norm": (size,),
        "gate_weight": (wide, size),
        "up_weight": (wide, size),
        "down_weight": (size, wide),
        "query_bias": (queries,),
        "key_bias": (keys,),
        "value_bias": (keys,),
        "output_bias": (size,),
        "query_norm": (head_size,),
        "key_norm": (head_size,),
        "attention_out_norm": (size,),
        "mlp_out_norm": (size,),
        "sinks": (queries // head_size,),
    }
    own = (cache.dtype,) if cache.dtype in LOGITS_DTYPES else LOGITS_DTYPES
    for field, shape in shapes.items():
        tensor = cast(Tensor, getattr(weights, field))
        if is_packed and field.endswith("_weight"):
            check_quantized(f"{name}.{field}", tensor, shape[0], shape[1], cache.device)
            bytes_of_blocks = weights.query_weight.shape[2]
            if tensor.shape[2] != bytes_of_blocks:
                raise ValueError(
                    f"{name}.{field}: expected blocks of {bytes_of_blocks} bytes, as query_weight,"
                    f" got {tensor.shape[2]}"
                )
        elif tensor is not None or field not in LayerWeights._field_defaults:
            is_float32 = field == "sinks" or (is_packed and field.endswith("_bias"))
            dtypes = (torch.float32,) if is_float32 else own
            check_dense(f"{name}.{field}", tensor, shape, dtypes, cache.device)
    return queries // head_size
