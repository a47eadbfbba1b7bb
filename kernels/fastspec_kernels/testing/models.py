"""Small language models as tables: a next-token distribution for every prefix."""

from dataclasses import dataclass
from fractions import Fraction

import numpy as np

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class TableModel:
    """A next-token distribution for every prefix up to some length, in integer units.

    Attributes:
        units: units[n] is an integer array [vocab ** n, vocab]; row i belongs to the prefix of n
            tokens that is the number i in base `vocab`. All rows have the same sum.
    """

    units: tuple[np.ndarray, ...]

    @property
    def vocab(self) -> int:
        """Number of tokens."""
        return self.units[0].shape[1]

    @property
    def total(self) -> int:
        """Number of units in a row."""
        return int(self.units[0].sum())

    def row(self, prefix: Tokens) -> list[Fraction]:
        """Look up the exact distribution after a prefix."""
        units = self.units[len(prefix)][encode(prefix, self.vocab)]
        return [Fraction(int(unit), self.total) for unit in units]

    def probs(self, length: int) -> np.ndarray:
        """Return the float64 distributions [vocab ** length, vocab] after prefixes of a length."""
        return self.units[length] / self.total

    def sequence_distribution(self, length: int) -> dict[Tokens, Fraction]:
        """Compute the exact probability of every possible sequence of `length` tokens."""
        distribution = {(): Fraction(1)}
        for _ in range(length):
            distribution = {
                (*prefix, token): probability * share
                for prefix, probability in distribution.items()
                for token, share in enumerate(self.row(prefix))
                if share
            }
        return distribution


def encode(prefix: Tokens, vocab: int) -> int:
    """Read a prefix as a number in base `vocab`."""
    index = 0
    for token in prefix:
        index = index * vocab + token
    return index


def decode(index: int, vocab: int, length: int) -> Tokens:
    """Turn a number in base `vocab` back into the prefix of a given length."""
    return tuple(index // vocab ** (length - 1 - i) % vocab for i in range(length))


def random_model(
    seed: int,
    vocab: int,
    length: int,
    total: int = 8,
    minimum: int = 0,
    tokens: tuple[int, ...] | None = None,
) -> TableModel:
    """Make a model by randomly assigning units to tokens; few units leave many tokens at 0.

    Args:
        seed: the same seed gives the same model.
        vocab: number of tokens.
        length: longest prefix.
        total: units per row.
        minimum: units that every token gets first.
        tokens: the tokens that can get units; None = all.
    Returns:
        The model.
    """
    rng = np.random.default_rng(seed)
    allowed = np.zeros(vocab)
    allowed[list(range(vocab) if tokens is None else tokens)] = 1
    thrown = total - minimum * int(allowed.sum())
    return TableModel(
        tuple(
            rng.multinomial(thrown, allowed / allowed.sum(), size=vocab**n)
            + minimum * allowed.astype(np.int64)
            for n in range(length + 1)
        )
    )
