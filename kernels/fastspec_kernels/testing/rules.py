"""The acceptance rules in plain Python, for fractions and floats alike: an executable definition.

A distribution is a sequence of weights indexed by token. Rules for chains take one row of target
and draft per proposal (the target has one more row), the proposals, and one uniform number per
proposal plus one for the extra token; they return the tokens to emit, of which all but the last are
accepted proposals. Rules for trees take rows indexed by node, the tokens and parents of the nodes,
and one uniform number per node plus one; they return the accepted nodes and the tokens to emit.
"""

from collections.abc import Callable, Sequence
from typing import Any

# Fractions, floats or exact.Coin: anything with arithmetic and ordering.
Row = Sequence[Any]
ChainRule = Callable[[Sequence[Row], Sequence[Row], Sequence[int], Sequence[Any]], tuple[int, ...]]
Emitted = tuple[tuple[int, ...], tuple[int, ...]]
TreeRule = Callable[
    [Sequence[Row], Sequence[Row], Sequence[int], Sequence[int], Sequence[Any]], Emitted
]


def standard(
    target: Sequence[Row],
    draft: Sequence[Row],
    proposals: Sequence[int],
    uniforms: Sequence[Any],
    lenience: Any = 1,
) -> tuple[int, ...]:
    """Accept each proposal while uniform * draft < lenience * target; exact if lenience is 1.

    Args:
        target, draft: rows of the two models; a point mass has a one-hot draft row.
        proposals: the tokens drawn from the draft rows, in order.
        uniforms: one number per proposal, and one for the extra token.
        lenience: at least 1; no token becomes more than `lenience` times as probable as under the
            target.
    Returns:
        The tokens to emit.
    """
    for i, token in enumerate(proposals):
        if not uniforms[i] * weight(draft[i], token) < lenience * weight(target[i], token):
            extra = inverse_cdf(residual(target[i], draft[i], lenience), uniforms[-1])
            return (*proposals[:i], extra)
    return (*proposals, inverse_cdf(target[len(proposals)], uniforms[-1]))


def block(
    target: Sequence[Row],
    draft: Sequence[Row],
    proposals: Sequence[int],
    uniforms: Sequence[Any],
) -> tuple[int, ...]:
    """Accept the longest prefix whose own test passes (block verification, arXiv 2403.10444).

    Args:
        target, draft, proposals, uniforms: see `standard`; rows must be normalised.
    Returns:
        The tokens to emit.
    """
    num, scales = len(proposals), [1]
    for i, token in enumerate(proposals):
        joint = scales[-1] * weight(target[i], token)
        share = weight(draft[i], token)
        ratio = 0 if joint == 0 else 1 if share == 0 else joint / share
        scales.append(min(1, ratio))
    for length in range(num, 0, -1):
        scale = scales[length]
        rest, whole = scale, 1
        if length < num:
            rest = sum(positive_part(target[length], draft[length], scale))
            whole = rest + 1 - scale
        if whole == 0 or uniforms[length - 1] * whole < rest:
            break
    else:
        length = 0
    if length == num:
        return (*proposals, inverse_cdf(target[num], uniforms[-1]))
    extra = inverse_cdf(residual(target[length], draft[length], scales[length]), uniforms[-1])
    return (*proposals[:length], extra)


def target_only(
    target: Sequence[Row],
    draft: Sequence[Row],
    tokens: Sequence[int],
    parents: Sequence[int],
    uniforms: Sequence[Any],
) -> Emitted:
    """Compare one uniform number per node with the cumulative target weight of its children.

    Exact for children chosen independently of the uniform numbers; a child that repeats the token
    of an earlier sibling is skipped.

    Args:
        target: rows indexed by node.
        draft: not read.
        tokens, parents: one per node; node 0 is the root, children are visited in index order.
        uniforms: one number per node, used to decide among its children, and one for the extra
            token.
    Returns:
        The accepted nodes, and the tokens to emit.
    """

    def decide(node, children):
        seen, cumulative = set(), 0
        for child in children:
            token = tokens[child]
            share = weight(target[node], token)
            if token not in seen:
                cumulative = cumulative + share
                if share > 0 and uniforms[node] < cumulative:
                    return child, None
            seen.add(token)
        return None, without(target[node], seen)

    return _walk(target, tokens, parents, uniforms, decide)


def without_replacement(
    target: Sequence[Row],
    draft: Sequence[Row],
    tokens: Sequence[int],
    parents: Sequence[int],
    uniforms: Sequence[Any],
) -> Emitted:
    """Test every child against the remainders of both models; for siblings without replacement.

    Args:
        target, draft: rows indexed by node; the children of a node were drawn from its draft row,
            each without the tokens of its earlier siblings.
        tokens, parents: see `target_only`.
        uniforms: one number per node, used to test the node, and one for the extra token.
    Returns:
        The accepted nodes, and the tokens to emit.
    """
    return _drawn_siblings(target, draft, tokens, parents, uniforms, replaced=False)


def with_replacement(
    target: Sequence[Row],
    draft: Sequence[Row],
    tokens: Sequence[int],
    parents: Sequence[int],
    uniforms: Sequence[Any],
) -> Emitted:
    """Test every child against the remainder of the target; for siblings drawn independently.

    Args:
        target, draft, tokens, parents, uniforms: see `without_replacement`, except that the
            siblings were drawn independently of each other.
    Returns:
        The accepted nodes, and the tokens to emit.
    """
    return _drawn_siblings(target, draft, tokens, parents, uniforms, replaced=True)


def _drawn_siblings(target, draft, tokens, parents, uniforms, replaced) -> Emitted:
    def decide(node, children):
        left, drawn_from = target[node], draft[node]
        for child in children:
            token = tokens[child]
            if uniforms[child] * weight(drawn_from, token) < weight(left, token):
                return child, None
            left = normalised(residual(left, drawn_from))
            if not replaced:
                rest = [0 if x == token else share for x, share in enumerate(drawn_from)]
                drawn_from = normalised(rest) if sum(rest) > 0 else rest
        return None, left

    return _walk(target, tokens, parents, uniforms, decide)


def _walk(target, tokens, parents, uniforms, decide) -> Emitted:
    """Walk from the root to accepted children until `decide` gives weights for the extra token."""
    node, path, emitted = 0, (), ()
    while True:
        children = [c for c in range(node + 1, len(tokens)) if parents[c] == node]
        child, weights = decide(node, children) if children else (None, target[node])
        if child is None:
            return path, (*emitted, inverse_cdf(weights, uniforms[-1]))
        node, path, emitted = child, (*path, child), (*emitted, tokens[child])


def inverse_cdf(weights: Row, uniform: Any) -> int:
    """Return the lowest token whose cumulative weight exceeds the uniform number times the total.

    Args:
        weights: non-negative, at least one positive.
        uniform: in [0, 1).
    Returns:
        A token of positive weight.
    """
    bound, cumulative, last = uniform * sum(weights), 0, 0
    for token, share in enumerate(weights):
        cumulative = cumulative + share
        if share > 0 and bound < cumulative:
            return token
        last = token if share > 0 else last
    return last  # rounding of floats left nothing above the bound


def residual(target: Row, draft: Row, scale: Any = 1) -> Row:
    """Subtract the draft from the scaled target; the target itself if nothing remains.

    Args:
        target, draft: rows of weights.
        scale: factor of the target.
    Returns:
        A row of weights, not normalised.
    """
    rest = positive_part(target, draft, scale)
    return rest if sum(rest) > 0 else target


def positive_part(target: Row, draft: Row, scale: Any = 1) -> Row:
    """Compute max(scale * target - draft, 0) for each token.

    Args:
        target, draft: rows of weights.
        scale: factor of the target.
    Returns:
        A row of weights, possibly all zero.
    """
    return [max(scale * t - d, 0) for t, d in zip(target, draft, strict=True)]


def weight(row: Row, token: int) -> Any:
    """Look up the weight of a token; 0 outside the vocabulary."""
    return row[token] if 0 <= token < len(row) else 0


def normalised(row: Row) -> Row:
    """Divide a row by its sum."""
    total = sum(row)
    return [share / total for share in row]


def without(row: Row, tokens: set[int]) -> Row:
    """Zero some tokens of a row; the row itself if nothing would remain."""
    rest = [0 if token in tokens else share for token, share in enumerate(row)]
    return rest if sum(rest) > 0 else row
