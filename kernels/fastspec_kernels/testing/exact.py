"""Exact outcome distributions of functions that only compare uniform numbers."""

from collections.abc import Callable, Hashable, Sequence
from fractions import Fraction
from numbers import Rational
from typing import NamedTuple, TypeVar

Outcome = TypeVar("Outcome", bound=Hashable)
Number = int | float | Fraction


class Interval(NamedTuple):
    """The interval that a uniform number is known to be in; a single point has both ends closed."""

    low: Number
    high: Number
    low_closed: bool = True
    high_closed: bool = False

    def is_empty(self) -> bool:
        """Whether it contains no number."""
        closed = self.low_closed and self.high_closed
        return self.low > self.high or (self.low == self.high and not closed)

    def split(self, bound: Number, inclusive: bool) -> tuple["Interval", "Interval"]:
        """Return the parts below and above `bound`, which is in the lower one if inclusive."""
        high, high_closed = min((self.high, self.high_closed), (bound, inclusive))
        low, low_closed = self.low, self.low_closed
        if bound > low or (bound == low and inclusive):
            low, low_closed = bound, not inclusive
        below = Interval(self.low, high, self.low_closed, high_closed)
        return below, Interval(low, self.high, low_closed, self.high_closed)


class Coin:
    """A uniform number in [0, 1), shifted and scaled, which can be compared but not read.

    Addition, subtraction and multiplication with numbers give another Coin; comparing it with a
    number, or with a Coin made from the same uniform number, gives a plain bool.
    `outcome_distribution` explores every possible answer once.
    """

    def __init__(self, path: "_Path", index: int, slope: Number = 1, offset: Number = 0):
        """Represent slope * (uniform number `index` of the path) + offset."""
        self._path, self._index, self._slope, self._offset = path, index, slope, offset

    def _linear(self, slope: Number, offset: Number) -> "Coin":
        return Coin(self._path, self._index, slope, offset)

    def __neg__(self) -> "Coin":
        """Negate."""
        return self * -1

    def __mul__(self, factor: Number) -> "Coin":
        """Scale by a number."""
        _refuse_coin(factor)
        return self._linear(self._slope * factor, self._offset * factor)

    def __add__(self, shift: Number) -> "Coin":
        """Shift by a number."""
        _refuse_coin(shift)
        return self._linear(self._slope, self._offset + shift)

    def __sub__(self, shift: Number) -> "Coin":
        """Shift by the negative of a number."""
        return self + (-shift)

    def __rsub__(self, other: Number) -> "Coin":
        """Subtract from a number."""
        return self * -1 + other

    def __truediv__(self, divisor: Number) -> "Coin":
        """Scale by the reciprocal of a number."""
        _refuse_coin(divisor)
        return self._linear(_ratio(self._slope, divisor), _ratio(self._offset, divisor))

    __rmul__, __radd__ = __mul__, __add__

    def __lt__(self, other: "Coin | Number") -> bool:
        """Decide whether it is below."""
        return self._is_below(other, inclusive=False)

    def __le__(self, other: "Coin | Number") -> bool:
        """Decide whether it is not above."""
        return self._is_below(other, inclusive=True)

    def __gt__(self, other: "Coin | Number") -> bool:
        """Decide whether it is above."""
        return not self._is_below(other, inclusive=True)

    def __ge__(self, other: "Coin | Number") -> bool:
        """Decide whether it is not below."""
        return not self._is_below(other, inclusive=False)

    def __eq__(self, other: object) -> bool:
        """Decide whether it is neither below nor above."""
        if not isinstance(other, Coin | int | float | Fraction):
            return NotImplemented
        return self >= other and self <= other

    # Two Coins that compare equal need not stay equal.
    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __bool__(self) -> bool:
        """Refuse, because the value itself is unknown."""
        raise TypeError("a uniform number has no truth value here, compare it with something")

    def _is_below(self, other: "Coin | Number", inclusive: bool) -> bool:
        slope, bound = self._slope, -self._offset
        if isinstance(other, Coin):
            if other._index != self._index:
                raise TypeError("two different uniform numbers cannot be compared exactly")
            slope, bound = slope - other._slope, bound + other._offset
        else:
            bound = bound + other
        if slope == 0:
            return bound >= 0 if inclusive else bound > 0
        if slope > 0:
            return self._path.is_below(self._index, _ratio(bound, slope), inclusive)
        return not self._path.is_below(self._index, _ratio(bound, slope), not inclusive)


def _refuse_coin(operand: object) -> None:
    if isinstance(operand, Coin):
        raise TypeError(
            "only sums and multiples of one uniform number with plain numbers are exact"
        )


class _Path:
    """One run of the function: the answers given, and those left for other runs."""

    def __init__(self, script: tuple[bool, ...], num_uniforms: int):
        self.script, self.answers = script, ()
        self.intervals = [Interval(Fraction(0), Fraction(1))] * num_uniforms
        self.untried: list[tuple[bool, ...]] = []

    def is_below(self, index: int, bound: Number, inclusive: bool) -> bool:
        below, above = self.intervals[index].split(bound, inclusive)
        if below.is_empty() or above.is_empty():
            return above.is_empty()
        if len(self.answers) < len(self.script):
            answer = self.script[len(self.answers)]
        else:
            answer = True
            self.untried.append((*self.answers, False))
        self.answers = (*self.answers, answer)
        self.intervals[index] = below if answer else above
        return answer

    def probability(self) -> Number:
        product = Fraction(1)
        for interval in self.intervals:
            product = product * (interval.high - interval.low)
        return product


def outcome_distribution(
    function: Callable[[Sequence[Coin]], Outcome], num_uniforms: int
) -> dict[Outcome, Number]:
    """Compute the exact probability of each possible result of a function of uniform numbers.

    The function runs once per possible combination of comparison results; the uniform numbers are
    independent, each in [0, 1), and may be used more than once. An outcome that occurs only at
    single points (for example a number of exactly 0) is reported with probability 0, because a
    float generator does return such points.

    Args:
        function: takes a list of `num_uniforms` Coins and returns a hashable value; must not depend
            on anything else that is random.
        num_uniforms: number of uniform numbers passed to the function.
    Returns:
        Outcome to probability, a Fraction if the function uses only integers and Fractions.
    Raises:
        TypeError: the function compares two different uniform numbers, or uses one as a truth
            value.
    """
    distribution: dict[Outcome, Number] = {}
    pending: list[tuple[bool, ...]] = [()]
    while pending:
        path = _Path(pending.pop(), num_uniforms)
        outcome = function([Coin(path, index) for index in range(num_uniforms)])
        pending.extend(path.untried)
        distribution[outcome] = distribution.get(outcome, 0) + path.probability()
    return distribution


def _ratio(numerator: Number, denominator: Number) -> Number:
    """Divide exactly if both numbers are rational."""
    if isinstance(numerator, Rational) and isinstance(denominator, Rational):
        return Fraction(numerator) / Fraction(denominator)
    return numerator / denominator
