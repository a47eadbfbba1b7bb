"""Draws by inverse CDF on two levels: first the tile, then the token in it."""

import triton
import triton.language as tl

from fastspec_kernels.triton.rows import OUTSIDE


@triton.jit
def pick_tile(masses, uniform, MERGED: tl.constexpr):
    """The tile whose cumulative mass passes uniform * total, and how far into its mass that is."""
    index = tl.arange(0, MERGED)
    total = tl.sum(masses, 0)
    # Not negative, not NaN; 1 and above end at the last token with a mass.
    goal = tl.where(uniform > 0, tl.minimum(uniform, 1.0), 0.0).to(tl.float64) * total
    cumulative = tl.cumsum(masses, 0)
    passed = cumulative > tl.minimum(goal.to(tl.int64), total - 1)
    tile = tl.min(tl.where(passed, index, OUTSIDE), 0)
    mass = tl.sum(tl.where(index == tile, masses, 0), 0)
    before = tl.sum(tl.where(index < tile, masses, 0), 0)
    return tile, (goal - before) / tl.maximum(mass, 1)


@triton.jit
def pick_token(weights, ids, share):
    """The first id whose cumulative weight passes a share of the total."""
    total = tl.sum(weights, 0)
    goal = tl.maximum((share * total).to(tl.int64), 0)
    passed = tl.cumsum(weights, 0) > tl.minimum(goal, total - 1)
    return tl.min(tl.where(passed, ids, OUTSIDE), 0)
