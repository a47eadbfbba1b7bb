"""Counter-based random numbers."""

import torch
from torch import Tensor

from fastspec_kernels.backend import run_checked
from fastspec_kernels.checks import INT32_MAX, check_int, check_tensor, dense


def uniform(
    seed: Tensor, position: Tensor, num: int, stream: int, *, backend: str = "auto"
) -> Tensor:
    """Draw `num` uniform numbers for each (seed, position, stream), the same bits on every backend.

    Number i of row b is the top 24 bits, times 2**-24, of word i % 4 of Philox4x32-10 with key
    seed[b] and counter (position[b], i // 4, stream). Stateless: equal arguments give equal
    numbers.

    Args:
        seed: [B] int64.
        position: [B] int64, for example the number of committed tokens.
        num: numbers per row, 0 <= num < 2**31.
        stream: purpose of the numbers, 0 <= stream < 2**32; distinct streams are independent.
        backend: "auto", "cpu", "cuda", "triton" or "reference".
    Returns:
        [B, num] float32 in [0, 1).
    Raises:
        ValueError: a wrong shape, dtype, device or range.

    No host synchronisation; safe in CUDA graphs. Source: Salmon et al., "Parallel random numbers:
    as easy as 1, 2, 3", SC 2011.
    """
    check_int("num", num, 0, INT32_MAX)
    check_int("stream", stream, 0, 2**32 - 1)

    def check():
        check_tensor("seed", seed, (None,), (torch.int64,), None)
        check_tensor("position", position, (seed.shape[0],), (torch.int64,), seed.device)

    return run_checked("uniform", backend, seed, (dense(seed), dense(position), num, stream), check)
