"""Triton kernels: GPUs without the compiled CUDA extension, and an interpreter for tests."""

from fastspec_kernels.triton.attention import cross_attention, tree_attention
from fastspec_kernels.triton.cache import compact_kv, store_kv

__all__ = ["compact_kv", "cross_attention", "store_kv", "tree_attention"]
