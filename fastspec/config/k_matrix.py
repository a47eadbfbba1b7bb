"""The matrix that controls a cascade: how many tokens each drafter writes for which level."""

from collections.abc import Sequence
from typing import Any

from fastspec.config.checks import is_int, require

MAX_DRAFT_TOKENS = 1024  # beyond it a step is a mistake, or no step
KMatrix = tuple[tuple[int, ...], ...]
MAG_TOKENS = 10  # the fewest that MaG writes at a time with mag_surplus; the published constant


def as_k_matrix(value: Any) -> KMatrix:
    """A checked k_matrix: row r requests tokens from each drafter, row 0 for the target.

    Args:
        value: lists or a tensor, n x n for n drafters, biggest first.
    Raises:
        ValueError: not square, an entry that is not an int >= 0, one below the diagonal that is
            not 0, or a first row of zeros.
    """
    rows = value.tolist() if hasattr(value, "tolist") else value
    if not _is_list(rows) or not rows or not all(_is_list(row) for row in rows):
        raise ValueError(f"k_matrix: expected a square list of lists, got {rows!r}")
    if any(len(row) != len(rows) for row in rows):
        shape = [len(row) for row in rows]
        raise ValueError(
            f"k_matrix: expected a square matrix, got {len(rows)} rows of {shape} entries"
        )
    for r, row in enumerate(rows):
        for c, entry in enumerate(row):
            if not is_int(entry) or entry < 0:
                raise ValueError(f"k_matrix: entry [{r}][{c}]: expected an int >= 0, got {entry!r}")
            if c < r and entry:
                raise ValueError(
                    f"k_matrix: entry [{r}][{c}] is below the diagonal: expected 0, got {entry}"
                )
    if not any(rows[0]):
        raise ValueError("k_matrix: the first row requests no tokens")
    return tuple(tuple(int(entry) for entry in row) for row in rows)


def most_draft_tokens(k_matrix: KMatrix, mag_surplus: bool = False) -> int:
    """Maximum number of tokens that the target may have to verify.

    Args:
        mag_surplus: see SpecConfig; every MAG_TOKENS tokens may add up to MAG_TOKENS - 1 more.
    """
    size = len(k_matrix)
    last = MAG_TOKENS if mag_surplus else k_matrix[-1][-1]
    at_once = [0] * size + [last]  # of each level, the last one's under size
    for row in reversed(range(size)):
        needed = most = 0
        for level in range(row, size):
            wanted = k_matrix[row][level]
            needed += wanted
            if wanted:
                most = max(most, needed - 1 + max(1, at_once[level + 1]))
        at_once[row] = most + 1
    counted = at_once[0] - 1
    if not mag_surplus:
        return counted
    counted += last if k_matrix[0][-1] else 0  # the piece that the target gets last
    return counted + counted // MAG_TOKENS * (MAG_TOKENS - 1)


def most_cascade_tokens(spec: Any) -> int:
    """Return the maximum tokens of a proposal of the cascade that a SpecConfig describes."""
    most = most_draft_tokens(spec.cascade_matrix)
    if not spec.mag_surplus:
        return most
    return max(most, min(most_draft_tokens(spec.cascade_matrix, True), MAX_DRAFT_TOKENS))


def check_cascade(spec: Any) -> None:
    """Raise ValueError if a cascade's k_matrix needs too many tokens, or not as many as given."""
    most, count = most_cascade_tokens(spec), spec.num_speculative_tokens
    if most > MAX_DRAFT_TOKENS:
        raise ValueError(
            f"k_matrix: requests up to {most} draft tokens, more than {MAX_DRAFT_TOKENS}"
        )
    expected = f"{most} (from k_matrix) or None"
    require("num_speculative_tokens", count, count in (None, most), expected)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)
