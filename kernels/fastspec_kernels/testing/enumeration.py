"""Exact proofs on small vocabularies that acceptance rules preserve the target's distribution."""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import partial

import numpy as np

from fastspec_kernels.testing.exact import Number, outcome_distribution
from fastspec_kernels.testing.models import TableModel, Tokens, random_model
from fastspec_kernels.testing.rules import ChainRule, Emitted, TreeRule

SIBLING_RULES = ("target_only", "without_replacement", "with_replacement")
CHAIN_SIZES = ((2, 1), (2, 4), (3, 2), (3, 3), (4, 2))  # vocabulary, proposals
TOTALS = (4, 8)  # units in a row: one model with many zeros, one with few
# Parents of the nodes after the root.
TREE_SHAPES = ((0,), (0, 0), (0, 0, 0), (0, 1), (0, 0, 1, 1), (0, 0, 2, 3, 3))


def chain_distribution(
    rule: ChainRule,
    target: TableModel,
    draft: TableModel,
    num_proposals: int,
    point_mass: bool = False,
) -> dict[Tokens, Number]:
    """Compute the exact joint distribution of the tokens that one step of a chain emits.

    As accepted_len is one less than the number of tokens, this is the joint distribution of both.

    Args:
        rule: see `rules.standard`.
        target, draft: models with rows for prefixes of up to `num_proposals` tokens.
        num_proposals: number of proposals, drawn from the draft before any is verified.
        point_mass: tell the rule that each proposal is a point mass.
    Returns:
        Emitted tokens to probability; 0 for outcomes that only a uniform number of exactly 0 gives.
    """
    distribution: dict[Tokens, Number] = defaultdict(Fraction)
    for proposals, probability in draft.sequence_distribution(num_proposals).items():
        before = [proposals[:i] for i in range(num_proposals + 1)]
        targets = [target.row(prefix) for prefix in before]
        drafts = [draft.row(prefix) for prefix in before[:-1]]
        if point_mass:
            drafts = [[Fraction(x == token) for x in range(draft.vocab)] for token in proposals]
        verify = partial(rule, targets, drafts, proposals)
        for emitted, share in outcome_distribution(verify, num_proposals + 1).items():
            distribution[emitted] += probability * share
    return dict(distribution)


def tree_distribution(
    rule: TreeRule,
    target: TableModel,
    draft: TableModel,
    parents: Tokens,
    siblings: str | Tokens,
) -> dict[Emitted, Number]:
    """Compute the exact joint distribution of accepted nodes and emitted tokens of one tree step.

    Args:
        rule: see `rules.target_only`.
        target, draft: models with rows for prefixes up to the depth of the tree.
        parents: parents of the nodes after the root, which is node 0.
        siblings: "without_replacement" or "with_replacement": how siblings are drawn from the draft
            row of their parent. Or the tokens of the nodes after the root, if they are fixed.
    Returns:
        (accepted nodes, emitted tokens) to probability, see `chain_distribution`.
    """
    distribution: dict[Emitted, Number] = defaultdict(Fraction)
    for tokens, probability in _token_choices(draft, parents, siblings):
        before = _prefixes_of_nodes(tokens, parents)
        # A node without a token (nothing was left to draw) is never reached.
        targets = [target.row(prefix if -1 not in prefix else ()) for prefix in before]
        drafts = [draft.row(prefix if -1 not in prefix else ()) for prefix in before]
        verify = partial(rule, targets, drafts, (-1, *tokens), (-1, *parents))
        for emitted, share in outcome_distribution(verify, len(parents) + 2).items():
            distribution[emitted] += probability * share
    return dict(distribution)


def completed(
    distribution: dict[Tokens, Number], target: TableModel, length: int
) -> dict[Tokens, Number]:
    """Continue emitted tokens by plain sampling from the target, up to `length` tokens.

    Args:
        distribution: emitted tokens to probability.
        target: the model they should follow.
        length: at least the length of the longest key.
    Returns:
        Sequences of `length` tokens to probability.
    """
    whole: dict[Tokens, Number] = defaultdict(Fraction)
    pending = list(distribution.items())
    while pending:
        prefix, probability = pending.pop()
        if len(prefix) == length:
            whole[prefix] += probability
        else:
            shares = enumerate(target.row(prefix))
            pending += [((*prefix, token), probability * share) for token, share in shares if share]
    return dict(whole)


def assert_exact_chain(
    rule: ChainRule, *, point_mass: bool = False, lenience: Fraction | int = 1, num_models: int = 3
) -> None:
    """Prove by enumeration that the output of a rule for chains has the target's distribution.

    Runs over random pairs of models whose distributions differ from prefix to prefix and contain
    many zeros. With a lenience above 1 only its bound is checked: a sequence of n emitted tokens is
    at most lenience ** n times as probable as under the target.

    Args:
        rule: see `rules.standard`.
        point_mass: pass one-hot draft rows to the rule, as for point masses.
        lenience: lenience of the rule, if any.
        num_models: pairs of models for each size.
    Raises:
        AssertionError: names the models, the sequence, its probability and the expected one.
    """
    for vocab, num in CHAIN_SIZES:
        for seed in range(num_models):
            total = TOTALS[seed % 2]
            target = random_model(2 * seed, vocab, num, total)
            draft = random_model(2 * seed + 1, vocab, num, total)
            distribution = chain_distribution(rule, target, draft, num, point_mass)
            label = f"V={vocab} K={num} models {2 * seed} and {2 * seed + 1}"
            if lenience == 1:
                _assert_target_distribution(distribution, target, num + 1, label)
            else:
                _assert_bound(distribution, target, lenience, label)


def assert_exact_tree(
    rule: TreeRule, siblings: str, *, vocab: int = 3, num_models: int = 3
) -> None:
    """Prove by enumeration that the output of a rule for trees has the target's distribution.

    Args:
        rule: see `rules.target_only`.
        siblings: "without_replacement" or "with_replacement", see `tree_distribution`, or
            "target_only": tokens are fixed, and may repeat.
        vocab: number of tokens.
        num_models: pairs of models, and for "target_only" choices of tokens, per tree.
    Raises:
        AssertionError: names the tree, the models, the sequence, its probability and the expected
            one.
    """
    if siblings not in SIBLING_RULES:
        raise ValueError(f"siblings: expected one of {SIBLING_RULES}, got {siblings!r}")
    for parents, seed in itertools.product(TREE_SHAPES, range(num_models)):
        depth = max(map(len, _prefixes_of_nodes((0,) * len(parents), parents)))
        total = TOTALS[seed % 2]
        target = random_model(2 * seed, vocab, depth, total)
        draft = random_model(2 * seed + 1, vocab, depth, total)
        fixed = np.random.default_rng(seed).integers(vocab, size=(num_models, len(parents)))
        for choice in fixed.tolist() if siblings == "target_only" else [siblings]:
            distribution: dict[Tokens, Number] = defaultdict(Fraction)
            joint = tree_distribution(rule, target, draft, parents, choice)
            for (_, tokens), share in joint.items():
                distribution[tokens] += share
            label = (
                f"parents of nodes 1.. {parents}, their tokens {choice}, V={vocab},"
                f" models {2 * seed} and {2 * seed + 1}"
            )
            _assert_target_distribution(distribution, target, depth + 1, label)


def _assert_target_distribution(distribution, target, length, label):
    for tokens in distribution:
        possible = all(target.row(tokens[:i])[token] > 0 for i, token in enumerate(tokens))
        assert possible, f"{label}: emits {tokens}, which the target never does"
    whole, wanted = completed(distribution, target, length), target.sequence_distribution(length)
    worst = max(wanted, key=lambda tokens: abs(whole.get(tokens, 0) - wanted[tokens]))
    seen = whole.get(worst, 0)
    assert seen == wanted[worst], (
        f"{label}: {worst} has probability {seen} = {float(seen):.6f}, the target has"
        f" {wanted[worst]} = {float(wanted[worst]):.6f}"
    )


def _assert_bound(distribution, target, lenience, label):
    assert sum(distribution.values()) == 1, label
    longest = max(map(len, distribution))
    for length in range(1, longest + 1):
        shares: dict[Tokens, Number] = defaultdict(Fraction)
        for tokens, share in distribution.items():
            if len(tokens) >= length:
                shares[tokens[:length]] += share
        wanted = target.sequence_distribution(length)
        for tokens, share in shares.items():
            bound = lenience**length * wanted.get(tokens, 0)
            assert share <= bound, (
                f"{label}: {tokens} is emitted with probability {share} = {float(share):.6f}, more"
                f" than {bound} = {float(bound):.6f}, lenience {lenience} per token"
            )


def _prefixes_of_nodes(tokens: Sequence[int], parents: Sequence[int]) -> list[Tokens]:
    """Return the tokens on the path to each node; both arguments exclude the root, node 0."""
    before: list[Tokens] = [()]
    for token, parent in zip(tokens, parents, strict=True):
        before.append((*before[parent], token))
    return before


def _token_choices(
    draft: TableModel, parents: Tokens, siblings: str | Sequence[int]
) -> Iterator[tuple[Tokens, Fraction]]:
    """Yield every assignment of tokens to the nodes after the root; -1 if none is left to draw."""
    if not isinstance(siblings, str):
        yield tuple(siblings), Fraction(1)
        return
    pending: list[tuple[Tokens, Fraction]] = [((), Fraction(1))]
    while pending:
        tokens, probability = pending.pop()
        num = len(tokens)
        if num == len(parents):
            yield tokens, probability
            continue
        before = _prefixes_of_nodes(tokens, parents[:num])[parents[num]]
        row = [Fraction(0)] * draft.vocab if -1 in before else draft.row(before)
        if siblings == "without_replacement":
            for token, parent in zip(tokens, parents, strict=False):
                if parent == parents[num] and token >= 0:
                    row[token] = Fraction(0)
        if not sum(row):
            pending.append(((*tokens, -1), probability))
        for token, share in enumerate(row):
            if share:
                pending.append(((*tokens, token), probability * share / sum(row)))
