"""The specification of every op in plain PyTorch, with float64 inside, one screen per op."""

from fastspec_kernels.reference.attention import (
    compact_kv,
    cross_attention,
    store_kv,
    tree_attention,
)
from fastspec_kernels.reference.draft import draft_chain
from fastspec_kernels.reference.layers import decoder_layers, gated_mlp, linear, rms_norm
from fastspec_kernels.reference.penalties import penalize
from fastspec_kernels.reference.quantized import quantized_linear
from fastspec_kernels.reference.rng import uniform
from fastspec_kernels.reference.sampling import (
    logits_to_probs,
    row_stats,
    sample,
    sample_coupled,
)
from fastspec_kernels.reference.suffix import match_suffix
from fastspec_kernels.reference.tree import build_tree, verify_tree
from fastspec_kernels.reference.verify import verify_chain

__all__ = [
    "build_tree",
    "compact_kv",
    "cross_attention",
    "decoder_layers",
    "draft_chain",
    "gated_mlp",
    "linear",
    "logits_to_probs",
    "match_suffix",
    "penalize",
    "quantized_linear",
    "rms_norm",
    "row_stats",
    "sample",
    "sample_coupled",
    "store_kv",
    "tree_attention",
    "uniform",
    "verify_chain",
    "verify_tree",
]
