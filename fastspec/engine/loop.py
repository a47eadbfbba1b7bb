"""The round that the engine and the simulator share: schedule, propose, verify, commit."""

from collections import deque
from collections.abc import Callable, Sequence
from time import perf_counter

import torch

from fastspec.drafters import Proposal
from fastspec.drafters.base import Batch
from fastspec.engine.outputs import RequestOutput, StreamEvent, Verdict
from fastspec.engine.request import EngineRequest
from fastspec.engine.schedule import Step
from fastspec.engine.scheduler import Scheduler
from fastspec.engine.speculation import Speculation
from fastspec.engine.stats import PHASES, SpecStats


class Loop:
    """Advances the requests of a scheduler in rounds, and posts an event for each token.

    Args:
        scheduler: the requests.
        speculation: proposes for them.
        prefill: caches every committed token but the last, which is read with the proposals.
        verify: judges proposals, by a model's logits or by what it has written before.
        stats: counters of all requests together.
    Attributes:
        inboxes: by request id, the events of those that somebody waits for.
        events: those of all other requests.
        abandoned: ids of inboxes to drop before the next round, those of ended requests too.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        speculation: Speculation,
        prefill: Callable[[list[EngineRequest]], None],
        verify: Callable[[Batch, Proposal], list[Verdict]],
        stats: SpecStats,
    ):
        self._scheduler = scheduler
        self._speculation = speculation
        self._prefill = prefill
        self._verify = verify
        self.stats = stats
        self.inboxes: dict[str, deque[StreamEvent]] = {}
        self.events: list[StreamEvent] = []
        self.abandoned: deque[str] = deque()

    @torch.inference_mode()
    def round(self) -> None:
        """Schedule, propose, verify, commit: one pass of the target over all running requests."""
        while self.abandoned:
            self.drop(self.abandoned.popleft())
        times = [perf_counter()]
        running = self._schedule()
        if not running:
            return
        times.append(perf_counter())
        batch, proposal = self._speculation.propose(running)
        times.append(perf_counter())
        try:
            verdicts = self._verify(batch, proposal)
        except BaseException:
            for request in running:  # the drafter waits for a commit that will not come
                self._speculation.release(request)
            raise
        times.append(perf_counter())
        self._commit(running, batch, proposal, verdicts)
        times.append(perf_counter())
        for phase, start, end in zip(PHASES, times, times[1:], strict=False):
            for stats in (self.stats, *(request.stats for request in running)):
                stats.seconds[phase] += end - start

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now: its output so far; None for one that is not there."""
        request = self._scheduler.get(request_id)
        if request is None:
            return None
        output = self._end(request, "abort")
        self.events = [event for event in self.events if event.request_id != request_id]
        return output

    def drop(self, request_id: str) -> None:
        """Abort a request of an inbox unless it has ended, and drop the inbox."""
        self.abort(request_id)
        del self.inboxes[request_id]

    def _schedule(self) -> list[EngineRequest]:
        """The requests of the step; what the cache lacks of their tokens is read.

        Waiting requests come in waves, so that a prefix which several share is read once.
        """
        scheduler = self._scheduler
        room = self._speculation.num_speculative_tokens, self._speculation.max_nodes
        preempted = scheduler.schedule(*room)
        for request in preempted:
            self._speculation.release(request)
            for stats in (self.stats, request.stats):
                stats.num_preemptions += 1
        if any(request.num_cached < len(request.token_ids) - 1 for request in scheduler.running):
            self._prefill(scheduler.running)
        while scheduler.waiting and not preempted and (admitted := scheduler.admit(*room)):
            for request in admitted:
                if len(request.token_ids) == request.num_prompt_tokens:
                    for stats in (self.stats, request.stats):
                        stats.record_prompt(len(request.prompt_ids), request.num_cached)
            self._prefill(admitted)
        return list(scheduler.running)

    def _commit(
        self,
        running: list[EngineRequest],
        batch: Batch,
        proposal: Proposal,
        verdicts: list[Verdict],
    ) -> None:
        """Give each request the tokens of its verdict, tell drafter and schedule, and count."""
        speculation = self._speculation
        for index, (request, verdict) in enumerate(zip(running, verdicts, strict=True)):
            if verdict.accepted_len < 0:
                where = len(request.token_ids)
                error = f"logits after {where} tokens hold NaN or inf, or nothing finite"
                if request.rules is not None:
                    failure = request.rules.failure
                    error += ", or the request allows no token that is left"
                    error = error if failure is None else f"logits_processors: {failure!r}"
                self._end(request, "error", error)
                continue
            writers: Sequence[str] = [speculation.drafter.name] * verdict.accepted_len
            if proposal.writers is not None:
                writers = proposal.writers[index]
                if verdict.parents:
                    writers = [writers[node - 1] for node in verdict.path]
            kept, finish_reason = self._append(request, verdict, writers)
            judged = kept if kept <= verdict.accepted_len else verdict.num_draft_tokens
            accepted = min(kept, verdict.accepted_len)
            if speculation.schedule is not None:
                speculation.record(request, Step(batch.num_draft_tokens[index], judged, accepted))
            passes = proposal.passes[index] if proposal.passes else None
            for stats in (self.stats, request.stats):
                stats.record_step(judged, accepted, kept, passes)
            if finish_reason is not None:
                self._end(request, finish_reason)
        speculation.commit(batch, [max(verdict.accepted_len, 0) for verdict in verdicts])

    def _append(
        self, request: EngineRequest, verdict: Verdict, writers: Sequence[str]
    ) -> tuple[int, str | None]:
        """Append a verdict's tokens up to the one that ends the request: how many, and why."""
        events = self.inboxes.get(request.request_id, self.events)
        logprobs = verdict.logprobs if request.params.logprobs is not None else None
        finish_reason = None
        kept = 0
        for index, token_id in enumerate(verdict.output_ids):
            is_draft = index < verdict.accepted_len
            source, writer = ("draft", writers[index]) if is_draft else (verdict.extra_source, None)
            logprob = logprobs[index] if logprobs else None
            top = verdict.top_logprobs[index] if verdict.top_logprobs else None
            finish_reason = request.append(token_id, source, writer, logprob, top)
            text = request.detokenizer.take() if request.detokenizer is not None else ""
            tree = verdict if verdict.parents and index == 0 else None
            event = StreamEvent(
                request.request_id,
                text,
                (token_id,),
                source,
                writer,
                tree=tree,
                logprob=logprob,
                top_logprobs=top,
                index=request.index,
            )
            events.append(event)
            kept += 1
            if finish_reason is not None:
                break
        request.num_cached = len(request.token_ids) - 1
        return kept, finish_reason

    def _end(
        self, request: EngineRequest, finish_reason: str, error: str | None = None
    ) -> RequestOutput:
        """Let a request go, and post its last event."""
        self._scheduler.remove(request, failed=error is not None)
        self._speculation.release(request)
        for stats in (self.stats, request.stats):
            stats.finish_reasons[finish_reason] += 1
        output = request.output(finish_reason, error)
        text = request.detokenizer.take(final=True) if request.detokenizer else ""
        events = self.inboxes.get(request.request_id, self.events)
        event = StreamEvent(request.request_id, text, output=output, index=request.index)
        events.append(event)
        return output
