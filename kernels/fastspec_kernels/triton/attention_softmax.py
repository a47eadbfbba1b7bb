"""Softmax over blocks of keys with a running peak, in units of log2, and the merge of two parts."""

import triton
import triton.language as tl

from fastspec_kernels.triton.float8 import cached_values

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def block_numbers(paged, first, end, V: tl.constexpr):
    """[N]: the blocks of the cache that contain the keys first..first + block_n below `end`."""
    table, num_blocks = paged[2], paged[3]
    keys = first + tl.arange(0, V.block_n)
    block = tl.load(table + keys // V.block_size, mask=keys < end, other=0)
    return tl.minimum(tl.maximum(block, 0), num_blocks - 1)


@triton.jit
def attend_block(
    state,
    wild,
    q,
    paged,
    block,
    first,
    end,
    seen,
    inner,
    factor,
    MASKED: tl.constexpr,
    V: tl.constexpr,
):
    """Add the keys first..first + block_n to the state: peak [M], total [M], mixed values [M, D].

    `block` is the result of block_numbers for them, read one step ahead to hide its latency. `wild`
    counts the masked blocks with a non-finite value; such values count as 0 here. If MASKED, keys
    from `end` on are not loaded, and `seen` [M, N] says which ones the rows see. Multiply-adds are
    explicit, so that the compiler rounds identically with and without a mask: a row gets the same
    bits from a block whether or not it is masked for its neighbours. A block of which a row sees
    nothing leaves the row's state unchanged.
    """
    peak, total, mixed = state
    key_cache, value_cache, _, _, block_stride, slot_stride = paged
    # Three tf32 products per float32 product, because operands of exact ones fill all registers.
    PRECISION: tl.constexpr = "tf32x3" if V.dot_dtype == tl.float32 else "ieee"
    ZERO: tl.constexpr = 0.0 if MASKED or V.block_d > V.head_size else None
    keys = first + tl.arange(0, V.block_n)
    d = tl.arange(0, V.block_d)
    inside = keys < end
    offset = block.to(tl.int64) * block_stride + _in_block(keys, slot_stride, V)
    place = offset[:, None] + (tl.program_id(1) * V.head_size + d)[None, :]
    if MASKED or V.block_d > V.head_size:
        loaded = inside[:, None] & (d < V.head_size)[None, :]
    else:
        loaded = None
    key = cached_values(tl.load(key_cache + place, mask=loaded, other=ZERO), V)
    scores = tl.dot(q, tl.trans(key), input_precision=PRECISION)
    if V.capped:
        scores = _tanh(scores * inner)
    scaled = scores * factor
    if MASKED:
        scaled = tl.where(seen, scaled, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scaled, 1))
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(tl.fma(scores, factor, -base[:, None]))
    if MASKED:
        weights = tl.where(seen, weights, 0.0)
    decay = tl.exp2(peak - base)
    total = tl.fma(total, decay, tl.sum(weights, 1))
    mixed = mixed * decay[:, None]
    weights = weights.to(V.dot_dtype)
    value = cached_values(tl.load(value_cache + place, mask=loaded, other=ZERO), V)
    if MASKED:  # weight 0 times NaN must not reach a row that does not see the value
        finite = tl.abs(value.to(tl.float32)) < float("inf")
        value = tl.where(finite, value, 0.0)
    mixed = tl.dot(weights, value, mixed, input_precision=PRECISION)
    if MASKED:
        wild += 1 - tl.min(finite.to(tl.int32))
    return (new_peak, total, mixed), wild


@triton.jit
def _in_block(keys, slot_stride, V: tl.constexpr):
    """Offsets of the slots of keys in their blocks, in 32 bits if that suffices."""
    slot = keys % V.block_size
    if V.long_blocks:
        slot = slot.to(tl.int64)
    return slot * slot_stride


@triton.jit
def is_wild(paged, keys, V: tl.constexpr):
    """[N, D]: whether the value at each of the positions is not finite."""
    _, value_cache, table, num_blocks, block_stride, slot_stride = paged
    d = tl.arange(0, V.block_d)[None, :]
    block = tl.load(table + keys // V.block_size)
    block = tl.minimum(tl.maximum(block, 0), num_blocks - 1).to(tl.int64)
    place = block * block_stride + _in_block(keys, slot_stride, V)
    place = place[:, None] + tl.program_id(1) * V.head_size + d
    value = cached_values(tl.load(value_cache + place, mask=d < V.head_size, other=0.0), V)
    return (tl.abs(value.to(tl.float32)) < float("inf")) == 0


@triton.jit
def merge(state, other):
    """Merge the states of two parts."""
    peak, total, mixed = state
    other_peak, other_total, other_mixed = other
    new_peak = tl.maximum(peak, other_peak)
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    decay, other_decay = tl.exp2(peak - base), tl.exp2(other_peak - base)
    total = tl.fma(other_total, other_decay, total * decay)
    return new_peak, total, tl.fma(other_mixed, other_decay[:, None], mixed * decay[:, None])


@triton.jit
def finish(state, sinks, head, inside, V: tl.constexpr):
    """The output [M, D] and natural log-sum-exp [M] of complete rows."""
    peak, total, mixed = state
    base = tl.where(peak == float("-inf"), 0.0, peak)
    denominator = total
    if V.sinks:
        sink = tl.load(sinks + head, mask=inside, other=0.0)
        denominator = total + tl.exp2(sink * LOG2_E - base)
    result = mixed / tl.where(denominator == 0.0, 1.0, denominator)[:, None]
    logsumexp = tl.where(total == 0.0, float("-inf"), (base + tl.log2(total)) * LN_2)
    return result, logsumexp


@triton.jit
def _tanh(x):
    """Use the series near 0, where 1 - 2 / (exp(2x) + 1) would cancel."""
    size = tl.abs(x)
    far = 1.0 - 2.0 / (tl.exp2(size * (2.0 * LOG2_E)) + 1.0)
    square = x * x
    series = square * (62.0 / 2835.0) - 17.0 / 315.0
    series = square * (square * series + 2.0 / 15.0) - 1.0 / 3.0
    near = size + size * (square * series)
    magnitude = tl.where(size < 0.3, near, far)
    return tl.where(x < 0.0, -magnitude, magnitude)
