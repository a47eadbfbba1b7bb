"""The ops as Triton kernels; imported on first use."""

from fastspec_kernels.triton.attention import cross_attention, tree_attention
from fastspec_kernels.triton.cache import compact_kv, store_kv
from fastspec_kernels.triton.chain import verify_chain
from fastspec_kernels.triton.coupled import sample_coupled
from fastspec_kernels.triton.decoder import decoder_layers
from fastspec_kernels.triton.penalties import penalize
from fastspec_kernels.triton.rng import uniform
from fastspec_kernels.triton.sampling import logits_to_probs, row_stats, sample
from fastspec_kernels.triton.suffix import match_suffix
from fastspec_kernels.triton.tree import build_tree, verify_tree

__all__ = [
    "build_tree",
    "compact_kv",
    "cross_attention",
    "decoder_layers",
    "logits_to_probs",
    "match_suffix",
    "penalize",
    "row_stats",
    "sample",
    "sample_coupled",
    "store_kv",
    "tree_attention",
    "uniform",
    "verify_chain",
    "verify_tree",
]
