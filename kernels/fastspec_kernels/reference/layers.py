"""Matrix products and the parts of a layer around attention, in float64 and rounded once."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastspec_kernels.reference.attention import rotate, store_kv, tree_attention
from fastspec_kernels.reference.quantized import TILE, quantized_linear


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply by the transposed weights and add the bias."""
    out = input.double() @ weight.double().T
    return (out if bias is None else out + bias.double()).to(input.dtype)


def product(rows: Tensor, weight: Tensor, num_outputs: int, bias: Tensor | None) -> Tensor:
    """Multiply by the first outputs of plain or packed weights."""
    bias = None if bias is None else bias[:num_outputs]
    if weight.dtype == torch.uint8:
        return quantized_linear(rows, weight, num_outputs, bias)
    return linear(rows, weight[:num_outputs], bias)


def rms_norm(input: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide by the root mean square, then scale."""
    x = input.double()
    scaled = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return (scaled * weight.double()).to(input.dtype)


def gated_mlp(input: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor) -> Tensor:
    """Gate with silu, then project down."""
    x = input.double()
    hidden = F.silu(x @ gate_weight.double().T) * (x @ up_weight.double().T)
    return (hidden @ down_weight.double().T).to(input.dtype)


class LayerWeights(NamedTuple):
    """The weights of a Llama-type decoder layer, see `decoder_layers`.

    H query heads, G KV heads, head size D, hidden size E, feed-forward size I, size S of embeddings
    in front of the hidden state (0 if there are none).

    Attributes:
        attention_norm, mlp_norm: [E].
        query_weight: [H * D, S + E].
        key_weight, value_weight: [G * D, S + E].
        output_weight: [E, H * D].
        gate_weight, up_weight: [I, E].
        down_weight: [E, I].
        query_bias, key_bias, value_bias, output_bias: one value per output.
        query_norm, key_norm: [D].
        attention_out_norm, mlp_out_norm: [E].
        sinks: [H] float32, as in `tree_attention`; all others have one dtype, unless the weights
            of products are packed by `quantize_weight`, all with as many bits: then H * D must be a
            multiple of 16, and biases are float32.
    """

    attention_norm: Tensor
    query_weight: Tensor
    key_weight: Tensor
    value_weight: Tensor
    output_weight: Tensor
    mlp_norm: Tensor
    gate_weight: Tensor
    up_weight: Tensor
    down_weight: Tensor
    query_bias: Tensor | None = None
    key_bias: Tensor | None = None
    value_bias: Tensor | None = None
    output_bias: Tensor | None = None
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None
    attention_out_norm: Tensor | None = None
    mlp_out_norm: Tensor | None = None
    sinks: Tensor | None = None


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
    """Apply attention and feed-forward blocks, each pre-normed and residual, layer by layer."""
    pages = block_table, context_lens, cu_rows

    def norm(x: Tensor, weight: Tensor | None) -> Tensor:
        return x if weight is None else rms_norm(x, norm_shift + weight.double(), eps)

    def outputs_of(weight: Tensor) -> int:
        return len(weight) * (TILE if weight.dtype == torch.uint8 else 1)

    def heads(rows: Tensor, weight: Tensor, bias: Tensor | None, size: int) -> Tensor:
        return product(rows, weight, size, bias).unflatten(-1, (-1, head_size))

    def turn(x: Tensor) -> Tensor:
        return x if cos is None or sin is None else rotate(x, cos, sin)

    x = hidden.double()
    for index, caches in enumerate(zip(key_caches, value_caches, strict=True)):
        dtype, head_size = caches[0].dtype, caches[0].shape[-1]
        num_fields = len(LayerWeights._fields)
        w = LayerWeights(*layers[index * num_fields : (index + 1) * num_fields])  # pyright: ignore
        for head in (head for head, layer in enumerate(kept_layers) if layer == index):
            kept = [cache.narrow(2, head, 1) for cache in kept_caches]
            left, right = x.to(kept[0].dtype).unflatten(1, (2, 1, -1)).unbind(1)
            store_kv(left, right, kept[0], kept[1], slot_mapping, None, None, 1.0, 1.0)
        rows = norm(x, w.attention_norm)
        if embeddings is not None:
            rows = torch.cat([embeddings.double(), rows], dim=-1)
        queries, keys = outputs_of(w.query_weight), caches[0].shape[-2] * head_size
        query = heads(rows, w.query_weight, w.query_bias, queries)
        query = turn(norm(query, w.query_norm)).to(dtype)
        key = turn(norm(heads(rows, w.key_weight, w.key_bias, keys), w.key_norm)).to(dtype)
        value = heads(rows, w.value_weight, w.value_bias, keys).to(dtype)
        store_kv(key, value, *caches, slot_mapping, None, None, 1.0, 1.0)
        options = scale, sliding_window, softcap, w.sinks, ancestor_mask
        attended, _ = tree_attention(query, *caches, *pages, *options, False, 1.0)
        inputs, size = attended.flatten(1).double(), x.shape[1]
        added = product(inputs, w.output_weight, size, w.output_bias)
        x = x + norm(added, w.attention_out_norm)
        rows = norm(x, w.mlp_norm)
        wide = outputs_of(w.gate_weight)  # padding included if packed: its outputs are zero
        gate = product(rows, w.gate_weight, wide, None)
        gate = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
        gated = gate * product(rows, w.up_weight, wide, None)
        added = product(gated, w.down_weight, size, None)
        x = x + norm(added, w.mlp_out_norm)
    return x.float()
