"""match_suffix."""

import triton
import triton.language as tl
from torch import Tensor

from fastspec_kernels.triton.launch import launch
from fastspec_kernels.triton.tiles import next_power_of_2, vector_warps

_LARGEST_TILE = 2048
_MOST_COLUMNS = 1024


def match_suffix(
    token_ids: Tensor,
    lengths: Tensor,
    min_match: int,
    max_match: int,
    num_tokens: int,
    rule: str,
) -> Tensor:
    """1 launch."""
    batch, width = token_ids.shape
    out = token_ids.new_empty((batch, num_tokens))
    tile = min(_LARGEST_TILE, next_power_of_2(width))
    launch(
        match_suffix_kernel,
        batch if num_tokens else 0,
        token_ids,
        token_ids.stride(0),
        lengths,
        out,
        width,
        min(min_match, width + 1),
        min(max_match, width),
        num_tokens,
        EARLIEST=rule == "earliest_longest",
        TILE=tile,
        COLUMNS=min(_MOST_COLUMNS, next_power_of_2(num_tokens)),
        num_warps=vector_warps(tile),
    )
    return out


@triton.jit
def match_suffix_kernel(
    token_ids,
    row_stride,
    lengths,
    out,
    width,
    min_match,
    max_match,
    num_tokens,
    EARLIEST: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One program per text: all places of a tile walk backwards while any of them matches."""
    b = tl.program_id(0).to(tl.int64)
    text = token_ids + b * row_stride
    length = tl.minimum(tl.maximum(tl.load(lengths + b), 0), width)
    best_end = length
    best_matched = min_match - 1
    start = length * 0
    while start < length:
        end = start + tl.arange(0, TILE)
        alive = (end < length).to(tl.int32)
        matched = tl.zeros([TILE], tl.int32)
        step = length * 0
        going = tl.where(max_match > step, 1, 0)  # the launcher turns max_match 1 into a constant
        while going != 0:
            last = tl.load(text + length - 1 - step)
            compared = (alive != 0) & (end > step)
            before = tl.load(text + end - 1 - step, mask=compared, other=0)
            alive = (compared & (before == last)).to(tl.int32)
            matched += alive
            step += 1
            going = tl.max(alive, 0) * (step < max_match).to(tl.int32)
        longest = tl.max(matched, 0)
        if EARLIEST:
            wins = longest > best_matched
            place = tl.min(tl.where(matched == longest, end, length), 0)
        else:
            wins = (longest > best_matched) | ((longest == best_matched) & (longest >= min_match))
            place = tl.max(tl.where(matched == longest, end, 0), 0)
        best_end = tl.where(wins, place, best_end)
        best_matched = tl.where(wins, longest, best_matched)
        start += TILE
    for first in range(0, num_tokens, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        tokens = tl.load(text + best_end + column, mask=column < length - best_end, other=-1)
        tl.store(out + b * num_tokens + column, tokens, mask=column < num_tokens)
