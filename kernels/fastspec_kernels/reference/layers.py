"""Matrix products and the blocks around attention, in float64 and rounded once."""

import torch.nn.functional as F
from torch import Tensor

from fastspec_kernels.reference.attention import rotate, store_kv, tree_attention


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply by the transposed weights and add the bias."""
    out = input.double() @ weight.double().T
    return (out if bias is None else out + bias.double()).to(input.dtype)


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
    query_bias: Tensor | None,
    key_bias: Tensor | None,
    value_bias: Tensor | None,
    output_bias: Tensor | None,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    attention_out_norm: Tensor | None,
    mlp_out_norm: Tensor | None,
    eps: float,
    norm_shift: float,
    activation: str,
    cos: Tensor | None,
    sin: Tensor | None,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    cu_rows: Tensor,
    scale: float,
    sliding_window: int,
    softcap: float,
    sinks: Tensor | None,
    ancestor_mask: Tensor | None,
) -> Tensor:
    """Attend and feed forward, each after a norm and added to what came in."""
    dtype, head_size = key_cache.dtype, key_cache.shape[-1]

    def norm(x: Tensor, weight: Tensor | None) -> Tensor:
        return x if weight is None else rms_norm(x, norm_shift + weight.double(), eps)

    def heads(weight: Tensor, bias: Tensor | None) -> Tensor:
        return linear(rows, weight, bias).unflatten(-1, (-1, head_size))

    def turn(x: Tensor) -> Tensor:
        return x if cos is None or sin is None else rotate(x, cos, sin)

    x = hidden.double()
    rows = norm(x, attention_norm)
    query = turn(norm(heads(query_weight, query_bias), query_norm)).to(dtype)
    key = turn(norm(heads(key_weight, key_bias), key_norm)).to(dtype)
    value = heads(value_weight, value_bias).to(dtype)
    caches = key_cache, value_cache
    store_kv(key, value, *caches, slot_mapping, None, None, 1.0, 1.0)
    pages = block_table, context_lens, cu_rows
    options = scale, sliding_window, softcap, sinks, ancestor_mask
    attended, _ = tree_attention(query, *caches, *pages, *options, False, 1.0)
    added = linear(attended.flatten(1).double(), output_weight, output_bias)
    x = x + norm(added, attention_out_norm)
    rows = norm(x, mlp_norm)
    gate = linear(rows, gate_weight)
    gate = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    added = linear(gate * linear(rows, up_weight), down_weight)
    return (x + norm(added, mlp_out_norm)).float()
