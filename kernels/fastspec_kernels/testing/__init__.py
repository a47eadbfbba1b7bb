"""Proofs that a verifier of speculative decoding is lossless, for these kernels and any other."""

from fastspec_kernels.testing import rules
from fastspec_kernels.testing.chain import CHAIN_CASES, assert_lossless
from fastspec_kernels.testing.edge_tables import CHAIN_EDGES, TREE_EDGES
from fastspec_kernels.testing.edges import (
    ChainEdge,
    TreeEdge,
    assert_chain_edge,
    assert_tree_edge,
)
from fastspec_kernels.testing.enumeration import (
    assert_exact_chain,
    assert_exact_tree,
    chain_distribution,
    completed,
    tree_distribution,
)
from fastspec_kernels.testing.exact import Coin, outcome_distribution
from fastspec_kernels.testing.models import TableModel, random_model
from fastspec_kernels.testing.proposals import assert_draft_contract
from fastspec_kernels.testing.statistics import assert_counts, chi_square
from fastspec_kernels.testing.tree import TREE_CASES, assert_lossless_tree

__all__ = [
    "CHAIN_CASES",
    "CHAIN_EDGES",
    "TREE_CASES",
    "TREE_EDGES",
    "ChainEdge",
    "Coin",
    "TableModel",
    "TreeEdge",
    "assert_chain_edge",
    "assert_counts",
    "assert_draft_contract",
    "assert_exact_chain",
    "assert_exact_tree",
    "assert_lossless",
    "assert_lossless_tree",
    "assert_tree_edge",
    "chain_distribution",
    "chi_square",
    "completed",
    "outcome_distribution",
    "random_model",
    "rules",
    "tree_distribution",
]
