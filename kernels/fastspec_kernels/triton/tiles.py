"""How rows are cut into tiles, and warps per tile, as a function only of the shapes."""

from typing import NamedTuple

# A row's tiles depend only on its length, never on the batch, which would change sums otherwise.
LARGEST_TILE = 4096


class Tiling(NamedTuple):
    """The tiling of a row, and launch options of the kernels that process it."""

    tile: int  # elements, a power of two
    num_tiles: int
    merged: int  # num_tiles rounded up to a power of two
    statistics_warps: int  # of a program that computes the statistics of one tile
    tile_warps: int  # of a program that reads one tile in one pass
    search_warps: int  # of a program that keeps a tile in registers and processes it often


def tiling_of(vocab: int) -> Tiling:
    """Return the tiling of rows of `vocab` elements."""
    tile = min(LARGEST_TILE, max(32, next_power_of_2(vocab)))
    num_tiles = -(-vocab // tile)
    return Tiling(
        tile=tile,
        num_tiles=num_tiles,
        merged=next_power_of_2(num_tiles),
        statistics_warps=_statistics_warps(tile, vocab),
        tile_warps=4 if tile >= 1024 else 1,
        search_warps=8 if tile >= 2048 else 4 if tile >= 512 else 1,
    )


def _statistics_warps(tile: int, vocab: int) -> int:
    """Return few warps, as per-thread overhead counts; more if each load needs an address."""
    if tile < 1024:
        return 1
    return 2 if vocab % 16 == 0 else 4


def vector_warps(size: int) -> int:
    """Return the warps of a program whose largest block has `size` elements."""
    return 1 if size <= 128 else 4 if size <= 4096 else 8


def next_power_of_2(value: int) -> int:
    """Return the smallest power of two that is at least `value`, and at least 1."""
    return 1 << max(value - 1, 0).bit_length()
