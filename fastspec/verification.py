"""The target's side of a round: read what is missing, judge the proposals."""

from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from fastspec.drafters import Proposal
from fastspec.models.transfer import device_tensor
from fastspec.outputs import StepTree
from fastspec.request import VERIFY_STREAM, Batch, Request
from fastspec.runner import ModelRunner, Span
from fastspec.token_tree import packed
from fastspec_kernels import verify_chain


@dataclass(frozen=True)
class Verdict:
    """What the target decided for one request.

    Attributes:
        num_draft_tokens: proposals judged; of a tree, the tokens of its longest path.
        accepted_len: how many of them were accepted; -1 = the logits were not finite.
        token_ids: the accepted tokens and one more.
        logprobs: of token_ids, or None when nobody asked.
        extra_source: who wrote the last of token_ids, see `RequestOutput.sources`.
        tree: what was proposed, if that was a tree.
    """

    num_draft_tokens: int
    accepted_len: int
    token_ids: list[int]
    logprobs: list[float] | None
    extra_source: str
    tree: StepTree | None = None


def prefill(runner: ModelRunner, requests: list[Request]) -> None:
    """Cache every committed token but the last, which is read together with the proposals."""
    pending = [r for r in requests if r.num_cached < len(r.token_ids) - 1]
    runner.prefill(
        [request.token_ids[request.num_cached : -1] for request in pending],
        [Span.of(r, r.num_cached, len(r.token_ids) - 1 - r.num_cached) for r in pending],
    )
    for request in pending:
        request.num_cached = len(request.token_ids) - 1


class AcceptanceRule(NamedTuple):
    """How the target judges: "standard" or "block"; exact unless lenience is above 1."""

    method: str = "standard"
    lenience: float = 1.0


def verify(
    runner: ModelRunner, batch: Batch, proposal: Proposal, rule: AcceptanceRule
) -> list[Verdict]:
    """Judge the proposals in one target pass; a round's only copy from the device is made here."""
    counts, spans = judged_spans(batch, proposal)
    ids = with_newest(batch, proposal).clamp(0, runner.vocab_size - 1).long()
    target_logits = runner.forward(packed(ids, counts), spans)
    if proposal.on_judged is not None:
        proposal.on_judged(target_logits, counts)
    ends = device_tensor([*accumulate(counts, initial=0)], torch.int32, batch.device)
    num_columns = batch.num_speculative_tokens + 1
    output_ids, accepted_len, logprobs = verify_chain(
        target_logits,
        ends,
        proposal.token_ids,
        batch.uniforms(num_columns, VERIFY_STREAM),
        draft_logits=proposal.draft_logits,
        **batch.sampling,
        lenience=rule.lenience,
        method=rule.method,
        backend=batch.backend,
    )
    table = torch.cat([accepted_len[:, None], output_ids, proposal.token_ids], dim=1).tolist()
    logprob_rows = wanted_logprobs(batch, logprobs)
    return [
        _verdict(row, num_columns, count - 1, row_logprobs)
        for row, count, row_logprobs in zip(table, counts, logprob_rows, strict=True)
    ]


def judged_spans(batch: Batch, proposal: Proposal) -> tuple[list[int], list[Span]]:
    """Tokens that the target reads of each request: the newest one, and what is proposed of it."""
    width = proposal.token_ids.shape[1]
    wanted = batch.num_draft_tokens
    proposed = wanted if proposal.num_tokens is None else proposal.num_tokens
    counts = [min(*pair, width) + 1 for pair in zip(wanted, proposed, strict=True)]
    spans = [
        Span.of(request, len(request.token_ids) - 1, count)
        for request, count in zip(batch.requests, counts, strict=True)
    ]
    return counts, spans


def with_newest(batch: Batch, proposal: Proposal) -> Tensor:
    """[B, 1 + K] int32: the newest token of each request, and its proposals as they are."""
    newest = [[request.token_ids[-1]] for request in batch.requests]
    return torch.cat([device_tensor(newest, torch.int32, batch.device), proposal.token_ids], dim=1)


def wanted_logprobs(batch: Batch, logprobs: Tensor) -> list[list[float]] | list[None]:
    """The rows on the host, read only if some request asks for them."""
    if any(request.params.logprobs for request in batch.requests):
        return logprobs.tolist()
    return [None] * len(batch.requests)


def _verdict(
    row: list[int], num_columns: int, wanted: int, logprobs: list[float] | None
) -> Verdict:
    accepted_len, output_ids, draft_ids = row[0], row[1 : num_columns + 1], row[num_columns + 1 :]
    proposed = next((i for i, token in enumerate(draft_ids[:wanted]) if token < 0), wanted)
    emitted = accepted_len + 1
    extra_source = "bonus" if accepted_len == proposed else "recovered"
    return Verdict(
        proposed,
        accepted_len,
        output_ids[:emitted],
        logprobs[:emitted] if logprobs else None,
        extra_source if proposed else "target",
    )
