"""What GLIDE training reads: rows of text, and what the target makes of them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fastspec.drafters.glide.dense import DenseGlimpse, block_mask, read_target


@dataclass(frozen=True)
class Rows:
    """Texts of one width, padded at the end.

    Attributes:
        token_ids: [N, S + 1] int64.
        lengths: [N] int64, tokens of each that count, >= 2.
    """

    token_ids: Tensor
    lengths: Tensor

    def __len__(self) -> int:
        return len(self.token_ids)

    def take(self, indices: Tensor) -> "Rows":
        """Some of the rows."""
        return Rows(self.token_ids[indices], self.lengths[indices])

    @property
    def valid(self) -> Tensor:
        """[N, S + 1] bool, True where a token counts."""
        return torch.arange(self.token_ids.shape[1]) < self.lengths[:, None]


def cut_rows(documents: Iterable[list[int]], context: int) -> Rows:
    """Consecutive windows of context + 1 tokens of each document, the last one padded.

    Raises:
        ValueError: no document has two tokens.
    """
    pieces = [
        ids[start : start + context + 1]
        for ids in documents
        for start in range(0, max(len(ids) - 1, 0), context)
    ]
    if not pieces:
        raise ValueError("data: no text has two tokens")
    token_ids = torch.zeros((len(pieces), context + 1), dtype=torch.int64)
    for row, piece in zip(token_ids, pieces, strict=True):
        row[: len(piece)] = torch.tensor(piece)
    return Rows(token_ids, torch.tensor([len(piece) for piece in pieces]))


@dataclass(frozen=True)
class Lesson:
    """One batch on the training device.

    Attributes:
        token_ids: [B, S + 1].
        valid: [B, S + 1] bool.
        layers: for each draft layer, keys and values [B, G, S, D] of its target layer.
        target_logits: [B, S, V].
    """

    token_ids: Tensor
    valid: Tensor
    layers: list[tuple[Tensor, Tensor]]
    target_logits: Tensor

    def read_by(self, draft: nn.Module, block_size: int) -> Any:
        """What a draft makes of all but the last token; block_size 0 shows it no target."""
        valid = self.valid[:, :-1]
        extra = {}
        if block_size:
            extra["glimpse"] = DenseGlimpse(self.layers, block_mask(valid, block_size))
        inputs = self.token_ids[:, :-1]
        return draft(input_ids=inputs, attention_mask=valid.long(), use_cache=False, **extra)


Teacher = Callable[[Tensor], Lesson]  # the rows of these indices, and what the target says of them


def frozen_target(target: PreTrainedModel, rows: Rows, num_draft_layers: int) -> Teacher:
    """A teacher that runs the target on every batch and never changes it."""
    target.eval()

    def lesson(indices: Tensor) -> Lesson:
        chosen = rows.take(indices)
        token_ids, valid = (part.to(target.device) for part in (chosen.token_ids, chosen.valid))
        layers, logits = read_target(target, token_ids[:, :-1], valid[:, :-1], num_draft_layers)
        return Lesson(token_ids, valid, layers, logits)

    return lesson
