"""Weights as integers: rounding by additions is exact, and so are the sums of a tile."""

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed")

import triton.language as tl  # noqa: E402

from fastspec_kernels import backend  # noqa: E402
from fastspec_kernels.triton.residual import residual_weights  # noqa: E402
from fastspec_kernels.triton.rows import (  # noqa: E402
    group_of,
    split_weights,
    sum_masses,
    sum_weights,
    to_mass,
    units_lost,
)
from fastspec_kernels.triton.slots import INFINITY  # noqa: E402
from fastspec_kernels.triton.tiles import LARGEST_TILE  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if "triton" not in backend.backends_of("row_stats", DEVICE):
    pytest.skip("Triton runs on no device here", allow_module_level=True)

UNIT = 2.0**-31


@triton.jit
def weigh_kernel(weights, coarse, rest, total, TILE: tl.constexpr):
    at = tl.arange(0, TILE)
    x = tl.load(weights + at)
    parts = split_weights(x)
    tl.store(coarse + at, parts[0])
    tl.store(rest + at, parts[1])
    tl.store(total, sum_weights(x))


@triton.jit
def lose_kernel(weights, without, total, token, TILE: tl.constexpr):
    ids = group_of(token, TILE)
    at = tl.arange(0, TILE)
    lost = units_lost(tl.load(weights + ids), ids == token)
    tl.store(total, sum_weights(tl.load(weights + at)) - lost)
    tl.store(total + 1, sum_weights(tl.load(without + at)))


@triton.jit
def mass_kernel(logits, masses, total, TILE: tl.constexpr):
    """The residual of a draft without weight."""
    at = tl.arange(0, TILE)
    x = tl.load(logits + at)
    rest = residual_weights(x, 0.0, -INFINITY, x, 0.0, -INFINITY, 1.0, 0.0)
    tl.store(masses + at, to_mass(rest))
    tl.store(total, sum_masses(rest))


def weights(kind: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    share = torch.rand(LARGEST_TILE, generator=generator)
    odd = 2 * (share * 4000).long() + 1
    return {
        "even": share,
        "all best": torch.ones_like(share),
        "steep": torch.exp2(-150 * share),
        "halfway between units": odd * (UNIT / 2),
        "halfway between coarse steps": (odd * 2.0**-13).clamp(max=1.0),
    }[kind].float()


KINDS = ["even", "all best", "steep", "halfway between units", "halfway between coarse steps"]


@pytest.mark.parametrize("kind", KINDS)
def test_rounding_is_exact(kind):
    values = weights(kind).to(DEVICE)
    coarse, rest = torch.empty(2, LARGEST_TILE, dtype=torch.int32, device=DEVICE)
    total = torch.empty(1, dtype=torch.int64, device=DEVICE)
    weigh_kernel[(1,)](values, coarse, rest, total, LARGEST_TILE)
    assert torch.equal((coarse.long() << 19) + rest, units_of(values))
    assert total.item() == units_of(group_sums(values)).sum().item()
    exact = values.double().sum().item() / UNIT
    assert total.item() == pytest.approx(exact, rel=3 * 2.0**-24, abs=LARGEST_TILE / 16)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("token", [0, 511, 512, LARGEST_TILE - 1])
def test_a_group_loses_what_the_sum_of_the_tile_does(kind, token):
    """Removing a token leaves exactly the sum of a tile that never had it."""
    values = weights(kind).to(DEVICE)
    without = values.clone()
    without[token] = 0
    total = torch.empty(2, dtype=torch.int64, device=DEVICE)
    lose_kernel[(1,)](values, without, total, token, LARGEST_TILE)
    assert total[0] == total[1]


@pytest.mark.parametrize(("exponent", "units"), [(-40.5, 0), (-40, 1), (-38, 4), (0, 2**40)])
def test_a_tile_has_mass_only_where_a_token_has(exponent, units):
    """Many weights that are too small for a mass have none together, or a draw would find no token
    in their tile."""
    logits = torch.full((LARGEST_TILE,), float(exponent), device=DEVICE)
    masses, total = torch.empty(LARGEST_TILE + 1, dtype=torch.int64, device=DEVICE).split(
        [LARGEST_TILE, 1]
    )
    mass_kernel[(1,)](logits, masses, total, LARGEST_TILE)
    assert masses.unique().tolist() == [units]
    assert total.item() == LARGEST_TILE * units


def units_of(values: torch.Tensor) -> torch.Tensor:
    return torch.round(values.double() / UNIT).long()


def group_sums(values: torch.Tensor) -> torch.Tensor:
    """Sums [T // 8] of float32 numbers that are T // 8 apart, added in pairs."""
    parts = values.view(8, -1)
    while len(parts) > 1:
        parts = parts[0::2] + parts[1::2]
    return parts[0]
