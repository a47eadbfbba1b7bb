"""MaG, the n-gram drafter of CS-Drafting: copy after the longest match, then follow bigrams."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from fastspec.drafters.base import Batch, Proposal, Request
from fastspec.drafters.bigram_table import load_bigram
from fastspec.drafters.context import DrafterContext
from fastspec.drafters.prompt_lookup import copied
from fastspec.drafters.texts import Texts, TextStore
from fastspec.models.loading import bigram_beside
from fastspec_kernels import match_suffix


class MagDrafter:
    """Copies what follows the earliest place where the longest end of the text stood before.

    When that copy reaches the end of the text, the same is done once more with the longer text;
    places that are still empty are filled from the bigram table.

    Args:
        bigram: [n] int32, the successor of each token, see `load_bigram`; None leaves the places
            empty.
        backend: passed to the kernel.

    Source: Chen et al., "Cascade Speculative Drafting for Even Faster LLM Inference",
    arXiv 2312.11462.
    """

    name = "mag"

    def __init__(self, bigram: Tensor | None = None, backend: str = "auto"):
        self._bigram = bigram
        self._backend = backend
        self._chains: Tensor | None = None
        self._texts = TextStore()

    def propose(self, batch: Batch) -> Proposal:
        texts = self._texts.update(batch)
        return copied(self.copy(texts, batch.num_speculative_tokens), batch)

    def copy(self, texts: Texts, num_tokens: int) -> Tensor:
        """What may follow each text: [B, num_tokens] int32, -1 after the last token."""
        num = num_tokens
        first = self._match(texts, num)
        count = _num_tokens(first)  # [B, 1]
        columns = torch.arange(num, device=first.device)
        ends = texts.lengths.long()[:, None]
        longer = pad(texts.token_ids, (0, num)).scatter(1, ends + columns, first)
        second = self._match(Texts(longer, texts.lengths + count[:, 0].int()), num)
        drafts = _after(first, count, second)
        if self._bigram is not None:
            count = _num_tokens(drafts)
            longer = longer.scatter(1, ends + columns, drafts)
            last = longer.gather(1, ends + count - 1)
            drafts = _after(drafts, count, self._successors(self._bigram, last[:, 0], num))
        return drafts

    def commit(self, batch: Batch, accepted: list[int]) -> None:
        """Nothing: the next proposal uploads the new tokens."""

    def release(self, request: Request) -> None:
        self._texts.forget(request.request_id)

    def _match(self, texts: Texts, num_tokens: int) -> Tensor:
        return match_suffix(
            texts.token_ids,
            texts.lengths,
            min_match=1,
            max_match=max(1, texts.token_ids.shape[1]),
            num_tokens=num_tokens,
            rule="earliest_longest",
            backend=self._backend,
        )

    def _successors(self, bigram: Tensor, token_ids: Tensor, num: int) -> Tensor:
        """[B, K]: the next K tokens after each by the table, -1 where that has none."""
        if self._chains is None or self._chains.shape[1] != num:
            self._chains = _chains(bigram, num).to(token_ids.device)
        return self._chains[token_ids.clamp(max=len(self._chains) - 1).long()]


def _chains(bigram: Tensor, num: int) -> Tensor:
    """[n+1, K]: the last row is that of all tokens without a successor."""
    size = max(len(bigram), int(bigram.max()) + 1)
    successor = torch.full((size + 1,), size)  # the token `size` stands for none
    successor[: len(bigram)] = bigram
    chain = [successor]
    for _ in range(num - 1):
        chain.append(successor[chain[-1]])
    chains = torch.stack(chain, dim=1)
    return chains.masked_fill(chains == size, -1).int()


def _num_tokens(token_ids: Tensor) -> Tensor:
    return (token_ids >= 0).sum(dim=1, keepdim=True)


def _after(first: Tensor, count: Tensor, second: Tensor) -> Tensor:
    """The first count[b] tokens of `first`, then those of `second`, [B, K] all."""
    places = torch.arange(first.shape[1], device=first.device) - count
    return torch.where(places < 0, first, second.gather(1, places.clamp(min=0)))


def build(context: DrafterContext) -> MagDrafter:
    """The method "mag", with the table that the options name or that is beside the target."""
    file = context.spec.bigram_path or bigram_beside(context.target)
    bigram = load_bigram(file, context.vocab_size) if file else None
    return MagDrafter(bigram, context.config.backend)
