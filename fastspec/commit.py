"""The end of a round: each request gets the tokens of its verdict, and is counted."""

from collections.abc import Sequence
from typing import NamedTuple

from fastspec.drafters import Proposal
from fastspec.economics.formulas import Step
from fastspec.outputs import StreamEvent
from fastspec.request import Batch, Request
from fastspec.speculation import Speculation
from fastspec.stats import SpecStats
from fastspec.verification import Verdict


class Ending(NamedTuple):
    """A request that ends with this round, and why; `error` where it failed."""

    request: Request
    finish_reason: str
    error: str | None = None


def commit_round(
    batch: Batch,
    proposal: Proposal,
    verdicts: list[Verdict],
    speculation: Speculation,
    total: SpecStats,
) -> tuple[list[StreamEvent], list[Ending]]:
    """Commit the verdicts of a batch, tell drafter and schedule, and count in `total` as well."""
    events: list[StreamEvent] = []
    endings: list[Ending] = []
    for index, (request, verdict) in enumerate(zip(batch.requests, verdicts, strict=True)):
        if verdict.accepted_len < 0:
            where = len(request.token_ids)
            error = f"logits after {where} tokens hold NaN or inf, or nothing finite"
            endings.append(Ending(request, "error", error))
            continue
        writers = speculation.writers(proposal, index, verdict.tree)
        new_events, finish_reason = commit(request, verdict, writers)
        events += new_events
        kept = len(new_events)
        was_cut = kept <= verdict.accepted_len
        judged = kept if was_cut else verdict.num_draft_tokens
        step = Step(batch.num_draft_tokens[index], judged, min(kept, verdict.accepted_len))
        speculation.record(request, step)
        for stats in (total, request.stats):
            stats.record_step(step.proposed, step.accepted, kept)
            stats.record_passes(proposal.passes[index] if proposal.passes else {})
        if finish_reason is not None:
            endings.append(Ending(request, finish_reason))
    speculation.commit(batch, [max(verdict.accepted_len, 0) for verdict in verdicts])
    return events, endings


def commit(
    request: Request, verdict: Verdict, writers: Sequence[str | None]
) -> tuple[list[StreamEvent], str | None]:
    """Append a verdict's tokens up to the one that ends the request: events, finish reason."""
    events: list[StreamEvent] = []
    finish_reason = None
    for index, token_id in enumerate(verdict.token_ids):
        is_draft = index < verdict.accepted_len
        source, writer = ("draft", writers[index]) if is_draft else (verdict.extra_source, None)
        logprob = verdict.logprobs[index] if verdict.logprobs and request.params.logprobs else None
        finish_reason = request.append(token_id, source, writer, logprob)
        text = request.detokenizer.take() if request.detokenizer is not None else ""
        tree = verdict.tree if index == 0 else None
        events.append(StreamEvent(request.request_id, text, (token_id,), source, writer, tree=tree))
        if finish_reason is not None:
            break
    request.num_cached = len(request.token_ids) - 1
    return events, finish_reason
