"""Assigns keys of sequences to attention programs, by the lengths on the device."""

import triton
import triton.language as tl

# Chunks and runs are ranges of key positions: 0..255 is a chunk of few rows, whichever program
# reads it. The more rows, the larger what a chunk leaves behind beside what it reads.
FEW_CHUNK = tl.constexpr(256)
CHUNK = tl.constexpr(512)
RUN = tl.constexpr(1024)
TILE = tl.constexpr(64)  # rows that count as one when the keys are distributed
BLOCK_BATCH = tl.constexpr(32)  # few enough for sums within a warp


@triton.jit
def share_of_program(lengths, programs, room, V: tl.constexpr):
    """Find this program's part, tile and sequence, and where its partials go.

    All sequences are cut into parts of about the same number of keys, whole chunks or runs, large
    enough that `programs` programs per KV head, and one more per tile, suffice. A sequence is not
    cut if it is one part or its partials end past `room`.

    Args:
        lengths: context_lens, cu_rows, batch, capacity and sliding_window of the kernel.
    Returns:
        The sequence, or `batch` or more if there is nothing to do; tile, part, number of parts;
        keys per partial; partials per row, 0 if it is not cut; the first partial of the sequence.
    """
    batch, step = lengths[2], 1
    if V.split:
        total = tl.full([], 0, tl.int32)
        for first in range(0, batch, BLOCK_BATCH):
            index = first + tl.arange(0, BLOCK_BATCH)
            num_tokens, size = _sizes(lengths, index, V)
            total += tl.sum(size * ((num_tokens * V.group + TILE - 1) // TILE), 0)
        step = tl.maximum((total + programs - 1) // programs, 1)
    b = tl.program_id(0)
    slot, base = b * 0, tl.full([], 0, tl.int64)
    if V.split or V.rows != "few":
        b, slot = slot, b
        begin, end, needed_so_far = b, b, base
        for first in range(0, batch, BLOCK_BATCH):
            index = first + tl.arange(0, BLOCK_BATCH)
            num_tokens, size = _sizes(lengths, index, V)
            parts, needed, _, _ = _parts(num_tokens, size, step, V)
            fits = needed_so_far + tl.cumsum(needed, 0) <= room
            programs_of = _tiles(num_tokens, V) * tl.where(fits, parts, 1)
            ends = end + tl.cumsum(programs_of, 0)
            before = ends <= slot
            b += tl.sum(before.to(tl.int32), 0)
            begin = tl.maximum(begin, tl.max(tl.where(before, ends, 0), 0))
            base += tl.sum(tl.where(before, needed, 0), 0)
            end += tl.sum(programs_of, 0)
            needed_so_far += tl.sum(needed, 0)
        slot -= begin
    num_tokens, size = _sizes(lengths, b, V)
    parts, needed, length, unit = _parts(num_tokens, size, step, V)
    parts = tl.where(base + needed <= room, parts, 1)
    keys, length = tl.where(parts > 1, unit * FEW_CHUNK, RUN), tl.where(parts > 1, length, 0)
    tile = 0 if V.rows == "few" else slot // parts
    return b, tile, slot % parts, parts, keys, length, base


@triton.jit
def _sizes(lengths, index, V: tl.constexpr):
    """Tokens of sequences, and the smallest chunks that hold what these see; 0 past the batch."""
    context_lens, cu_rows, batch, capacity, sliding_window = lengths
    inside = index < batch
    start = tl.load(cu_rows + index, mask=inside, other=0)
    num_tokens = tl.load(cu_rows + index + 1, mask=inside, other=0) - start
    context = tl.load(context_lens + index, mask=inside, other=0)
    keys = tl.minimum(tl.maximum(context, 0), capacity)
    if V.windowed:
        keys = tl.minimum(keys - num_tokens, sliding_window) + num_tokens
    return num_tokens, (keys + FEW_CHUNK - 1) // FEW_CHUNK


@triton.jit
def _tiles(num_tokens, V: tl.constexpr):
    """Tiles of sequences that have this kernel's kind of rows, 0 for others."""
    rows = num_tokens * V.group
    tiles = (rows + V.block_m - 1) // V.block_m
    if V.rows == "few":
        tiles = tl.where(rows <= V.block_m, tiles, 0)
    if V.rows == "many":
        tiles = tl.where(rows > V.few_rows, tiles, 0)
    return tiles


@triton.jit
def _parts(num_tokens, size, step, V: tl.constexpr):
    """Parts per tile, partials of the sequence (none if one part), partials per row, the unit.

    The unit is the keys of a partial: a chunk, unless `step`, before it is rounded up, is a run or
    more. Unit, step and size count the smallest chunks.
    """
    chunk = CHUNK // FEW_CHUNK + num_tokens * 0
    if V.rows != "all":
        chunk = tl.where(num_tokens * V.group <= V.few_rows, 1, chunk)
    run: tl.constexpr = RUN // FEW_CHUNK
    unit = tl.where(step < run, chunk, run)
    step = (step + unit - 1) // unit * unit
    parts = tl.maximum((size + step - 1) // step, 1)
    length = (size + unit - 1) // unit + 1  # a window may begin and end inside units
    needed = num_tokens.to(tl.int64) * V.num_heads * length
    return tl.where(needed > 0, parts, 1), tl.where(parts > 1, needed, 0), length, unit
