"""What GLIDE training reads: rows of text, and what the target makes of them."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fastspec.drafters.glide.dense import read_target


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


class Teacher(Protocol):
    """Where lessons come from."""

    def lesson(self, indices: Tensor) -> Lesson:
        """The rows of these indices, and what the target says of them."""
        ...


class FrozenTarget:
    """The target itself, run on every batch and never changed."""

    def __init__(self, target: PreTrainedModel, rows: Rows, num_draft_layers: int):
        self._target = target.eval()
        self._rows = rows
        self._num_draft_layers = num_draft_layers

    def lesson(self, indices: Tensor) -> Lesson:
        rows = self._rows.take(indices)
        device = self._target.device
        token_ids, valid = rows.token_ids.to(device), rows.valid.to(device)
        layers, logits = read_target(
            self._target, token_ids[:, :-1], valid[:, :-1], self._num_draft_layers
        )
        return Lesson(token_ids, valid, layers, logits)
