"""MaG, the n-gram drafter of CS-Drafting: copy after the longest match, then follow bigrams."""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from fastspec.drafters.bigram_table import load_bigram
from fastspec.drafters.context import DrafterContext
from fastspec.drafters.copying import CopyingDrafter
from fastspec.drafters.texts import Texts
from fastspec.models.loading import bigram_beside
from fastspec_kernels import match_suffix


@dataclass(eq=False)
class MagDrafter(CopyingDrafter):
    """Copies what follows the earliest previous occurrence of the text's longest matching suffix.

    If that copy reaches the end of the text, it repeats this once with the extended text; remaining
    positions are filled from the bigram table.

    Args:
        bigram: [n] int32, the successor of each token, see `load_bigram`; None leaves these
            positions empty.
        backend: passed to the kernel.

    Source: Chen et al., "Cascade Speculative Drafting for Even Faster LLM Inference",
    arXiv 2312.11462.
    """

    name = "mag"

    bigram: Tensor | None = None
    backend: str = "auto"
    _chains: Tensor | None = field(default=None, init=False)

    def copy(self, texts: Texts, num_tokens: int) -> Tensor:
        return self._copies(texts, num_tokens, num_tokens)

    def copy_whole(self, texts: Texts, num_tokens: int) -> Tensor:
        """Copy as `copy` does, but keep all of a second copy: [B, 2 * num_tokens - 1]."""
        return self._copies(texts, num_tokens, 2 * num_tokens - 1)

    def _copies(self, texts: Texts, num_tokens: int, width: int) -> Tensor:
        ends = texts.lengths.long()[:, None]
        places = ends + torch.arange(num_tokens, device=ends.device)
        first = self._match(texts, num_tokens)
        count = (first >= 0).sum(dim=1, keepdim=True)  # [B, 1]
        longer = pad(texts.token_ids, (0, num_tokens)).scatter(1, places, first)
        second = self._match(Texts(longer, texts.lengths + count[:, 0].int()), num_tokens)
        second = second.masked_fill(count == num_tokens, -1)
        more = 0, width - num_tokens
        drafts = _after(pad(first, more, value=-1), count, pad(second, more, value=-1))
        if self.bigram is not None:
            if self._chains is None or self._chains.shape[1] < num_tokens:
                self._chains = _chains(self.bigram, num_tokens).to(drafts.device)
            asked, surplus = drafts[:, :num_tokens], drafts[:, num_tokens:]
            count = (asked >= 0).sum(dim=1, keepdim=True)
            last = longer.scatter(1, places, asked).gather(1, ends + count - 1)[:, 0]
            successors = self._chains[last.clamp(max=len(self._chains) - 1).long(), :num_tokens]
            drafts = torch.cat([_after(asked, count, successors), surplus], dim=1)
        return drafts

    def _match(self, texts: Texts, num_tokens: int) -> Tensor:
        return match_suffix(
            texts.token_ids,
            texts.lengths,
            min_match=1,
            max_match=max(1, texts.token_ids.shape[1]),
            num_tokens=num_tokens,
            rule="earliest_longest",
            backend=self.backend,
        )


def _chains(bigram: Tensor, num: int) -> Tensor:
    """Return [n+1, K]: the K tokens after each token, -1 where none; the last row is all -1."""
    size = max(len(bigram), int(bigram.max()) + 1)
    successor = bigram.new_full((size + 1,), size, dtype=torch.int64)  # the token `size` means none
    successor[: len(bigram)] = bigram
    chain = [successor]
    for _ in range(num - 1):
        chain.append(successor[chain[-1]])
    chains = torch.stack(chain, dim=1)
    return chains.masked_fill(chains == size, -1).int()


def _after(first: Tensor, count: Tensor, second: Tensor) -> Tensor:
    """Return the first count[b] tokens of `first`, then those of `second`; all are [B, K]."""
    places = torch.arange(first.shape[1], device=first.device) - count
    return torch.where(places < 0, first, second.gather(1, places.clamp(min=0)))


def build(context: DrafterContext) -> MagDrafter:
    """Build method "mag", with the table named in the options or stored with the target."""
    file = context.spec.bigram_path or bigram_beside(context.target)
    bigram = load_bigram(file, context.vocab_size) if file else None
    return MagDrafter(bigram, context.config.backend)
