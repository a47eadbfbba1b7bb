"""The acceptance rule of one position as a pure function, and broken variants of it.

Each takes the probabilities of the target and the draft (a list indexed by token), the proposal and
two uniform numbers, one for the decision and one for the extra token, and returns the token to emit
and whether it is the accepted proposal. They work on integers, fractions and floats alike, as long
as both lists have the same total.
"""

from collections.abc import Sequence


def standard(target, draft, token, decision, extra):
    """The rule of verify_chain."""
    if decision * draft[token] < target[token]:
        return token, True
    return inverse_cdf(residual(target, draft), extra), False


def without_subtraction(target, draft, token, decision, extra):
    """Draws the token after a rejection from the target itself."""
    if decision * draft[token] < target[token]:
        return token, True
    return inverse_cdf(target, extra), False


def models_swapped(target, draft, token, decision, extra):
    """Compares the wrong way round."""
    if decision * target[token] < draft[token]:
        return token, True
    return inverse_cdf(residual(target, draft), extra), False


def shared_uniform(target, draft, token, decision, extra):
    """Uses the number of the decision again for the extra token."""
    return standard(target, draft, token, decision, decision)


def not_strict(target, draft, token, decision, extra):
    """Accepts on equality, so a number of 0 accepts a token of probability 0."""
    if decision * draft[token] <= target[token]:
        return token, True
    return inverse_cdf(residual(target, draft), extra), False


def drawn_again(target, draft, token, decision, extra):
    """For certain drafts: matches a sample of the target, but emits another one on a mismatch."""
    if inverse_cdf(target, decision) == token:
        return token, True
    return inverse_cdf(target, extra), False


def always_accepted(target, draft, token, decision, extra):
    """Accepts whatever the target can emit at all."""
    if target[token] > 0:
        return token, True
    return inverse_cdf(residual(target, draft), extra), False


def residual(target, draft):
    """The part of the target that the draft does not cover; the target if it covers all."""
    rest = [max(t - d, 0) for t, d in zip(target, draft, strict=True)]
    return rest if sum(rest) > 0 else target


def inverse_cdf(weights: Sequence, sample) -> int:
    """Lowest index whose cumulative weight exceeds sample times the total."""
    bound, cumulative = sample * sum(weights), 0
    for index, weight in enumerate(weights):
        cumulative += weight
        if cumulative > bound:
            return index
    raise AssertionError("no weight")
