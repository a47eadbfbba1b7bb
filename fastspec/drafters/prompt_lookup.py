"""Prompt lookup: copies what followed an earlier occurrence of the text's last tokens."""

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from fastspec.drafters.base import Batch, Proposal, Request
from fastspec.drafters.context import DrafterContext
from fastspec.drafters.texts import Texts, TextStore
from fastspec.models.transfer import device_tensor
from fastspec_kernels import match_suffix


@dataclass(eq=False)
class CopyingDrafter:
    """A drafter that needs only the texts, which it keeps on the device."""

    name: ClassVar[str]
    _texts: TextStore = field(default_factory=TextStore, init=False)

    def propose(self, batch: Batch) -> Proposal:
        texts = self._texts.update(batch)
        return copied(self.copy(texts, batch.num_speculative_tokens), batch)

    def copy(self, texts: Texts, num_tokens: int) -> Tensor:
        """Return a continuation of each text: [B, num_tokens] int32, -1 after the last token."""
        raise NotImplementedError

    def commit(self, batch: Batch, accepted: list[int]) -> None:
        """Do nothing: the next proposal uploads the new tokens."""

    def release(self, request: Request) -> None:
        self._texts.forget(request.request_id)


@dataclass(eq=False)
class PromptLookupDrafter(CopyingDrafter):
    """Copies from prompt and output; a text whose last tokens occur nowhere else gets no draft.

    Args:
        min_match: minimum number of matching tokens, >= 1.
        max_match: maximum number of tokens compared, >= min_match. Longer matches win, and among
            equally long ones the latest. A copy that reaches the end of the text repeats itself.
        backend: passed to the kernel.

    Source: Saxena, "Prompt Lookup Decoding", 2023 (github.com/apoorvumang/prompt-lookup-decoding).
    """

    name = "prompt_lookup"

    min_match: int
    max_match: int
    backend: str = "auto"

    def copy(self, texts: Texts, num_tokens: int) -> Tensor:
        token_ids = match_suffix(
            texts.token_ids,
            texts.lengths,
            min_match=self.min_match,
            max_match=self.max_match,
            num_tokens=num_tokens,
            rule="latest",
            backend=self.backend,
        )
        # A copy that reached the end of the text repeats itself, so loops are drafted in full.
        count = (token_ids >= 0).sum(dim=1, keepdim=True).clamp(min=1)
        columns = torch.arange(num_tokens, device=token_ids.device)
        return token_ids.gather(1, columns % count)


def copied(token_ids: Tensor, batch: Batch) -> Proposal:
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


def build(context: DrafterContext) -> PromptLookupDrafter:
    """Build method "prompt_lookup"."""
    return PromptLookupDrafter(*context.spec.lookup_lengths, context.config.backend)
