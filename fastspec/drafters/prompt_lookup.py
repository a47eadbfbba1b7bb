"""Prompt lookup: copies what followed an earlier occurrence of the text's last tokens."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fastspec.drafters.context import DrafterContext
from fastspec.drafters.copying import CopyingDrafter
from fastspec.drafters.texts import Texts
from fastspec_kernels import match_suffix


@dataclass(eq=False)
class PromptLookupDrafter(CopyingDrafter):
    """Copies from prompt, prediction and output; one whose end occurs nowhere else gets no draft.

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


def build(context: DrafterContext) -> PromptLookupDrafter:
    """Build method "prompt_lookup"."""
    return PromptLookupDrafter(*context.spec.lookup_lengths, context.config.backend)
