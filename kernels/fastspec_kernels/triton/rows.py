"""Weights of logits, and merging of the statistics of a row's tiles."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from fastspec_kernels.triton.slots import INFINITY, load_logits

LN_2 = tl.constexpr(0.6931471805599453)
TILE_ONE = tl.constexpr(2147483648.0)  # 2**31, the weight of a tile's best logit
MASS_ONE = tl.constexpr(1099511627776.0)  # 2**40, the weight of a row's best logit
MASS_UNIT = tl.constexpr(9.094947017729282e-13)  # 1 / MASS_ONE
MASS_PER_TILE_UNIT = tl.constexpr(512.0)  # MASS_ONE / TILE_ONE
GROUP = tl.constexpr(8)  # weights of a tile whose sum is a float
# Adding this rounds a number in [0, GROUP] to a multiple of 2**-12, counted by the lowest bits.
COARSE = tl.constexpr(2048.0)
COARSE_BITS = tl.constexpr(0x45000000)
COARSE_SHIFT = tl.constexpr(19)  # TILE_ONE has 2**19 units for each multiple
# Adding this to the remainder, at most 2**-13 either way, rounds it to a multiple of 1 / TILE_ONE.
FINE = tl.constexpr(0.005859375)  # 1.5 * 2**-8
FINE_BITS = tl.constexpr(0x3BC00000)
OUTSIDE = tl.constexpr(2147483647)
LOWEST_INT32 = tl.constexpr(-(2**31))


class Tiles(NamedTuple):
    """Statistics of each tile [slots, num_tiles], and of each slot."""

    maximum: Any  # f32, NaN if the tile makes its row invalid
    total: Any  # i64, `sum_weights` of the kept weights relative to the tile's maximum
    argmax: Any  # i32, written for greedy rows only
    minimum: Any  # f32, the lowest finite logit; None without a search
    threshold: Any  # f32 [slots], -inf also for greedy rows; None without filters


@triton.jit
def finite_or_zero(value):
    """A maximum that can be subtracted."""
    return tl.where(value > -INFINITY, value, 0.0)


@triton.jit
def weights_of(x, best, scale):
    """Weights relative to the tile's best logit, in [0, 1]."""
    return tl.exp2((x - finite_or_zero(best)) * scale)


@triton.jit
def sum_groups(weights):
    """Sums [T // GROUP] of the weights [T] that are T // GROUP apart, added in pairs.

    The order is written out, so every launch gets the same bits. The members of a group are in
    the registers of one thread wherever a thread holds several runs of a tile.
    """
    distance: tl.constexpr = weights.shape[0] // GROUP
    pairs = tl.reshape(tl.trans(tl.reshape(weights, [GROUP, distance])), [distance, 2, 2, 2])
    a, b = tl.split(pairs)
    a, b = tl.split(a + b)
    a, b = tl.split(a + b)
    return a + b


@triton.jit
def group_of(token, TILE: tl.constexpr):
    """The ids [GROUP] of the group that a token belongs to, as `sum_groups` adds them."""
    distance: tl.constexpr = TILE // GROUP
    return token // TILE * TILE + token % distance + tl.arange(0, GROUP) * distance


@triton.jit
def weights_of_group(target, offset, row, ids, here, maxima, lowest, scale):
    """Weights of the ids of a group, as they are in the sum of the tile that is `here`."""
    x = load_logits(target, offset, row, ids, (ids >= 0) & (ids < target.vocab))
    weights = weights_of(x, tl.max(tl.where(here, maxima, -INFINITY), 0), scale)
    return tl.where(x >= lowest, weights, 0.0)


@triton.jit
def split_weights(weights):
    """Weights rounded to 1 / TILE_ONE: multiples of 2**-12, and the signed rest in units, both i32.

    They are in [0, GROUP]. Uses only additions, as GPUs convert to integers at an eighth of the
    rate. The sums of both parts over a tile fit in 32 bits.
    """
    coarse = weights + COARSE
    rest = (weights - (coarse - COARSE)) + FINE
    coarse = coarse.to(tl.int32, bitcast=True) - COARSE_BITS
    return coarse, rest.to(tl.int32, bitcast=True) - FINE_BITS


@triton.jit
def sum_weights(weights):
    """Sum of the weights of one tile, in units of 1 / TILE_ONE.

    Each group is added as floats, with a relative error of at most 3 * 2**-24; its sum is rounded
    once, and the rounded sums are added exactly. Weights that round to 0 by themselves may count.
    """
    coarse, rest = split_weights(sum_groups(weights))
    return (tl.sum(coarse, 0).to(tl.int64) << COARSE_SHIFT) + tl.sum(rest, 0)


@triton.jit
def units_lost(weights, gone):
    """How much less the sum of a tile is when some [GROUP] of the weights of a group are zero.

    The weights are those of the sum, bit by bit.
    """
    return sum_weights(weights) - sum_weights(tl.where(gone, 0.0, weights))


@triton.jit
def tile_weights(x, best, scale):
    """The rounded weights relative to the tile's best logit, in units of 1 / TILE_ONE."""
    coarse, rest = split_weights(weights_of(x, best, scale))
    return (coarse.to(tl.int64) << COARSE_SHIFT) + rest


@triton.jit
def to_mass(weight):
    """Weights in [0, GROUP] in units of 1 / MASS_ONE, truncated, using only shifts."""
    bits = weight.to(tl.int32, bitcast=True)
    significand = ((bits & 0x7FFFFF) | 0x800000).to(tl.int64) << 20
    return significand >> tl.minimum(130 - (bits >> 23), 63).to(tl.int64)


@triton.jit
def sum_masses(weights):
    """The mass of weights that are 0 or at least 1 / MASS_ONE, from the sums of their groups.

    It is 0 only where all of their masses are.
    """
    return tl.sum(to_mass(sum_groups(weights)), 0)


@triton.jit
def masses_of(totals, maxima, best, scale):
    """Sums of tiles relative to the row's best logit, in units of 1 / MASS_ONE."""
    shift = tl.exp2((maxima - finite_or_zero(best)) * scale).to(tl.float64)
    return (totals.to(tl.float64) * shift * MASS_PER_TILE_UNIT).to(tl.int64)


@triton.jit
def merge_tiles(tiles, slot, exists, num_tiles, scale, MERGED: tl.constexpr):
    """Merge the tiles of the slots [S]: best logit, validity, maxima and masses [S, MERGED]."""
    tile = tl.arange(0, MERGED)[None, :]
    at = slot.to(tl.int64)[:, None] * num_tiles + tile
    there = exists[:, None] & (tile < num_tiles)
    maxima = tl.load(tiles.maximum + at, mask=there, other=-INFINITY)
    totals = tl.load(tiles.total + at, mask=there, other=0)
    good = maxima == maxima
    maxima = tl.where(good, maxima, -INFINITY)
    best = tl.max(maxima, 1)
    valid = (tl.min(good.to(tl.int32), 1) != 0) & (best > -INFINITY)
    return best, valid, maxima, masses_of(totals, maxima, best[:, None], scale)


@triton.jit
def merge_row(tiles, slot, num_tiles, scale, MERGED: tl.constexpr):
    """Merge the tiles of one slot: best logit, validity, maxima and masses [MERGED]."""
    tile = tl.arange(0, MERGED)
    at = slot.to(tl.int64) * num_tiles + tile
    maxima = tl.load(tiles.maximum + at, mask=tile < num_tiles, other=-INFINITY)
    totals = tl.load(tiles.total + at, mask=tile < num_tiles, other=0)
    good = maxima == maxima
    maxima = tl.where(good, maxima, -INFINITY)
    best = tl.max(maxima, 0)
    valid = (tl.min(good.to(tl.int32), 0) != 0) & (best > -INFINITY)
    return best, valid, maxima, masses_of(totals, maxima, best, scale)


@triton.jit
def threshold_of(tiles, slot):
    """The lowest kept logit of a slot."""
    if tiles.threshold is None:
        return -INFINITY
    else:
        return tl.load(tiles.threshold + slot)


@triton.jit
def log_of_mass(mass):
    """Natural logarithm of a sum of weights relative to the best one."""
    return tl.log((mass.to(tl.float64) / MASS_ONE).to(tl.float32))


@triton.jit
def argmax_of(tiles, slot, maxima, best, num_tiles, MERGED: tl.constexpr):
    """The lowest id of the best logit of a greedy slot."""
    if tiles.argmax is None:
        return 0
    else:
        tile = tl.arange(0, MERGED)
        at = slot.to(tl.int64) * num_tiles + tile
        ids = tl.load(tiles.argmax + at, mask=tile < num_tiles, other=OUTSIDE)
        return tl.min(tl.where(maxima == best, ids, OUTSIDE), 0)


@triton.jit
def to_key(value):
    """Integers in the order of the floats."""
    bits = value.to(tl.int32, bitcast=True).to(tl.int64)
    return tl.where(bits >= 0, bits, LOWEST_INT32 - bits)


@triton.jit
def from_key(key):
    """The float of a key."""
    bits = tl.where(key >= 0, key, LOWEST_INT32 - key)
    return bits.to(tl.int32).to(tl.float32, bitcast=True)
