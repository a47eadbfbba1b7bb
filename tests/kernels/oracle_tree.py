"""Independent statement of verify_tree and build_tree, one sequence at a time, with margins."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from .oracle import NO_MARGIN, draw, over_target_vocabulary, remembered, row, zero_margin
from .oracle_chain import prob_of, target_row


class Walk(NamedTuple):
    path: list[int]
    tokens: list[int]
    accepted_len: int
    logprobs: list[float]
    margin: float


class Step(NamedTuple):
    """What is decided at one node: the accepted child, else the weights of the extra token."""

    child: int | None
    weights: np.ndarray
    margin: float
    unit: float  # what an error of 1 in a probability makes of the weights


@dataclass(frozen=True)
class Tree:
    """The arguments of verify_tree that concern one sequence, in float64."""

    target_logits: np.ndarray  # [rows, V]
    tokens: list[int]  # [N]
    parents: list[int]  # [N]
    samples: list[float]  # [N + 1]
    sibling_rule: str
    draft_logits: np.ndarray | None = None  # [N, draft V]
    params: dict = field(default_factory=dict)
    draft_token_map: list[int] | None = None
    token_bitmask: np.ndarray | None = None  # [rows, words]


FAILED = Walk([], [], -1, [], NO_MARGIN)


@remembered
def walk(tree: Tree) -> Walk:
    """Go from the root to an accepted child for as long as there is one, then draw one token."""
    num = min(len(tree.target_logits), len(tree.tokens))
    if num == 0:
        return Walk([], [], 0, [], NO_MARGIN)
    greedy = tree.params.get("temperature") == 0
    node, path, tokens, logprobs, margin = 0, [], [], [], NO_MARGIN
    while True:
        children = [c for c in range(node + 1, num) if tree.parents[c] == node]
        target, draft, draft_margin = target_row(tree, node), None, NO_MARGIN
        if target is None:
            return FAILED
        if children and not greedy and tree.sibling_rule != "target_only":
            draft_row = row(tree.draft_logits[node], **tree.params)
            if draft_row is None:
                return FAILED
            vocab = tree.target_logits.shape[1]
            draft = over_target_vocabulary(draft_row.probs, vocab, tree.draft_token_map)
            draft_margin = draft_row.margin
        step = _decide(tree, node, children, target, draft)
        margin = min(margin, target.margin, draft_margin, step.margin)
        if step.child is None:
            break
        path.append(step.child)
        tokens.append(tree.tokens[step.child])
        logprobs.append(float(target.logprobs[tokens[-1]]))
        node = step.child
    extra = draw(step.weights, tree.samples[len(tree.tokens)])
    if not greedy:
        margin = min(margin, extra.margin / step.unit)
    tokens.append(extra.token)
    logprobs.append(float(target.logprobs[extra.token]))
    return Walk(path, tokens, len(path), logprobs, margin)


def _decide(tree, node, children, target, draft) -> Step:
    if tree.params.get("temperature") == 0:
        best = int(target.probs.argmax())
        matching = [child for child in children if tree.tokens[child] == best]
        return Step(matching[0] if matching else None, target.probs, NO_MARGIN, 1.0)
    if tree.sibling_rule == "target_only":
        return _target_only(tree, node, children, target.probs)
    return _drawn_siblings(tree, node, children, target.probs, draft)


def _target_only(tree, node, children, probs) -> Step:
    """One number against the cumulative probability of the distinct children."""
    sample, cumulative, margin, seen = tree.samples[node], 0.0, NO_MARGIN, set()
    for child in children:
        token = tree.tokens[child]
        share = prob_of(probs, token)
        if token in seen or share == 0:
            continue
        seen.add(token)
        cumulative += share
        margin = min(margin, abs(sample - cumulative))
        if sample < cumulative:
            return Step(child, probs, margin, 1.0)
    rest = np.array([0.0 if token in seen else share for token, share in enumerate(probs)])
    if rest.sum() > 0:
        return Step(None, rest, min(margin, rest.sum()), 1.0)
    return Step(None, probs, margin, 1.0)


def _drawn_siblings(tree, node, children, probs, draft) -> Step:
    """Every child against what is left of the target; `*_unit` is how much errors have grown."""
    target, signed, margin = probs, probs, NO_MARGIN
    target_unit = draft_unit = 1.0
    for child in children:
        token = tree.tokens[child]
        coin = tree.samples[child] * prob_of(draft, token)
        share = prob_of(target, token)
        unit = max(target_unit, draft_unit)
        if prob_of(probs, token) > 0:
            margin = min(margin, abs(coin - prob_of(signed, token)) / unit)
        if coin < share:
            return Step(child, target, margin, target_unit)
        rest = np.maximum(target - draft, 0)
        if rest.sum() > 0:
            margin = min(margin, rest.sum() / unit)
            signed = (target - draft) / rest.sum()
            target, target_unit = rest / rest.sum(), unit / rest.sum()
        else:
            rows = tree.target_logits[node], tree.draft_logits[node]
            margin = min(margin, zero_margin(target, *rows))
        if tree.sibling_rule == "without_replacement" and 0 <= token < len(draft):
            draft = np.where(np.arange(len(draft)) == token, 0.0, draft)
            if draft.sum() > 0:
                draft, draft_unit = draft / draft.sum(), draft_unit / draft.sum()
    return Step(None, target, margin, target_unit)


def ancestors(parents: list[int]) -> list[list[int] | None]:
    """For each node the nodes from itself up to the root; None where it is absent."""
    chains: list[list[int] | None] = []
    for node, parent in enumerate(parents):
        above = chains[parent] if node > 0 and 0 <= parent < node else None
        chains.append([0] if node == 0 else None if above is None else [node, *above])
    return chains
