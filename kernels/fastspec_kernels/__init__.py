"""Fused kernels of speculative decoding: from raw logits to accepted tokens, and attention over a paged cache."""

from fastspec_kernels.backend import available_backends, unavailable_backends
from fastspec_kernels.rng import uniform

PAD_TOKEN_ID = -1

__all__ = ["PAD_TOKEN_ID", "available_backends", "unavailable_backends", "uniform"]
