"""The levels of a cascade: a draft model that reviews or writes, and drafters that copy."""

import sys
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from fastspec.drafters.base import Batch, Request, SamplingTensors
from fastspec.drafters.cascade.draft import (
    Draft,
    DraftToken,
    draw_uniforms,
    laws,
    padded_ids,
    row_starts,
)
from fastspec.drafters.draft_model import DraftModelDrafter, greedy_sampling
from fastspec.drafters.texts import Texts, TextStore
from fastspec.models.transfer import device_tensor
from fastspec_kernels import row_stats, sample, verify_chain

Reviewed = tuple[Draft, int]  # a draft, and the position from which on it is judged


class Level(Protocol):
    """One drafter of a cascade; what it caches follows the drafts as they change."""

    name: str
    can_review: bool

    def write(self, drafts: list[Draft], counts: list[int], batch: Batch) -> None:
        """Continue each draft by at most counts[b] tokens."""
        ...

    def review(self, drafts: list[Draft], starts: list[int], batch: Batch) -> None:
        """Keep what holds of each draft from starts[b] on, and add a token of its own."""
        ...

    def room(self, length: int) -> int:
        """Tokens that can be drafted after so many."""
        ...

    def shorten(self, request: Request, length: int) -> None:
        """Of the request's text only the first `length` tokens are still those seen before."""
        ...

    def commit(self, batch: Batch, accepted: list[int]) -> None:
        """The step has ended, see Drafter.commit."""
        ...

    def release(self, request: Request) -> None:
        """The request has ended or lost its blocks."""
        ...


@runtime_checkable
class Copier(Protocol):
    """A drafter that needs nothing but the texts."""

    name: str

    def copy(self, texts: Texts, num_tokens: int) -> Tensor:
        """What may follow each text: [B, num_tokens] int32, -1 after the last token."""
        ...


class CopyingLevel:
    """A drafter that copies; ids that some model of the cascade does not have end a copy."""

    can_review = False

    def __init__(self, copier: object, vocab_size: int):
        if not isinstance(copier, Copier):
            raise ValueError(
                "drafter: a level of a cascade is a model, or copies like MagDrafter, got"
                f" {type(copier).__name__}"
            )
        self.name = copier.name
        self._copier = copier
        self._vocab_size = vocab_size
        self._texts = TextStore()

    def write(self, drafts: list[Draft], counts: list[int], batch: Batch) -> None:
        texts = self._texts.extend([draft.text for draft in drafts], batch.device)
        copies = self._copier.copy(texts, max(counts)).tolist()
        for draft, ids, count in zip(drafts, copies, counts, strict=True):
            usable = [0 <= token_id < self._vocab_size for token_id in ids[:count]]
            end = usable.index(False) if False in usable else count
            draft.replace(draft.length, [DraftToken(i, self.name) for i in ids[:end]])

    def review(self, drafts: list[Draft], starts: list[int], batch: Batch) -> None:
        raise ValueError(f"k_matrix: {self.name} copies and cannot review")

    def room(self, length: int) -> int:
        return sys.maxsize

    def shorten(self, request: Request, length: int) -> None:
        self._texts.shorten(request, length)

    def commit(self, batch: Batch, accepted: list[int]) -> None:
        for request in batch.requests:
            self._texts.shorten(request, len(request.token_ids) - 1)

    def release(self, request: Request) -> None:
        self._texts.forget(request.request_id)


class _Verdict(NamedTuple):
    """accepted: tokens that stay, -1 = the logits were not finite; probs: of them and the extra."""

    accepted: int
    extra: int
    probs: list[float] | None = None


class ModelLevel:
    """A draft model, over a cache of its own.

    Args:
        model: reads and writes; its vocabulary is that of the whole cascade.
        lenience: what it judges by, >= 1; see CascadeDrafter.
        backend: passed to the kernels.
    """

    can_review = True

    def __init__(
        self, model: DraftModelDrafter, name: str, lenience: float = 1.0, backend: str = "auto"
    ):
        self.model = model
        self.name = name
        self._lenience = lenience
        self._backend = backend

    def write(self, drafts: list[Draft], counts: list[int], batch: Batch) -> None:
        device = batch.device
        uniforms = draw_uniforms(drafts, batch.num_speculative_tokens, batch)
        keeps_logits = self._lenience > 1 or any(not draft.is_greedy for draft in drafts)
        texts = [draft.text for draft in drafts]
        sampling = self._sampling(drafts, device)
        token_ids, logits = self.model.write(texts, counts, sampling, uniforms, keeps_logits)
        if logits is not None and self._lenience > 1:
            flat = logits.view(-1, logits.shape[-1])
            probs = _probs(flat, token_ids.view(-1), self._backend).view(token_ids.shape).tolist()
        else:
            probs = [[1.0] * token_ids.shape[1]] * len(drafts)
        columns = zip(drafts, token_ids.tolist(), counts, strict=True)
        for b, (draft, ids, count) in enumerate(columns):
            end = ids.index(-1) if -1 in ids[:count] else count
            rows = [None] * end if logits is None or draft.is_greedy else logits[b]
            written = zip(ids[:end], rows, probs[b], strict=False)
            draft.replace(draft.length, [DraftToken(i, self.name, row, p) for i, row, p in written])
            draft.count_passes(self.name, count)

    def review(self, drafts: list[Draft], starts: list[int], batch: Batch) -> None:
        reviewed = list(zip(drafts, starts, strict=True))
        num_by_chain = len(reviewed)
        if self._lenience > 1:  # greedy ones follow a rule of their own
            reviewed.sort(key=lambda pair: pair[0].is_greedy)
            num_by_chain = sum(not draft.is_greedy for draft in drafts)
        num_rows = [draft.length - start + 1 for draft, start in reviewed]
        logits = self.model.read([draft.text for draft, _ in reviewed], num_rows)
        first = row_starts(num_rows)
        split = first[num_by_chain]
        verdicts = self._judge(reviewed[:num_by_chain], logits[:split], batch)
        verdicts += self._judge_leniently(reviewed[num_by_chain:], logits[split:])
        for (draft, start), verdict, row in zip(reviewed, verdicts, first, strict=False):
            draft.count_passes(self.name, 1)
            outcome = self._outcome(draft, start, verdict)
            if not draft.is_greedy:
                outcome = [
                    token._replace(logits=logits[row + i]) for i, token in enumerate(outcome)
                ]
            draft.replace(start, outcome)

    def room(self, length: int) -> int:
        return self.model.room(length) - 1  # its reviews read the drafts, too

    def shorten(self, request: Request, length: int) -> None:
        self.model.shorten(request.request_id, length)

    def commit(self, batch: Batch, accepted: list[int]) -> None:
        self.model.commit(batch, accepted)

    def release(self, request: Request) -> None:
        self.model.release(request)

    def _judge(self, reviewed: list[Reviewed], logits: Tensor, batch: Batch) -> list[_Verdict]:
        """Speculative sampling, with this model in the place of the target."""
        if not reviewed:
            return []
        device, drafts = batch.device, [draft for draft, _ in reviewed]
        tokens = [draft.after(start) for draft, start in reviewed]
        counts = [len(row) for row in tokens]
        width = max(counts)
        cu_rows = device_tensor(row_starts([n + 1 for n in counts]), torch.int32, device)
        uniforms = draw_uniforms(drafts, batch.num_speculative_tokens + 1, batch)
        output_ids, accepted_len, _ = verify_chain(
            logits,
            cu_rows,
            padded_ids(tokens, width, device),
            torch.cat([uniforms[:, :width], uniforms[:, -1:]], dim=1),
            draft_logits=laws(tokens, width, logits.shape[1]),
            **self._sampling(drafts, device),
            lenience=self._lenience,
            backend=self._backend,
        )
        table = torch.cat([accepted_len[:, None], output_ids], dim=1).tolist()
        return [_Verdict(row[0], row[row[0] + 1]) for row in table]

    def _judge_leniently(self, reviewed: list[Reviewed], logits: Tensor) -> list[_Verdict]:
        """Keep argmaxes, and x while lenience * prob(x) > the prob that its writer gave it."""
        if not reviewed:
            return []
        tokens = [draft.after(start) for draft, start in reviewed]
        extra_row = DraftToken(0, self.name)
        packed = [token for row in tokens for token in (*row, extra_row)]
        ids = device_tensor([token.token_id for token in packed], torch.int64, logits.device)
        best, _ = sample(
            logits,
            logits.new_zeros(len(packed), dtype=torch.float32),
            temperature=logits.new_zeros(len(packed), dtype=torch.float32),
            backend=self._backend,
        )
        best_ids = best.tolist()
        probs, best_probs = (_probs(logits, i, self._backend).tolist() for i in (ids, best))
        verdicts = []
        for row, first in zip(tokens, row_starts([len(row) + 1 for row in tokens]), strict=False):
            accepted = 0
            for token, prob, choice in zip(row, probs[first:], best_ids[first:], strict=False):
                if token.token_id != choice and not self._lenience * prob > token.prob:
                    break
                accepted += 1
            end = first + accepted
            is_finite = min(best_ids[first : end + 1]) >= 0
            kept = [*probs[first:end], best_probs[end]]
            verdicts.append(_Verdict(accepted if is_finite else -1, best_ids[end], kept))
        return verdicts

    def _outcome(self, draft: Draft, start: int, verdict: _Verdict) -> list[DraftToken]:
        """The tokens that stay, each with its probability for this model, and the extra one."""
        if verdict.accepted < 0:
            return []
        kept = draft.after(start)[: verdict.accepted]
        kept.append(DraftToken(verdict.extra, self.name))
        probs = verdict.probs or [1.0] * len(kept)
        return [
            DraftToken(token.token_id, token.writer, prob=prob)
            for token, prob in zip(kept, probs, strict=True)
        ]

    def _sampling(self, drafts: list[Draft], device: torch.device) -> SamplingTensors:
        requests = [draft.request for draft in drafts]
        batch = Batch(requests, [0] * len(requests), 0, device)
        is_greedy = all(draft.is_greedy for draft in drafts)
        return greedy_sampling(batch) if is_greedy else batch.sampling


def _probs(logits: Tensor, token_ids: Tensor, backend: str) -> Tensor:
    """Probability of one token of each row at temperature 1, [R]."""
    logsumexp, _ = row_stats(logits, backend=backend)
    picked = logits.gather(1, token_ids.clamp(min=0).long()[:, None])[:, 0]
    return torch.exp(picked.float() - logsumexp)
