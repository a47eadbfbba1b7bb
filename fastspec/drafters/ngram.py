"""A store of n-grams that learns while a request is decoded."""

from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fastspec.drafters.base import Batch, Proposal, Request
from fastspec.drafters.context import DrafterContext
from fastspec.drafters.copying import proposal_of
from fastspec.drafters.ngram_table import NgramTable
from fastspec.drafters.texts import Texts, TextStore, free_row, row_length
from fastspec.models.transfer import device_tensor


class NgramDrafter:
    """Proposes, token by token, the most frequent successor of the text's longest known suffix.

    It counts every n-gram of 2 to `ngram_size` tokens in prompt and output and, for each position
    the target has verified, also the target's `filler_top_k` most probable tokens, including those
    after rejected drafts. An unknown suffix ends the proposal. Each request has its own store,
    which lives as long as the request, so the output of one request never depends on another.

    Args:
        ngram_size: >= 2.
        filler_top_k: >= 1; 1 counts only tokens of the text.
        one_level: count only n-grams of exactly `ngram_size` tokens.
        vocab_size: if given, an unknown suffix is continued with an arbitrary token below it.
        table: a store shared by all requests, with contexts of `ngram_size` - 1 tokens. It outlives
            them, so the output for a seed is independent of other requests only with
            rejection_sample_method "coupled".

    Source: Ou et al., "Lossless Acceleration of Large Language Model via Adaptive N-gram Parallel
    Decoding", arXiv 2404.08698; fillers: github.com/romsto/Speculative-Decoding.
    """

    name = "ngram"

    def __init__(
        self,
        ngram_size: int,
        filler_top_k: int,
        one_level: bool = False,
        vocab_size: int | None = None,
        table: NgramTable | None = None,
    ):
        self._max_context = ngram_size - 1
        self._filler_top_k = filler_top_k
        self._vocab_size = vocab_size
        self._is_shared = table is not None
        # A store shared by all would let the requests of others copy from a prediction.
        self.copies_texts = not self._is_shared
        self._table = NgramTable(self._max_context, one_level) if table is None else table
        self._texts = TextStore()
        self._rows: WeakKeyDictionary[Request, int] = WeakKeyDictionary()
        self._num_learnt: WeakKeyDictionary[Request, int] = WeakKeyDictionary()  # tokens

    def propose(self, batch: Batch) -> Proposal:
        texts = self._texts.update(batch)
        numbers = [self._row(request, batch.device) for request in batch.requests]
        rows = device_tensor(numbers, torch.int64, batch.device)
        self._learn_texts(rows, texts, batch)
        windows = _windows(texts, texts.lengths.long()[:, None], self._max_context)[:, 0]
        token_ids = []
        grown = windows
        for _ in range(batch.num_speculative_tokens):
            ends = grown[:, -self._max_context :]
            chosen = self._table.next_tokens(rows, ends)
            if self._vocab_size is not None:
                guesses = self._table.guess(ends, self._vocab_size)
                chosen = torch.where(chosen < 0, guesses, chosen)
            elif token_ids:
                chosen = torch.where(token_ids[-1] < 0, -1, chosen)
            token_ids.append(chosen)
            grown = torch.cat([grown, chosen[:, None]], dim=1)
        proposal = proposal_of(torch.stack(token_ids, dim=1).int(), batch)
        if self._filler_top_k == 1:
            return proposal

        # Without drafts a request alone would not have asked this drafter: it learns nothing.
        is_paused = [num == 0 for num in batch.num_draft_tokens]
        if any(is_paused):
            hidden = device_tensor(is_paused, torch.bool, batch.device)
            grown = grown.masked_fill(hidden[:, None], -1)

        def learn(target_logits: Tensor, num_rows: list[int]) -> None:
            self._learn_fillers(rows, grown, target_logits, num_rows)

        return Proposal(proposal.token_ids, num_tokens=proposal.num_tokens, on_target_logits=learn)

    def commit(self, batch: Batch, accepted: list[int]) -> None:
        """Do nothing: the next proposal learns the new tokens."""

    def release(self, request: Request) -> None:
        """Forget the uploaded text, but keep what was learnt, in case the request resumes."""
        self._texts.forget(request.request_id)

    def _learn_texts(self, rows: Tensor, texts: Texts, batch: Batch) -> None:
        """Count the n-grams that end in tokens committed since the last call.

        Requests without drafts wait for their next ones, as if alone, where this drafter would not
        have been asked: what is counted together decides which of equal counts wins.
        """
        starts = [self._num_learnt[request] for request in batch.requests]
        ends = [
            row_length(request, len(request.token_ids)) if num else self._num_learnt[request]
            for request, num in zip(batch.requests, batch.num_draft_tokens, strict=True)
        ]
        self._num_learnt.update(zip(batch.requests, ends, strict=True))
        width = max(end - start for start, end in zip(starts, ends, strict=True))
        begin, end = device_tensor([starts, ends], torch.int64, batch.device)[:, :, None]
        places = begin + torch.arange(width, device=rows.device)  # [B, W]
        is_new = places < end
        successors = texts.token_ids.long().gather(
            1, places.clamp(max=texts.token_ids.shape[1] - 1)
        )
        windows = _windows(texts, places, self._max_context)
        self._table.learn(
            rows[:, None].expand_as(places).flatten(),
            windows.flatten(0, 1),
            torch.where(is_new, successors, -1).flatten(),
            places.flatten() + self._filler_top_k,
        )

    def _learn_fillers(
        self, rows: Tensor, grown: Tensor, target_logits: Tensor, num_rows: list[int]
    ) -> None:
        """Count the target's most probable tokens after the text and after each draft token."""
        num = self._max_context
        windows = grown.unfold(1, num, 1)  # [B, K + 1, n - 1]
        width = windows.shape[1]
        packed = [b * width + i for b, n in enumerate(num_rows) for i in range(n)]
        places = device_tensor(packed, torch.int64, rows.device)
        repeat = min(self._filler_top_k, target_logits.shape[-1])
        top = target_logits[: len(packed)].topk(repeat).indices  # [T, k]
        ranks = torch.arange(repeat, device=rows.device)
        recency = (repeat - 1 - ranks).expand_as(top)
        self._table.learn(
            rows[:, None].expand(-1, width).flatten()[places].repeat_interleave(repeat),
            windows.flatten(0, 1)[places].repeat_interleave(repeat, dim=0),
            top.flatten(),
            recency.flatten(),
        )

    def _row(self, request: Request, device: torch.device) -> int:
        row = self._rows.get(request)
        if row is None:
            row = 0 if self._is_shared else free_row(self._rows.values())
            self._table.grow(row + 1, device)
            if not self._is_shared:
                self._table.clear(row)
            self._num_learnt[request] = 0
            self._rows[request] = row
        return row


def _windows(texts: Texts, places: Tensor, num: int) -> Tensor:
    """Return the tokens before each place [B, W] of the texts, [B, W, num], -1 before the start."""
    before = places[:, :, None] + torch.arange(-num, 0, device=places.device)
    flat = before.clamp(0, texts.token_ids.shape[1] - 1).flatten(1)
    tokens = texts.token_ids.long().gather(1, flat).view_as(before)
    return torch.where(before < 0, -1, tokens)


def build(context: DrafterContext) -> NgramDrafter:
    """Build method "ngram"."""
    spec = context.spec
    size, fillers = spec.value_of("ngram_size"), spec.value_of("filler_top_k")
    vocab_size = context.vocab_size if spec.ngram_guesses else None
    is_shared = spec.ngram_store == "engine"
    table = NgramTable(size - 1, spec.ngram_one_level) if is_shared else None
    return NgramDrafter(size, fillers, spec.ngram_one_level, vocab_size, table)
