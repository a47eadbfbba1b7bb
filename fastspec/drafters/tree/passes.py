"""Passes of a draft model over the token trees that it grows, one for each level of a batch."""

import torch
from torch import Tensor

from fastspec.drafters.base import Batch
from fastspec.drafters.draft_model import DraftModelDrafter
from fastspec.drafters.texts import Text
from fastspec.models.token_tree import TreeLayout, packed
from fastspec.models.transfer import device_tensor


class TreePasses:
    """The nodes that a draft model has read in this step, behind the committed tokens of its cache.

    A level is read together with those above it, as attention takes the whole tree; while each has
    one node they are a chain, and only the new one is read.

    Args:
        draft: has cached the text of each request that it reads.
        batch: there is room for num_draft_tokens[b] nodes of each request.
        depths: levels of each request that are wanted.
    Attributes:
        counts: [B] passes that each request had a part in.
    """

    def __init__(
        self,
        draft: DraftModelDrafter,
        batch: Batch,
        depths: list[int],
    ):
        self._draft = draft
        self._runner = draft.runner
        self._batch = batch
        self._depths = depths
        self._level = 0
        self.counts = [0] * len(depths)
        last = [[request.token_ids[-1]] for request in batch.requests]
        self._token_ids = device_tensor(last, torch.int32, batch.device)  # [B, S]
        self._parents = torch.full_like(self._token_ids, -1)  # [B, S], places in _token_ids
        self._newest = 0  # place of the first node of the last level
        self._is_chain = True
        self._vocab_size = 0

    def read_texts(self) -> tuple[Tensor, list[int]]:
        """Logits [R, V'] after the committed tokens, and the requests that have a row."""
        self._level = 1
        reading = [b for b, depth in enumerate(self._depths) if depth]
        self._count(reading)
        texts = [Text(self._batch.requests[b], self._batch.requests[b].token_ids) for b in reading]
        logits = self._draft.read(texts, [1] * len(reading))
        self._vocab_size = logits.shape[1]
        return logits, reading

    def read_level(self, token_ids: Tensor, parents: Tensor) -> tuple[Tensor, list[int]] | None:
        """Read one more level, of E nodes for each request as far as there is room.

        Args:
            token_ids: [B, E] int32.
            parents: [B, E], which nodes of the level read last they follow.
        Returns:
            Logits [R, V'] after the new nodes, and the places b * E + e that have a row; None when
            there is no room for any.
        """
        batch, width = token_ids.shape
        before = self._token_ids.shape[1]
        self._token_ids = torch.cat([self._token_ids, token_ids], dim=1)
        self._parents = torch.cat([self._parents, (parents + self._newest).int()], dim=1)
        self._newest = before
        self._level += 1
        self._is_chain = self._is_chain and width == 1
        counts = [
            max(0, min(width, limit + 1 - before)) if depth >= self._level else 0
            for limit, depth in zip(self._batch.num_draft_tokens, self._depths, strict=True)
        ]
        reading = [b for b in range(batch) if counts[b]]
        places = [b * width + e for b in reading for e in range(counts[b])]
        if not reading:
            return None
        self._count(reading)
        read = self._read_last if self._is_chain else self._read_all
        logits = read(reading, [counts[b] for b in reading])
        return logits[:, : self._vocab_size], places

    def _count(self, reading: list[int]) -> None:
        for b in reading:
            self.counts[b] += 1

    def _read_last(self, reading: list[int], counts: list[int]) -> Tensor:
        """The new node of each chain."""
        requests = [self._batch.requests[b] for b in reading]
        spans = [r.span(len(r.token_ids) - 1 + self._newest, 1) for r in requests]
        return self._runner.forward(self._ids(reading)[:, -1], spans)

    def _read_all(self, reading: list[int], counts: list[int]) -> Tensor:
        """Each tree from its root on; logits of the new nodes."""
        lengths = [self._newest + count for count in counts]
        requests = [self._batch.requests[b] for b in reading]
        spans = [
            request.span(len(request.token_ids) - 1, length)
            for request, length in zip(requests, lengths, strict=True)
        ]
        rows, end = [], 0
        for length in lengths:
            rows += range(end + self._newest, end + length)
            end += length
        parents = self._of(self._parents, reading)
        layout = TreeLayout.of(parents, self._runner.paged_model.backend)
        return self._runner.forward(packed(self._ids(reading), lengths), spans, rows, layout)

    def _ids(self, reading: list[int]) -> Tensor:
        """Tokens [B', S] int64 of some requests, those that the draft model can embed."""
        return self._of(self._token_ids, reading).clamp(0, self._runner.vocab_size - 1).long()

    def _of(self, values: Tensor, reading: list[int]) -> Tensor:
        """Rows of some requests."""
        if len(reading) == len(values):
            return values
        return values[device_tensor(reading, torch.int64, values.device)]
