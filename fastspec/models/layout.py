"""How a packed forward pass is laid out: by the host in lists, on the device in two buffers."""

from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from torch import Tensor

from fastspec.models.paged_model import KVCache, PagedStep, Span


class PassShape(NamedTuple):
    """Sizes of a forward pass."""

    batch: int  # B sequences
    num_tokens: int  # T, packed
    num_rows: int  # R, whose logits are kept; 0 where those of all are
    width: int  # M blocks in a row of the block table

    @property
    def wide_size(self) -> int:
        """Entries of the int64 buffer: positions, slots, rows."""
        return 2 * self.num_tokens + self.num_rows

    @property
    def narrow_size(self) -> int:
        """Entries of the int32 buffer: context lengths, prefix sums, prompt lengths, tables."""
        return 3 * self.batch + 1 + self.batch * self.width


@dataclass(frozen=True)
class PassLayout:
    """One pass as the host knows it.

    Attributes:
        positions: [T] of the tokens in their sequences.
        slots: [T] in the cache, -1 for a token that is not written.
        rows: [R] whose logits are kept; empty where those of all are.
        counts: [B] tokens of each sequence.
        context_lens: [B] tokens in the cache, those of this pass included.
        prompt_lens: [B] see `RotaryLengths`.
        tables: [B] rows of M block ids.
    """

    positions: list[int]
    slots: list[int]
    rows: list[int]
    counts: list[int]
    context_lens: list[int]
    prompt_lens: list[int]
    tables: list[list[int]]

    @classmethod
    def of(cls, spans: list[Span], rows: list[int], block_size: int) -> "PassLayout":
        """The tokens of the spans, one span after another."""
        positions, slots = [], []
        for span in spans:
            table, tokens = span.block_table, range(span.start, span.start + span.count)
            positions += tokens
            slots += [table[t // block_size] * block_size + t % block_size for t in tokens]
        counts = [span.count for span in spans]
        context_lens = [span.start + span.count for span in spans]
        prompt_lens = [span.prompt_len for span in spans]
        tables = block_tables(spans, block_size)
        return cls(positions, slots, rows, counts, context_lens, prompt_lens, tables)

    @property
    def shape(self) -> PassShape:
        width = len(self.tables[0])
        return PassShape(len(self.counts), len(self.positions), len(self.rows), width)

    def padded(self, shape: PassShape, most_tokens: int) -> "PassLayout":
        """The same pass in larger sizes.

        Added tokens belong to added sequences, at most `most_tokens` to each. These write nothing
        and see only what lies in block 0, so every kernel takes them for sequences like others, and
        no row of the pass itself depends on them.
        """
        missing = shape.num_tokens - len(self.positions)
        added, left = [], missing
        for _ in range(shape.batch - len(self.counts)):
            added.append(min(left, most_tokens))
            left -= added[-1]
        if left:
            raise ValueError(f"most_tokens: {left} of {missing} added tokens find no sequence")
        tables = [table + [-1] * (shape.width - len(table)) for table in self.tables]
        return PassLayout(
            self.positions + [0] * missing,
            self.slots + [-1] * missing,
            self.rows + [0] * (shape.num_rows - len(self.rows)),
            self.counts + added,
            self.context_lens + added,
            self.prompt_lens + [0] * len(added),
            tables + [[0] * shape.width for _ in added],
        )

    def wide(self) -> list[int]:
        """Values of the int64 buffer."""
        return self.positions + self.slots + self.rows

    def narrow(self) -> list[int]:
        """Values of the int32 buffer."""
        cu_rows = accumulate(self.counts, initial=0)
        blocks = (block for table in self.tables for block in table)
        return [*self.context_lens, *cu_rows, *self.prompt_lens, *blocks]


class DevicePass(NamedTuple):
    """One pass on the device: positions [T], rows [R], and what attention needs."""

    positions: Tensor
    rows: Tensor
    step: PagedStep


def device_pass(
    shape: PassShape, wide: Tensor, narrow: Tensor, caches: dict[int, KVCache], backend: str
) -> DevicePass:
    """The parts of the two buffers, as views."""
    batch, num_tokens = shape.batch, shape.num_tokens
    step = PagedStep(
        caches=caches,
        block_table=narrow[3 * batch + 1 :].view(batch, shape.width),
        context_lens=narrow[:batch],
        cu_rows=narrow[batch : 2 * batch + 1],
        slot_mapping=wide[num_tokens : 2 * num_tokens],
        backend=backend,
        prompt_lens=narrow[2 * batch + 1 : 3 * batch + 1],
    )
    return DevicePass(wide[:num_tokens], wide[2 * num_tokens :], step)


def block_tables(spans: list[Span], block_size: int) -> list[list[int]]:
    """Block tables [B, M], as wide as the longest span needs."""
    width = max(-(-(span.start + span.count) // block_size) for span in spans)
    tables = [span.block_table[:width] for span in spans]
    return [table + [-1] * (width - len(table)) for table in tables]
