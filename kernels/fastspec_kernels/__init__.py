"""Fused kernels for speculative decoding: raw logits to tokens, attention over a paged cache."""

from fastspec_kernels.attention import cross_attention, tree_attention
from fastspec_kernels.backend import (
    available_backends,
    backend_of,
    cpu_instruction_set,
    unavailable_backends,
)
from fastspec_kernels.cache import compact_kv, store_kv
from fastspec_kernels.decoder import decoder_layers
from fastspec_kernels.draft import draft_chain
from fastspec_kernels.layers import gated_mlp, linear, rms_norm
from fastspec_kernels.penalties import penalize
from fastspec_kernels.quantized import quantize_weight, quantized_linear
from fastspec_kernels.reference.draft import DraftWeights
from fastspec_kernels.reference.layers import LayerWeights
from fastspec_kernels.reference.quantized import TILE as PACKED_TILE
from fastspec_kernels.rng import uniform
from fastspec_kernels.sampling import logits_to_probs, row_stats, sample, sample_coupled
from fastspec_kernels.suffix import match_suffix
from fastspec_kernels.tree import build_tree, verify_tree
from fastspec_kernels.verify import verify_chain

PAD_TOKEN_ID = -1

__all__ = [
    "PACKED_TILE",
    "PAD_TOKEN_ID",
    "DraftWeights",
    "LayerWeights",
    "available_backends",
    "backend_of",
    "build_tree",
    "compact_kv",
    "cpu_instruction_set",
    "cross_attention",
    "decoder_layers",
    "draft_chain",
    "gated_mlp",
    "linear",
    "logits_to_probs",
    "match_suffix",
    "penalize",
    "quantize_weight",
    "quantized_linear",
    "rms_norm",
    "row_stats",
    "sample",
    "sample_coupled",
    "store_kv",
    "tree_attention",
    "unavailable_backends",
    "uniform",
    "verify_chain",
    "verify_tree",
]
