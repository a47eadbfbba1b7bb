"""Counts of which token followed which context, in hash tables on the device."""

import torch
from torch import Tensor

_BUCKETS = 1 << 15
_MULTIPLIER = 6364136223846793005  # of Knuth's 64-bit congruential generator; products wrap around
_SEED = 1442695040888963407
# A bucket stores the best successor seen, as count | recency | fingerprint | token, so the largest
# number is the most frequent one, and among equally frequent ones the latest.
_TOKEN_BITS, _FINGERPRINT_BITS, _RECENCY_BITS, _COUNT_BITS = 24, 13, 16, 10
_FINGERPRINT_AT = _TOKEN_BITS
_RECENCY_AT = _FINGERPRINT_AT + _FINGERPRINT_BITS
_COUNT_AT = _RECENCY_AT + _RECENCY_BITS


class NgramTable:
    """Counts of the tokens after each context of 1 to n tokens, one table for each row.

    With `one_level` only contexts of n tokens are counted. Contexts that share a bucket cost
    accuracy, never correctness: a bucket belongs to the context whose successor was seen most
    often, and matches only that context's fingerprint.
    """

    def __init__(self, max_context: int, one_level: bool = False):
        self.max_context = max_context
        self._shortest = max_context if one_level else 1
        self._counts = torch.empty((0, _BUCKETS), dtype=torch.int32, device="cpu")
        self._best = torch.empty((0, _BUCKETS), dtype=torch.int64, device="cpu")

    def grow(self, num_rows: int, device: torch.device) -> None:
        """Make room by doubling; if memory runs out, neither of the two tables grows."""
        size = len(self._counts)
        if num_rows > size:
            shape = (max(num_rows, 2 * size) - size, _BUCKETS)
            self._counts, self._best = [
                torch.cat([table.to(device), torch.zeros(shape, dtype=table.dtype, device=device)])
                for table in (self._counts, self._best)
            ]

    def clear(self, row: int) -> None:
        """Clear a row."""
        self._counts[row] = 0
        self._best[row] = 0

    def learn(self, rows: Tensor, windows: Tensor, successors: Tensor, recency: Tensor) -> None:
        """Count a token once more as the successor of each suffix of its window.

        Args:
            rows: [N] int64.
            windows: [N, n] int64, the preceding tokens in order, -1 where there is none.
            successors: [N] int64, -1 where there is nothing to count.
            recency: [N] int64, breaks ties between equal counts.
        """
        contexts, usable = self._contexts(windows)
        usable &= (successors >= 0)[:, None]  # unusable ones add 0, so no mask needs a sync
        successors, recency = successors[:, None], recency[:, None]
        pairs = _mixed(contexts * _MULTIPLIER + successors)
        places = rows[:, None] * _BUCKETS
        at = (places + _bucket(pairs)).flatten()
        counts = self._counts.view(-1)
        counts.index_add_(0, at, usable.int().flatten())
        seen = counts[at].long().clamp(max=(1 << _COUNT_BITS) - 1)
        late = recency.clamp(max=(1 << _RECENCY_BITS) - 1) << _RECENCY_AT
        found = (seen.view_as(contexts) << _COUNT_AT) | late | _fingerprint(contexts) | successors
        where = (places + _bucket(contexts)).flatten()
        offered = torch.where(usable, found, 0).flatten()
        self._best.view(-1).scatter_reduce_(0, where, offered, "amax")

    def next_tokens(self, rows: Tensor, windows: Tensor) -> Tensor:
        """Return the most frequent successor of each window's longest known suffix, [N], or -1."""
        contexts, usable = self._contexts(windows)
        found = self._best[rows[:, None], _bucket(contexts)]
        mask = ((1 << _FINGERPRINT_BITS) - 1) << _FINGERPRINT_AT
        known = usable & (found > 0) & ((found & mask) == _fingerprint(contexts))
        sizes = torch.arange(1, self.max_context + 1, device=rows.device)
        longest = torch.where(known, sizes, 0).amax(dim=1)
        tokens = found.gather(1, (longest - 1).clamp(min=0)[:, None])[:, 0]
        return torch.where(longest > 0, tokens & ((1 << _TOKEN_BITS) - 1), -1)

    def guess(self, windows: Tensor, vocab_size: int) -> Tensor:
        """Return an arbitrary but reproducible token after each window, [N]."""
        return (self._contexts(windows)[0][:, -1] >> 1).remainder(vocab_size)

    def _contexts(self, windows: Tensor) -> tuple[Tensor, Tensor]:
        """Return hashes [N, n] of the last 1 to n tokens, and whether that many exist."""
        value = torch.full_like(windows[:, 0], _SEED)
        hashes = []
        for back in range(1, self.max_context + 1):
            value = (value + windows[:, -back] + 1) * _MULTIPLIER
            hashes.append(value)
        usable = (windows >= 0).flip(1).cummin(dim=1).values
        usable[:, : self._shortest - 1] = False
        return _mixed(torch.stack(hashes, dim=1)), usable


def _mixed(value: Tensor) -> Tensor:
    """Mix the bits, because the low bits of a product depend on few bits of its factors."""
    value = (value ^ (value >> 29)) * _MULTIPLIER
    return value ^ (value >> 32)


def _bucket(mixed: Tensor) -> Tensor:
    return mixed & (_BUCKETS - 1)


def _fingerprint(mixed: Tensor) -> Tensor:
    """Return bits that the bucket's number does not use, shifted into place."""
    return ((mixed >> 40) & ((1 << _FINGERPRINT_BITS) - 1)) << _FINGERPRINT_AT
