"""Drafters that copy tokens from texts, and proposals of copies."""

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from fastspec.drafters.base import Batch, Proposal, Request
from fastspec.drafters.texts import Texts, TextStore
from fastspec.models.transfer import device_tensor


@dataclass(eq=False)
class CopyingDrafter:
    """A drafter that needs only the texts, which it keeps on the device."""

    name: ClassVar[str]
    copies_texts: ClassVar[bool] = True
    _texts: TextStore = field(default_factory=TextStore, init=False)

    def propose(self, batch: Batch) -> Proposal:
        texts = self._texts.update(batch)
        return proposal_of(self.copy(texts, batch.num_speculative_tokens), batch)

    def copy(self, texts: Texts, num_tokens: int) -> Tensor:
        """Return a continuation of each text: [B, num_tokens] int32, -1 after the last token."""
        raise NotImplementedError

    def commit(self, batch: Batch, accepted: list[int]) -> None:
        """Do nothing: the next proposal uploads the new tokens."""

    def release(self, request: Request) -> None:
        self._texts.forget(request.request_id)


def proposal_of(token_ids: Tensor, batch: Batch) -> Proposal:
    """Return a proposal of point masses [B, K], cut to the number wanted."""
    if any(wanted < batch.num_speculative_tokens for wanted in batch.num_draft_tokens):
        wanted = device_tensor(batch.num_draft_tokens, torch.int32, batch.device)[:, None]
        columns = torch.arange(token_ids.shape[1], device=batch.device)
        token_ids = token_ids.masked_fill(columns >= wanted, -1)
    return Proposal(token_ids, num_tokens=known_counts(token_ids))


def known_counts(token_ids: Tensor) -> list[int] | None:
    """Return the number of tokens in each row [B, N] on the CPU, where reading is free, or None."""
    on_cpu = token_ids.device.type == "cpu"
    return (token_ids >= 0).sum(dim=1).tolist() if on_cpu else None
