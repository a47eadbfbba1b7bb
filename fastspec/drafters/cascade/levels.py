"""The levels of a cascade: a draft model that reviews or writes, and drafters that copy."""

import copy
import sys
from dataclasses import replace
from itertools import accumulate, takewhile
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn.functional import pad

from fastspec.config.k_matrix import MAG_TOKENS
from fastspec.drafters.base import Batch, Request, SamplingTensors, greedy_sampling
from fastspec.drafters.cascade.draft import Draft, DraftToken, draw_uniforms, stacked_logits
from fastspec.drafters.draft_model import DraftModelDrafter
from fastspec.drafters.mag import MagDrafter
from fastspec.drafters.on_target import OnTargetDrafter
from fastspec.drafters.texts import Texts, TextStore
from fastspec.models.transfer import device_tensor, padded_tensor
from fastspec_kernels import row_stats, sample, verify_chain


class Review(NamedTuple):
    """The part of a draft that a level keeps.

    Attributes:
        num_kept: number of tokens kept.
        extra: the token after them; -1 = none, because the logits there are not finite.
        probs: probabilities of the kept tokens and the extra one.
    """

    num_kept: int
    extra: int
    probs: list[float]


class Level:
    """One drafter of a cascade; its caches follow the drafts as they change.

    Attributes:
        piece: minimum number of tokens it writes at a time; 0 = as many as requested.
    """

    can_review = False
    piece = 0
    name: str

    def write(self, drafts: list[Draft], counts: list[int], batch: Batch) -> None:
        """Continue each draft by up to counts[b] tokens, or by a piece as far as it has room."""
        raise NotImplementedError

    def review(self, drafts: list[Draft], starts: list[int], batch: Batch) -> None:
        """Keep the accepted tokens of each draft from starts[b] on, and add one (if can_review)."""
        raise NotImplementedError

    def room(self, length: int) -> int:
        """Return how many tokens can be drafted after a text of this length."""
        return sys.maxsize

    def shorten(self, request: Request, length: int) -> None:
        """Note that only the first `length` tokens of the text are unchanged since it was read."""
        raise NotImplementedError

    def commit(self, batch: Batch, accepted: list[int]) -> None:
        """Handle the end of a step, see Drafter.commit."""
        for request in batch.requests:
            self.shorten(request, len(request.token_ids) - 1)

    def release(self, request: Request) -> None:
        """Forget a request that has ended or lost its blocks."""
        raise NotImplementedError


@runtime_checkable
class Copier(Protocol):
    """A drafter that needs only the texts."""

    name: str

    def copy(self, texts: Texts, num_tokens: int) -> Tensor:
        """Return a continuation of each text: [B, num_tokens] int32, -1 after the last token."""
        ...


class CopyingLevel(Level):
    """A drafter that copies; a copy ends before an id that some model of the cascade lacks.

    Args:
        has_surplus: MaG only: write pieces of the published size, see SpecConfig.mag_surplus.
    """

    copies_texts = True

    def __init__(self, copier: object, vocab_size: int, has_surplus: bool = False):
        if not isinstance(copier, Copier):
            raise ValueError(
                "drafter: a cascade level must be a model, or copy like MagDrafter, got"
                f" {type(copier).__name__}"
            )
        self.name = copier.name
        self._copy = copier.copy
        if has_surplus and isinstance(copier, MagDrafter):
            self._copy, self.piece = copier.copy_whole, MAG_TOKENS
        self._vocab_size = vocab_size
        self._texts = TextStore()

    def write(self, drafts: list[Draft], counts: list[int], batch: Batch) -> None:
        requests, texts = [draft.request for draft in drafts], [draft.text for draft in drafts]
        known = self._texts.extend(requests, texts, batch.device)
        copies = self._copy(known, self.piece or max(counts)).tolist()
        for draft, ids, count in zip(drafts, copies, counts, strict=True):
            usable = takewhile(
                lambda i: 0 <= i < self._vocab_size, ids if self.piece else ids[:count]
            )
            tokens = [
                DraftToken(token_id, self.name, is_surplus=0 < self.piece <= place)
                for place, token_id in enumerate(usable)
            ]
            draft.replace(len(draft.tokens), tokens)

    def shorten(self, request: Request, length: int) -> None:
        self._texts.shorten(request, length)

    def release(self, request: Request) -> None:
        self._texts.forget(request.request_id)


class ModelLevel(Level):
    """A draft model with its own cache.

    Args:
        model: reads and writes; its vocabulary is that of the whole cascade.
        lenience: lenience of its reviews, >= 1; see CascadeDrafter.
        backend: passed to the kernels.
        source: a copy of the target, from which the model reads what it usually reads from the
            target; None = it reads only texts.
    """

    can_review = True

    def __init__(
        self,
        model: DraftModelDrafter,
        lenience: float = 1.0,
        backend: str = "auto",
        source: OnTargetDrafter | None = None,
    ):
        self.model, self.name = model, model.name
        self.reads_target = getattr(model, "reads_target", False)
        self.lenience, self.backend, self._source = lenience, backend, source

    def write(self, drafts: list[Draft], counts: list[int], batch: Batch) -> None:
        requests, texts = [draft.request for draft in drafts], [draft.text for draft in drafts]
        if self._source is not None:
            requests = _as_read_by(self._source, requests)
        uniforms = draw_uniforms(drafts, batch.num_speculative_tokens, batch)
        keeps_logits = self.lenience > 1 or any(not draft.is_greedy for draft in drafts)
        token_ids, logits, _ = self.model.write(
            requests, texts, counts, _sampling(drafts, batch), uniforms, keeps_logits
        )
        if logits is not None:
            logits = self._whole(logits)
        probs = [[1.0] * token_ids.shape[1]] * len(drafts)
        if logits is not None and self.lenience > 1:
            flat = logits.view(-1, logits.shape[-1])
            probs = _probs(flat, token_ids.view(-1), self.backend).view(token_ids.shape).tolist()
        columns = zip(drafts, token_ids.tolist(), counts, strict=True)
        for b, (draft, ids, count) in enumerate(columns):
            end = ids.index(-1) if -1 in ids[:count] else count
            rows = [None] * end if logits is None or draft.is_greedy else logits[b]
            written = zip(ids[:end], rows, probs[b], strict=False)
            tokens = [DraftToken(i, self.name, row, prob) for i, row, prob in written]
            draft.replace(len(draft.tokens), tokens)
            draft.passes[self.name] += count

    def review(self, drafts: list[Draft], starts: list[int], batch: Batch) -> None:
        reviewed = list(zip(drafts, starts, strict=True))
        num_by_chain = len(reviewed)
        if self.lenience > 1:  # greedy drafts have their own rule
            reviewed.sort(key=lambda pair: pair[0].is_greedy)
            num_by_chain = sum(not draft.is_greedy for draft in drafts)
        drafts = [draft for draft, _ in reviewed]
        tokens = [draft.tokens[start:] for draft, start in reviewed]
        num_rows = [len(row) + 1 for row in tokens]
        requests, texts = [draft.request for draft in drafts], [draft.text for draft in drafts]
        if self._source is not None:
            requests = _as_read_by(self._source, requests)
        logits = self._whole(self.model.read(requests, texts, num_rows))
        first = [0, *accumulate(num_rows)]
        split = first[num_by_chain]
        reviews: list[Review] = []
        if num_by_chain:
            reviews = self._review_exactly(
                drafts[:num_by_chain], tokens[:num_by_chain], logits, batch
            )
        if num_by_chain < len(drafts):
            reviews += self._review_leniently(tokens[num_by_chain:], logits[split:])
        columns = zip(reviewed, tokens, reviews, first, strict=False)
        for (draft, start), proposed, (num_kept, extra, probs), row in columns:
            draft.passes[self.name] += 1
            kept = proposed[:num_kept] + [DraftToken(extra, self.name)] * (extra >= 0)
            rows = [None] * len(kept) if draft.is_greedy else logits[row : row + len(kept)]
            outcome = [
                token._replace(logits=own, prob=prob)
                for token, own, prob in zip(kept, rows, probs, strict=False)
            ]
            draft.replace(start, outcome)

    def room(self, length: int) -> int:
        return self.model.room(length) - 1  # its reviews also read the drafts

    def shorten(self, request: Request, length: int) -> None:
        self.model.shorten(request.request_id, length)

    def commit(self, batch: Batch, accepted: list[int]) -> None:
        if self._source is not None:  # from the target it will read something slightly different
            for request, count in zip(batch.requests, accepted, strict=True):
                self.shorten(request, max(0, len(request.token_ids) - count - 1))
        self.model.commit(batch, accepted)

    def release(self, request: Request) -> None:
        self.model.release(request)

    def _whole(self, logits: Tensor) -> Tensor:
        """Return logits of the cascade's vocabulary, -inf for ids that the model lacks."""
        whole = self.model.vocabulary.whole(logits)
        missing = self.model.vocabulary.size - whole.shape[-1]
        return pad(whole, (0, missing), value=-torch.inf) if missing else whole

    def _review_exactly(
        self, drafts: list[Draft], tokens: list[list[DraftToken]], logits: Tensor, batch: Batch
    ) -> list[Review]:
        """Review by speculative sampling, with this model as the target."""
        device, num_rows = batch.device, [len(row) + 1 for row in tokens]
        width, ids = max(num_rows) - 1, [[token.token_id for token in row] for row in tokens]
        cu_rows = [0, *accumulate(num_rows)]
        uniforms = draw_uniforms(drafts, batch.num_speculative_tokens + 1, batch)
        output_ids, accepted_len, _ = verify_chain(
            logits[: cu_rows[-1]],
            device_tensor(cu_rows, torch.int32, device),
            padded_tensor(ids, width, device),
            torch.cat([uniforms[:, :width], uniforms[:, -1:]], dim=1),
            draft_logits=stacked_logits(tokens, width, logits.shape[1]),
            **_sampling(drafts, batch),
            lenience=self.lenience,
            backend=self.backend,
        )
        table = torch.cat([accepted_len[:, None], output_ids], dim=1).tolist()
        reviews = []
        for (num_kept, *ids), first, count in zip(table, cu_rows, num_rows, strict=False):
            if num_kept < 0:  # it accepted all tokens before the first row that is not finite
                best = logits[first : first + count].amax(dim=1)
                num_kept = best.isfinite().tolist().index(False)
            reviews.append(Review(num_kept, ids[num_kept], [1.0] * (num_kept + 1)))
        return reviews

    def _review_leniently(self, tokens: list[list[DraftToken]], logits: Tensor) -> list[Review]:
        """Keep argmaxes, and x while lenience * prob(x) > the prob its writer gave it."""
        packed = [i for row in tokens for i in (*(token.token_id for token in row), 0)]
        ids = device_tensor(packed, torch.int64, logits.device)
        zeros = logits.new_zeros(len(packed), dtype=torch.float32)
        best, _ = sample(logits, zeros, temperature=zeros, backend=self.backend)
        best_ids = best.tolist()
        probs, best_probs = (_probs(logits, i, self.backend).tolist() for i in (ids, best))
        reviews, first = [], 0
        for row in tokens:
            end = first
            for token in row:
                stays = self.lenience * probs[end] > token.prob
                if token.token_id != best_ids[end] and not stays:
                    break
                end += 1
            reviews.append(Review(end - first, best_ids[end], [*probs[first:end], best_probs[end]]))
            first += len(row) + 1
        return reviews


def _as_read_by(source: OnTargetDrafter, requests: list[Request]) -> list[Request]:
    """Return the requests as if the target had read what its copy has read."""
    views = [copy.copy(request) for request in requests]
    for view in views:
        view.num_cached = source.num_cached(view)
    return views


def _sampling(drafts: list[Draft], batch: Batch) -> SamplingTensors:
    if all(draft.is_greedy for draft in drafts):
        return greedy_sampling(len(drafts), batch.device)
    return replace(batch, requests=[draft.request for draft in drafts]).sampling


def _probs(logits: Tensor, token_ids: Tensor, backend: str) -> Tensor:
    """Return the probability of one token of each row at temperature 1, [R]."""
    logsumexp, _ = row_stats(logits, backend=backend)
    picked = logits.gather(1, token_ids.clamp(min=0).long()[:, None])[:, 0]
    return torch.exp(picked.float() - logsumexp)
