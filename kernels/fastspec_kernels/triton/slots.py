"""Locations of the rows of a launch, and their parameters."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

INFINITY = tl.constexpr(float("inf"))
LOG2_E = tl.constexpr(1.4426950408889634)
SMALLEST_SCALE = tl.constexpr(1.401298464324817e-45)  # 2 ** -149; 0 * -inf would be NaN
LARGEST_SCALE = tl.constexpr(3.0e38)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


class Rows(NamedTuple):
    """The logits of one model; row (b, i) starts at b * outer_stride + i * stride."""

    logits: Any
    outer_stride: Any  # of draft rows; target rows are found through `Slots.cu_rows`
    stride: Any
    vocab: Any
    bitmask: Any  # allowed tokens of target rows, or None
    bitmask_stride: Any


# Not None, because Triton 3.6 cannot test whether a group of arguments that may contain None is.
NO_ROWS = Rows(None, 0, 0, 0, None, 0)


class Slots(NamedTuple):
    """The rows of one launch: per sequence `steps` target rows, then `draft_steps` draft rows.

    No number here depends on the batch, because kernels are recompiled for some numbers.
    """

    steps: Any
    draft_steps: Any
    cu_rows: Any  # None: slot r is target row r and has its own parameters
    position: Any  # None, or the only step of each sequence whose draft row counts, -1 = none


class Params(NamedTuple):
    """Sampling parameters, one value per row or sequence; None = off."""

    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any


@triton.jit
def target_slot(slots, b, step):
    """The slot of a target row."""
    return b * (slots.steps + slots.draft_steps) + step


@triton.jit
def draft_slot(slots, b, step):
    """The slot of a draft row."""
    return b * (slots.steps + slots.draft_steps) + slots.steps + step


@triton.jit
def is_target(slots, slot):
    """Whether a slot holds a target row."""
    return slot % (slots.steps + slots.draft_steps) < slots.steps


@triton.jit
def place_of(slots, slot):
    """Index of a slot's parameters, its sequence where there are sequences, and its step there."""
    if slots.cu_rows is None:
        return slot, 0
    else:
        per_sequence = slots.steps + slots.draft_steps
        return slot // per_sequence, slot % per_sequence


@triton.jit
def target_at(rows, slots, index, step):
    """Offset of the row of one step of the target, the row, and whether it exists."""
    if slots.cu_rows is None:
        row = index
        exists = index >= 0
    else:
        row = tl.load(slots.cu_rows + index) + step
        exists = row < tl.load(slots.cu_rows + index + 1)
    row = row.to(tl.int64)
    return row * rows.stride, row, exists


@triton.jit
def draft_at(rows, slots, index, step):
    """Offset of the row of one step of the drafter, and whether a proposal was drawn from it."""
    if slots.position is None:
        step -= slots.steps
    else:
        step = tl.load(slots.position + index)
    count = tl.load(slots.cu_rows + index + 1) - tl.load(slots.cu_rows + index)
    exists = (step >= 0) & (step < count - 1)
    return index.to(tl.int64) * rows.outer_stride + step.to(tl.int64) * rows.stride, exists


@triton.jit
def find_target(rows, slots, slot):
    """Offset of a target slot's row, the row, the index of its parameters, whether it exists."""
    index, step = place_of(slots, slot)
    offset, row, exists = target_at(rows, slots, index, step)
    return offset, row, index, exists


@triton.jit
def allowed(rows, row, ids, inside):
    """Whether the bitmask of a target row allows these tokens."""
    word = tl.load(rows.bitmask + row * rows.bitmask_stride + ids // 32, mask=inside, other=0)
    return ((word >> (ids % 32)) & 1) != 0


@triton.jit
def load_logits(rows, offset, row, ids, inside):
    """Logits of a target row in f32; -inf for tokens outside or not allowed."""
    # Widened right after the load, because the interpreter computes incorrectly in bfloat16.
    x = to_float(tl.load(rows.logits + offset + ids, mask=inside, other=-INFINITY))
    if rows.bitmask is not None:
        x = tl.where(allowed(rows, row, ids, inside), x, -INFINITY)
    return x


@triton.jit
def load_draft(rows, offset, ids, inside):
    """Logits of a draft row in f32; -inf for tokens outside."""
    return to_float(tl.load(rows.logits + offset + ids, mask=inside, other=-INFINITY))


@triton.jit
def row_exists(target, draft, slots, index, step):
    """Whether there is a row of either model at a step."""
    if draft.logits is None:
        _, _, exists = target_at(target, slots, index, step)
    else:
        if step < slots.steps:
            _, _, exists = target_at(target, slots, index, step)
        else:
            _, exists = draft_at(draft, slots, index, step)
    return exists


@triton.jit
def locate_params(target, draft, slots, slot):
    """Index of a slot's parameters, and whether its row exists."""
    index, step = place_of(slots, slot)
    return index, row_exists(target, draft, slots, index, step)


@triton.jit
def load_any(target, draft, slots, slot, ids):
    """Logits of a slot's row, of either model."""
    index, step = place_of(slots, slot)
    if draft.logits is None:
        offset, row, _ = target_at(target, slots, index, step)
        x = load_logits(target, offset, row, ids, ids < target.vocab)
    else:
        if step < slots.steps:
            offset, row, _ = target_at(target, slots, index, step)
            x = load_logits(target, offset, row, ids, ids < target.vocab)
        else:
            offset, _ = draft_at(draft, slots, index, step)
            x = load_draft(draft, offset, ids, ids < draft.vocab)
    return x


@triton.jit
def load_tile(target, draft, slots, index, step, tile, TILE: tl.constexpr):
    """Logits of one tile of the row at a step, like `load_any` with fewer instructions."""
    if draft.logits is None:
        offset, row, _ = target_at(target, slots, index, step)
        x = _load_tile_of(target, offset, row, tile, TILE)
    else:
        if step < slots.steps:
            offset, row, _ = target_at(target, slots, index, step)
            x = _load_tile_of(target, offset, row, tile, TILE)
        else:
            offset, _ = draft_at(draft, slots, index, step)
            x = _load_tile_of(draft, offset, 0, tile, TILE)
    return x


@triton.jit
def _load_tile_of(rows, offset, row, tile, TILE: tl.constexpr):
    # The tile's offset is added to the pointer; loads can add compile-time constants.
    logits = rows.logits + offset + tile * TILE
    ids = tl.arange(0, TILE)
    inside = ids < rows.vocab - tile * TILE
    if (tile + 1) * TILE <= rows.vocab:
        x = _widen(tl.load(logits + ids))
    else:
        x = _widen(tl.load(logits + ids, mask=inside, other=-INFINITY))
    if rows.bitmask is not None:
        x = tl.where(allowed(rows, row, tile * TILE + ids, inside), x, -INFINITY)
    return x


@triton.jit
def to_float(x):
    """Convert logits to f32; the interpreter gets the subnormals of bfloat16 wrong."""
    if INTERPRETED:
        return _widen(x)
    else:
        return x.to(tl.float32)


@triton.jit
def _widen(x):
    """Convert to f32 by moving half a register to the upper half, cheaper than `to`."""
    if x.dtype == tl.bfloat16:
        bits = x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        return bits.to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def vocab_of(target, draft, slots, slot):
    """Number of logits of a slot's row."""
    vocab = target.vocab
    if draft.logits is not None:
        vocab = tl.where(is_target(slots, slot), target.vocab, draft.vocab)
    return vocab


@triton.jit
def filters_of(target, draft, slots, sampling, slot, index):
    """top_k (0 = off), top_p and min_p of a slot; a k of the whole row is off as well."""
    vocab = vocab_of(target, draft, slots, slot)
    top_k = 0
    if sampling.top_k is not None:
        top_k = tl.load(sampling.top_k + index)
        top_k = tl.where((top_k > 0) & (top_k < vocab), top_k, 0)
    top_p = 1.0
    if sampling.top_p is not None:
        top_p = tl.load(sampling.top_p + index)
    min_p = 0.0
    if sampling.min_p is not None:
        min_p = tl.load(sampling.min_p + index)
    return top_k, top_p, min_p


@triton.jit
def temperature_of(sampling, index):
    """Factor of log2-weights, whether greedy (then as at temperature 1), whether it is valid."""
    value = tl.full([], 1.0, tl.float32)
    if sampling.temperature is not None:
        value = tl.load(sampling.temperature + index)
    scale = tl.full([], LOG2_E, tl.float32) / tl.where(value > 0, value, 1.0)
    least = tl.full([], SMALLEST_SCALE, tl.float32)  # a literal as small would be float64
    scale = tl.minimum(tl.maximum(scale, least), LARGEST_SCALE)
    return scale, flag(value == 0), flag(value >= 0)


@triton.jit
def flag(condition):
    """A scalar condition usable with blocks; the interpreter would widen it to its operands."""
    return condition.to(tl.int32) != 0
