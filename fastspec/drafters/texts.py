"""The committed tokens of the running requests, kept on the device."""

from collections.abc import Iterable, Sequence
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor

from fastspec.drafters.base import Batch, Request
from fastspec.models.transfer import device_tensor

_LEAST_WIDTH = 256


class Texts(NamedTuple):
    """Texts of a batch: token_ids [B, S] int32, of which the first lengths[b] ([B] int32) count."""

    token_ids: Tensor
    lengths: Tensor


class TextStore:
    """One row per request; a step uploads only the tokens committed since the last one.

    A text begins with `Request.prompt_to_copy`; of an encoder-decoder, the decoder's start token
    prevents matches across the boundary.
    """

    def __init__(self):
        self._token_ids = torch.empty((0, 0), dtype=torch.int32, device="cpu")
        self._rows: dict[str, int] = {}
        self._lengths: dict[str, int] = {}

    def update(self, batch: Batch) -> Texts:
        """Upload and return the committed texts of a batch."""
        texts = [request.token_ids for request in batch.requests]
        return self.extend(batch.requests, texts, batch.device)

    def extend(
        self, requests: Sequence[Request], texts: list[list[int]], device: torch.device
    ) -> Texts:
        """Upload and return texts, which may include drafts; they extend the known ones."""
        rows: list[int] = []
        for request in requests:
            if request.request_id not in self._rows:
                self._lengths[request.request_id] = 0
                self._rows[request.request_id] = free_row(self._rows.values())
            rows.append(self._rows[request.request_id])
        pairs = zip(requests, texts, strict=True)
        lengths = [row_length(request, len(text)) for request, text in pairs]
        self._grow(max(rows) + 1, max(lengths), device)
        width = self._token_ids.shape[1]
        values: list[int] = []
        places: list[int] = []
        for request, text, row, length in zip(requests, texts, rows, lengths, strict=True):
            start, prompt = self._lengths[request.request_id], request.prompt_to_copy
            values += prompt[start:]
            values += text[request.num_prompt_tokens + max(0, start - len(prompt)) :]
            places += range(row * width + start, row * width + length)
            self._lengths[request.request_id] = length
        packed = device_tensor([*values, *places, *rows, *lengths], torch.int64, device)
        new_ids, new_places, row_index, ends = packed.split(
            [len(values), len(places), len(rows), len(lengths)]
        )
        self._token_ids.view(-1)[new_places] = new_ids.to(torch.int32)
        chosen = self._token_ids[:, : max(lengths)].index_select(0, row_index)
        return Texts(chosen, ends.to(torch.int32))

    def shorten(self, request: Request, length: int) -> None:
        """Note that only the first `length` tokens of the text itself are still valid."""
        known = self._lengths.get(request.request_id)
        if known is not None:
            self._lengths[request.request_id] = min(known, row_length(request, length))

    def forget(self, request_id: str) -> None:
        """Free the row for another request."""
        self._rows.pop(request_id, None)
        self._lengths.pop(request_id, None)

    def _grow(self, rows: int, width: int, device: torch.device) -> None:
        """Make room by doubling, so that existing rows are rarely copied."""
        old_rows, old_width = self._token_ids.shape
        if rows > old_rows or width > old_width:
            rows = old_rows if rows <= old_rows else max(rows, 2 * old_rows)
            width = old_width if width <= old_width else max(width, 2 * old_width, _LEAST_WIDTH)
            grown = torch.zeros((rows, width), dtype=torch.int32, device=device)
            grown[:old_rows, :old_width] = self._token_ids.to(device)
            self._token_ids = grown


def free_row(taken: Iterable[int]) -> int:
    """Return the lowest row that is not taken.

    It is found anew each time, as an interrupt could lose a row from a list of free ones.
    """
    rows = {*taken}
    return next(row for row in count() if row not in rows)


def row_length(request: Request, length: int) -> int:
    """Return the tokens that copies read of a text of so many tokens itself."""
    return len(request.prompt_to_copy) + length - request.num_prompt_tokens
