"""The sampling ops as Triton kernels; imported on first use."""

from fastspec_kernels.triton.chain import verify_chain
from fastspec_kernels.triton.rng import uniform
from fastspec_kernels.triton.sampling import logits_to_probs, row_stats, sample
from fastspec_kernels.triton.suffix import match_suffix
from fastspec_kernels.triton.tree import build_tree, verify_tree

__all__ = [
    "build_tree",
    "logits_to_probs",
    "match_suffix",
    "row_stats",
    "sample",
    "uniform",
    "verify_chain",
    "verify_tree",
]
