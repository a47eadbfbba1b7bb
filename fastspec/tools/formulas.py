"""Expected gains of speculation: tokens per target pass, speed-ups, throughput."""

from collections.abc import Iterable, Sequence
from math import prod

from fastspec.config.checks import require, require_int
from fastspec.engine.schedule import Step


def expected_tokens(acceptance_rate: float, num_speculative_tokens: int) -> float:
    """Mean tokens emitted per target pass if each draft token is accepted independently.

    With rate a and K drafts: (1 - a^(K+1)) / (1 - a), which is K + 1 at a = 1. The extra token of
    the pass is included.

    Raises:
        ValueError: a rate outside [0, 1] or a negative K.

    Source: Leviathan et al., 2211.17192, equation 1.
    """
    rate, count = acceptance_rate, num_speculative_tokens
    _check_rate("acceptance_rate", rate)
    require_int("num_speculative_tokens", count, 0)
    return sum(rate**power for power in range(count + 1))


def expected_tokens_by_position(acceptance_by_position: Sequence[float]) -> float:
    """Mean tokens emitted per target pass, from measured rates instead of one for all positions.

    1 + r1 + r1 r2 + ... + r1 r2 ... rK, where r_i is the share of draft tokens at position i that
    are accepted among those whose predecessors were.

    Raises:
        ValueError: a rate outside [0, 1].
    """
    for rate in acceptance_by_position:
        _check_rate("acceptance_by_position", rate)
    num = len(acceptance_by_position)
    return 1 + sum(prod(acceptance_by_position[: count + 1]) for count in range(num))


def acceptance_by_position(steps: Iterable[Step]) -> list[float]:
    """Measured rates for `expected_tokens_by_position`, up to the last position reached.

    At position i: steps that accepted i tokens or more over those that accepted i - 1 or more and
    wanted i. A token that a drafter does not propose counts as not accepted.

    Source: the product-limit estimate of Kaplan and Meier, JASA 53, 1958.
    """
    reached: list[int] = []
    passed: list[int] = []
    for step in steps:
        count = min(step.accepted + 1, step.wanted)
        for counts in (reached, passed):
            counts.extend([0] * (count - len(counts)))
        for place in range(count):
            reached[place] += 1
            passed[place] += place < step.accepted
    return [hits / tries for hits, tries in zip(passed, reached, strict=True)]


def speed_up(acceptance_rate: float, num_speculative_tokens: int, cost_ratio: float) -> float:
    """Expected speed-up over plain decoding: (1 - a^(K+1)) / ((1 - a)(K c + 1)).

    Args:
        acceptance_rate: a, in [0, 1].
        num_speculative_tokens: K >= 0.
        cost_ratio: c, time of one drafting step over that of one target pass, >= 0.
    Raises:
        ValueError: an argument out of range.

    Source: Leviathan et al., 2211.17192, theorem 3.8; the expected walltime improvement factor
    (EWIF) of plain speculative decoding in Chen et al., 2312.11462.
    """
    _check_cost("cost_ratio", cost_ratio)
    tokens = expected_tokens(acceptance_rate, num_speculative_tokens)
    return tokens / (num_speculative_tokens * cost_ratio + 1)


def best_num_speculative_tokens(acceptance_rate: float, cost_ratio: float, limit: int) -> int:
    """The K in 0..limit with the largest expected speed-up; the smallest K on ties.

    Raises:
        ValueError: an argument out of range, see `speed_up`.
    """
    require_int("limit", limit, 0)
    return max(range(limit + 1), key=lambda num: speed_up(acceptance_rate, num, cost_ratio))


def throughput(tokens_per_pass: float, draft_seconds: float, verify_seconds: float) -> float:
    """Tokens per second of one request: E[accepted + 1] / (K t_draft + t_verify(K + 1)).

    Args:
        tokens_per_pass: mean tokens emitted per target pass, including the extra one.
        draft_seconds: of all drafting steps before one target pass, K t_draft.
        verify_seconds: of a target pass over K + 1 tokens.
    Raises:
        ValueError: a negative argument, or no time at all.

    Source: Yan et al., "Decoding Speculative Decoding", 2402.01528.
    """
    _check_cost("tokens_per_pass", tokens_per_pass)
    _check_cost("draft_seconds", draft_seconds)
    require("verify_seconds", verify_seconds, 0 < verify_seconds < float("inf"), "seconds > 0")
    return tokens_per_pass / (draft_seconds + verify_seconds)


def vertical_speed_up(
    rates: tuple[float, float], costs: tuple[float, float], num_reviews: int, num_drafts: int
) -> float:
    """Expected speed-up of a vertical cascade: a drafter whose own text a smaller one drafts.

    The first drafter reviews `num_drafts` = k tokens of the second, and keeps those it accepts and
    one token of its own; that happens `num_reviews` = n times, then the target verifies them all.
    With rates a, b and costs c1, c2: (1 - a phi(a)^n) / ((1 - a)(1 + n c1 + n k c2)), where
    phi(x) = 1 + (x - 1)(1 - (b x)^(k+1)) / (1 - b x) generates the tokens of one review.

    Args:
        rates: a, the target's acceptance of the first drafter's tokens; b, the first drafter's of
            the second's.
        costs: time of one pass of the first drafter, and of the second, over the target's.
        num_reviews: n >= 1.
        num_drafts: k >= 0.
    Raises:
        ValueError: an argument out of range.

    Source: Chen et al., 2312.11462, theorem 4.3.
    """
    _check_pairs(rates, costs)
    require_int("num_reviews", num_reviews, 1)
    require_int("num_drafts", num_drafts, 0)
    (a, b), (first_cost, second_cost) = rates, costs
    generated = 1 + (a - 1) * _geometric(a * b, num_drafts + 1)
    if a == 1:
        tokens = 1 + num_reviews * _geometric(b, num_drafts + 1)
    else:
        tokens = (1 - a * generated**num_reviews) / (1 - a)
    return tokens / (1 + num_reviews * first_cost + num_reviews * num_drafts * second_cost)


def horizontal_speed_up(
    rates: tuple[float, float], costs: tuple[float, float], lengths: tuple[int, int]
) -> float:
    """Expected speed-up of a horizontal cascade: the smaller drafter writes the later tokens.

    The first drafter writes k1 tokens and the second k2 more, accepted by the target at rates a1
    and a2: ((1 - a1^k1) / (1 - a1) + a1^k1 (1 - a2^(k2+1)) / (1 - a2)) / (1 + k1 c1 + k2 c2).

    Args:
        rates: a1 and a2, in [0, 1].
        costs: time of one token of each drafter over that of one target pass, c1 and c2.
        lengths: k1 and k2, >= 0.
    Raises:
        ValueError: an argument out of range.

    Source: Chen et al., 2312.11462.
    """
    _check_pairs(rates, costs)
    for length in lengths:
        require_int("lengths", length, 0)
    (first, second), (num_first, num_second) = rates, lengths
    tokens = _geometric(first, num_first)
    tokens += first**num_first * _geometric(second, num_second + 1)
    return tokens / (1 + num_first * costs[0] + num_second * costs[1])


def _geometric(rate: float, count: int) -> float:
    """1 + rate + ... + rate^(count-1)."""
    return float(count) if rate == 1 else (1 - rate**count) / (1 - rate)


def _check_pairs(rates: tuple[float, float], costs: tuple[float, float]) -> None:
    for rate in rates:
        _check_rate("rates", rate)
    for cost in costs:
        _check_cost("costs", cost)


def _check_rate(name: str, value: float) -> None:
    require(name, value, 0 <= value <= 1, "a rate in [0, 1]")


def _check_cost(name: str, value: float) -> None:
    require(name, value, 0 <= value < float("inf"), "a number >= 0")
