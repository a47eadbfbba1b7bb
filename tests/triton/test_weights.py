"""Weights as integers: rounding by additions is exact, and so are the sums of a tile."""

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed")

import triton.language as tl  # noqa: E402

from fastspec_kernels import backend  # noqa: E402
from fastspec_kernels.triton.rows import split_weights, sum_weights  # noqa: E402
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


@pytest.mark.parametrize(
    "kind",
    ["even", "all best", "steep", "halfway between units", "halfway between coarse steps"],
)
def test_rounding_is_exact(kind):
    values = weights(kind).to(DEVICE)
    coarse, rest = torch.empty(2, LARGEST_TILE, dtype=torch.int32, device=DEVICE)
    total = torch.empty(1, dtype=torch.int64, device=DEVICE)
    weigh_kernel[(1,)](values, coarse, rest, total, LARGEST_TILE)
    units = torch.round(values.double() / UNIT).long()
    assert torch.equal((coarse.long() << 19) + rest, units)
    assert total.item() == units.sum().item()
