"""Statistical proof that a verifier of token trees preserves the target's distribution."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fastspec_kernels.testing.draws import (
    Vocabulary,
    assert_possible,
    assert_target_distribution,
    draw_tokens,
    sampling_parameters,
    scatter,
)
from fastspec_kernels.testing.edge_tables import TREE_EDGES
from fastspec_kernels.testing.edges import assert_tree_edge
from fastspec_kernels.testing.enumeration import SIBLING_RULES, tree_distribution
from fastspec_kernels.testing.models import TableModel, random_model
from fastspec_kernels.testing.rules import TreeRule
from fastspec_kernels.testing.statistics import ALPHA, assert_counts, require_a_test

VOCAB = 4
TARGET_SEED, DRAFT_SEED = 104, 105  # a pair that exposes every known mistake
TREE_CASES = ("random", "equal", "disjoint", "filtered")
# Parents of the nodes after the root.
SHAPES = ((0, 0, 0), (0, 0, 1, 1, 3), (0, 1, 2), ())
MAX_NODES = 1 + max(map(len, SHAPES))
MAX_DEPTH = 3


@dataclass(frozen=True)
class TreeDraws:
    """One case of `assert_lossless_tree`: two models, and one batch of trees of one shape."""

    label: str
    target: TableModel
    draft: TableModel
    vocabulary: Vocabulary
    sibling_rule: str
    parents: tuple[int, ...]  # of the nodes after the root
    tokens: np.ndarray  # [B, nodes] of the model; -1 for the root, and where none could be drawn
    uniforms: np.ndarray  # [B, MAX_NODES + 1] float32
    parameters: dict[str, np.ndarray]  # of each sequence, or empty

    @property
    def greedy(self) -> np.ndarray:
        """Which sequences [B] are greedy."""
        return self.parameters.get("temperature", np.ones(len(self.tokens))) == 0

    def arguments(self, device: str) -> dict[str, Any]:
        """Make the arguments of verify_tree."""
        batch, num_nodes = self.tokens.shape
        temperature = self.parameters.get("temperature", np.ones(batch))
        codes, depths = node_codes(self.tokens, self.parents)
        target, draft = (
            self.vocabulary.logits(
                np.stack([model.probs(depths[i])[codes[:, i]] for i in range(num_nodes)], axis=1),
                np.repeat(temperature[:, None], num_nodes, axis=1),
            )
            for model in (self.target, self.draft)
        )
        ids = np.where(self.tokens >= 0, self.vocabulary.ids[self.tokens], -1)
        padding = [(0, 0), (0, MAX_NODES - num_nodes)]
        parents = np.pad([-1, *self.parents], padding[1], constant_values=-1)
        padded_draft = torch.nn.functional.pad(draft, (0, 0, *padding[1]))
        arguments = {
            "target_logits": target.flatten(0, 1),
            "cu_rows": torch.arange(batch + 1, dtype=torch.int32) * num_nodes,
            "tree_token_ids": torch.from_numpy(np.pad(ids, padding).astype(np.int32)),
            "parents": torch.from_numpy(np.tile(parents, (batch, 1)).astype(np.int32)),
            "uniform_samples": torch.from_numpy(self.uniforms),
            "draft_logits": None if self.sibling_rule == "target_only" else padded_draft,
            **{name: torch.from_numpy(value) for name, value in self.parameters.items()},
        }
        moved = {
            name: None if value is None else value.to(device) for name, value in arguments.items()
        }
        return {**moved, "sibling_rule": self.sibling_rule}


def assert_lossless_tree(
    verify: Callable[..., Any],
    sibling_rule: str,
    *,
    rule: TreeRule | None = None,
    cases: Collection[str] = TREE_CASES,
    edges: bool = True,
    num_draws: int = 50_000,
    vocab_size: int = 37,
    device: str = "cpu",
    alpha: float = ALPHA,
) -> None:
    """Check that the output of a verifier of token trees has the target's distribution.

    `verify` is called like `fastspec_kernels.verify_tree`:

        verify(target_logits=, cu_rows=, tree_token_ids=, parents=, uniform_samples=,
               sibling_rule=, draft_logits=, ...) -> (path, output_token_ids, accepted_len, ...)

    with temperature, top_k, top_p and min_p only in the "filtered" case. Other verifiers are
    checked through an adapter, see `assert_lossless`; all trees of a call have the same shape, so
    an adapter can translate parents[0] into the form that the verifier needs.

    Each case is a batch of independent draws for each of several trees: wide, deep, a chain, only a
    root. Siblings are drawn as `sibling_rule` says; for "target_only" they are fixed, and include
    repeated tokens. The requirements on the emitted tokens are as in `assert_lossless`.

    Args:
        verify: the verifier.
        sibling_rule: "target_only", "without_replacement" or "with_replacement": how the siblings
            of a node are chosen.
        rule: check the joint distribution of accepted nodes and emitted tokens against this rule,
            for example `rules.target_only`. Only the joint distribution is then checked.
        cases: which of `TREE_CASES` to run.
        edges: also run the `TREE_EDGES` of the rule.
        num_draws: sequences for each tree of each case.
        vocab_size: at least 12.
        device: device of the tensors.
        alpha: false alarm rate of each test; seeds are fixed.
    Raises:
        AssertionError: names the case, the distribution, the p value, and observed and expected
            counts.
        ValueError: nothing to test: no cases, fewer than 1000 draws, or alpha outside (0, 1).
    """
    require_a_test(cases, num_draws, alpha)
    if sibling_rule not in SIBLING_RULES:
        raise ValueError(f"sibling_rule: expected one of {SIBLING_RULES}, got {sibling_rule!r}")
    if edges:
        for edge in TREE_EDGES:
            if edge.sibling_rule == sibling_rule:
                assert_tree_edge(verify, edge, device)
    for case in cases:
        for parents in SHAPES:
            draws = tree_draws(case, sibling_rule, parents, num_draws, vocab_size)
            _assert_case(verify, draws, rule, device, alpha)


def _assert_case(verify, draws, rule, device, alpha):
    path, output, accepted_len = (
        torch.as_tensor(out).cpu().numpy() for out in verify(**draws.arguments(device))[:3]
    )
    tokens = _checked_tokens(draws, path, output, accepted_len)
    _assert_greedy(draws, tokens, accepted_len)
    sampled = ~draws.greedy
    path, tokens, lengths = path[sampled], tokens[sampled], accepted_len[sampled] + 1
    if rule is not None:
        _assert_joint_distribution(draws, rule, path, tokens, lengths, alpha)
        return
    tokens = tokens[:, : MAX_DEPTH + 1]
    assert_possible(tokens, lengths, draws.target, draws.label, draws.uniforms[sampled])
    rng = np.random.default_rng(1)
    assert_target_distribution(tokens, lengths, draws.target, draws.label, alpha, rng)


def tree_draws(
    case: str, sibling_rule: str, parents: tuple[int, ...], num_draws: int, vocab_size: int
) -> TreeDraws:
    """Make the batch of one case.

    Args:
        case: one of `TREE_CASES`.
        sibling_rule, num_draws, vocab_size: see `assert_lossless_tree`.
        parents: parents of the nodes after the root.
    Returns:
        The batch; equal arguments give equal batches.
    """
    if case not in TREE_CASES:
        raise ValueError(f"cases: expected some of {TREE_CASES}, got {case!r}")
    rng = np.random.default_rng(0)
    filtered = case == "filtered"
    units = {"total": 8, "minimum": int(filtered)}
    halves = ((0, 1), (2, 3)) if case == "disjoint" else (None, None)
    target = random_model(TARGET_SEED, VOCAB, MAX_DEPTH, tokens=halves[0], **units)
    draft = random_model(DRAFT_SEED, VOCAB, MAX_DEPTH, tokens=halves[1], **units)
    if case == "equal":
        draft = target
    tokens = np.full((num_draws, 1), -1)
    fixed = rng.integers(VOCAB, size=len(parents))
    for node, parent in enumerate(parents, 1):
        if sibling_rule == "target_only":
            drawn = np.full(num_draws, fixed[node - 1])
        else:
            codes, depths = node_codes(tokens, parents[: node - 1])
            probs = draft.probs(depths[parent])[codes[:, parent]].copy()
            probs[tokens[:, parent] < 0 if parent else np.zeros(num_draws, dtype=bool)] = 0
            for other in range(1, node):
                if parents[other - 1] == parent and sibling_rule == "without_replacement":
                    drawn_before = tokens[:, other] >= 0
                    probs[drawn_before, tokens[drawn_before, other]] = 0
            drawn = draw_tokens(probs, rng)
        tokens = np.column_stack([tokens, drawn])
    return TreeDraws(
        f"{case}, parents {(-1, *parents)}",
        target,
        draft,
        scatter(target, vocab_size, filtered, rng),
        sibling_rule,
        parents,
        tokens,
        rng.random((num_draws, MAX_NODES + 1), dtype=np.float32),
        sampling_parameters(num_draws, VOCAB) if filtered else {},
    )


def node_codes(tokens: np.ndarray, parents: tuple[int, ...]) -> tuple[np.ndarray, list[int]]:
    """Encode the prefixes that lead to the nodes.

    Args:
        tokens: [B, nodes] tokens of the model; the root's is not read, -1 counts as 0.
        parents: parents of the nodes after the root.
    Returns:
        The code [B, nodes] of the prefix that ends in each node, and its length.
    """
    codes, depths = np.zeros(tokens.shape, dtype=np.int64), [0]
    for node, parent in enumerate(parents, 1):
        codes[:, node] = codes[:, parent] * VOCAB + np.maximum(tokens[:, node], 0)
        depths.append(depths[parent] + 1)
    return codes, depths


def _checked_tokens(draws, path, output, accepted_len) -> np.ndarray:
    """Check the form of an output, and return its tokens of the model."""
    label, shape = draws.label, (len(draws.tokens), MAX_NODES)
    assert path.shape == shape, f"{label}: path of shape {path.shape}, expected {shape}"
    assert output.shape == shape, f"{label}: output of shape {output.shape}, expected {shape}"
    steps = np.arange(MAX_NODES)
    accepted, emitted = steps < accepted_len[:, None], steps <= accepted_len[:, None]
    tokens = draws.vocabulary.tokens(output)
    parents = np.append(-1, draws.parents)
    inside = (path >= 0) & (path < len(parents))
    nodes = np.where(accepted & inside, path, 0)
    before = np.column_stack([np.zeros(len(path), dtype=np.int64), nodes[:, :-1]])
    rows = np.arange(len(path))[:, None]
    for wrong, what in (
        ((accepted_len < 0) | (accepted_len > MAX_DEPTH), "accepted_len out of range"),
        (((path >= 0) != accepted).any(-1), "path does not have accepted_len nodes"),
        (((output >= 0) != emitted).any(-1), "not accepted_len + 1 tokens followed by -1"),
        ((accepted & (parents[nodes] != before)).any(-1), "path is not one of the tree"),
        ((accepted & (tokens != draws.tokens[rows, nodes])).any(-1), "output is not on the path"),
    ):
        if wrong.any():
            b = int(wrong.argmax())
            raise AssertionError(
                f"{label}: sequence {b}: {what}: path {path[b].tolist()}, output"
                f" {output[b].tolist()}, accepted_len {accepted_len[b]}"
            )
    return tokens


def _assert_greedy(draws, tokens, accepted_len):
    """Check that greedy sequences emit argmaxes, and stop where no child has the argmax."""
    codes = np.zeros(len(tokens), dtype=np.int64)
    node = np.zeros(len(tokens), dtype=np.int64)
    for i in range(MAX_DEPTH + 1):
        emitted = draws.greedy & (i <= accepted_len)
        best = draws.target.units[i][codes].argmax(-1)
        following = np.zeros_like(node)
        for child, parent in reversed(list(enumerate(draws.parents, 1))):
            fits = (node == parent) & (draws.tokens[:, child] == best)
            following = np.where(fits, child, following)
        goes_on = i < accepted_len
        wrong = emitted & ((tokens[:, i] != best) | (goes_on != (following > 0)))
        if wrong.any():
            b = int(wrong.argmax())
            raise AssertionError(
                f"{draws.label}: greedy sequence {b} with nodes {draws.tokens[b].tolist()} emits"
                f" {tokens[b].tolist()}; number {i} should be {best[b]}, the target's argmax"
            )
        node, codes = following, np.where(emitted, codes * VOCAB + best, 0)


def _assert_joint_distribution(draws, rule, path, tokens, lengths, alpha):
    """Compare the last accepted node and the extra token with the exact distribution of a rule."""
    fixed = draws.sibling_rule == "target_only"
    siblings = tuple(draws.tokens[0, 1:].tolist()) if fixed else draws.sibling_rule
    distribution = np.zeros((MAX_NODES, VOCAB))
    joint = tree_distribution(rule, draws.target, draws.draft, draws.parents, siblings)
    for (nodes, emitted), probability in joint.items():
        distribution[nodes[-1] if nodes else 0, emitted[-1]] += float(probability)
    rows = np.arange(len(path))
    last = np.where(lengths > 1, path[rows, np.maximum(lengths - 2, 0)], 0)
    counts = np.bincount(last * VOCAB + tokens[rows, lengths - 1], minlength=distribution.size)
    assert_counts(
        counts,
        distribution,
        f"{draws.label}, (last accepted node, extra token)",
        alpha,
        lambda cell: divmod(cell, VOCAB),
    )
