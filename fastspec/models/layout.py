"""How a packed forward pass is laid out: two lists on the host, two buffers on the device."""

from itertools import accumulate
from typing import NamedTuple

from fastspec.models.paged_model import Span


class PassShape(NamedTuple):
    """Sizes of a forward pass."""

    batch: int  # B sequences
    num_tokens: int  # T, packed
    num_rows: int  # R, whose logits are kept; 0 where those of all are
    width: int  # M blocks in a row of the block table

    @classmethod
    def of(cls, spans: list[Span], rows: list[int], block_size: int) -> "PassShape":
        """The sizes of a pass over the spans' tokens."""
        width = max(-(-(span.start + span.count) // block_size) for span in spans)
        return cls(len(spans), sum(span.count for span in spans), len(rows), width)

    @property
    def wide_size(self) -> int:
        """Entries of the int64 buffer, see `lay_out`."""
        return 2 * self.num_tokens + self.num_rows

    @property
    def narrow_size(self) -> int:
        """Entries of the int32 buffer, see `lay_out`."""
        return 3 * self.batch + 1 + self.batch * self.width


def lay_out(
    spans: list[Span],
    rows: list[int],
    block_size: int,
    padded: PassShape | None = None,
    most_tokens: int = 0,
) -> tuple[list[int], list[int]]:
    """Values of the buffers of a pass over the spans' tokens, one span after another.

    With `padded`, in these larger sizes: added tokens belong to added sequences, at most
    `most_tokens` to each. They write nothing and see only what lies in block 0, so every kernel
    takes them for sequences like others, and no row of the pass itself depends on them.

    Returns:
        int64: positions [T], cache slots [T] (-1 = not written), rows [R] whose logits are kept;
        int32: context lengths [B], prefix sums of the tokens [B + 1], prompt lengths [B] (see
        `RotaryLengths`), block tables [B, M].
    """
    positions: list[int] = []
    slots: list[int] = []
    for span in spans:
        table, tokens = span.block_table, range(span.start, span.start + span.count)
        positions += tokens
        slots += [table[t // block_size] * block_size + t % block_size for t in tokens]
    counts = [span.count for span in spans]
    context_lens = [span.start + span.count for span in spans]
    prompt_lens = [span.prompt_len for span in spans]
    width = -(-max(context_lens) // block_size)
    if padded is not None:
        width, missing = padded.width, padded.num_tokens - len(positions)
        added, left = [], missing
        for _ in range(padded.batch - len(spans)):
            added.append(min(left, most_tokens))
            left -= added[-1]
        if left:
            raise ValueError(f"most_tokens: {left} of {missing} added tokens find no sequence")
        positions += [0] * missing
        slots += [-1] * missing
        rows = rows + [0] * (padded.num_rows - len(rows))
        counts += added
        context_lens += added
        prompt_lens += [0] * len(added)
    narrow = [*context_lens, *accumulate(counts, initial=0), *prompt_lens]
    for span in spans:
        table = span.block_table[:width]
        narrow += table + [-1] * (width - len(table))
    narrow += [0] * (width * (len(counts) - len(spans)))
    return positions + slots + rows, narrow
