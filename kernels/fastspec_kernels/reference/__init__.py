"""The specification of every op: plain PyTorch, float64 inside, one screen per op."""

from fastspec_kernels.reference.rng import uniform

__all__ = ["uniform"]
