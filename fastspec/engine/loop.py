"""The round used by the engine and the simulator: schedule, propose, verify, commit."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, pairwise
from time import perf_counter
from typing import NamedTuple

import torch

from fastspec.config import SpecConfig
from fastspec.drafters import Proposal
from fastspec.drafters.base import Batch, common_prefix_len
from fastspec.drafters.grammar import GrammarError
from fastspec.engine.outputs import RequestOutput, StreamEvent, Verdict
from fastspec.engine.request import EngineRequest
from fastspec.engine.schedule import Step
from fastspec.engine.scheduler import Scheduler
from fastspec.engine.speculation import Speculation
from fastspec.engine.stats import SpecStats

_INTERRUPTED = "an interrupt came while the engine changed what it knows of this request"


class End(NamedTuple):
    """How a request ends.

    Attributes:
        is_request_error: whether the error is due to the request's parameters.
    """

    finish_reason: str
    error: str | None = None
    is_request_error: bool = False


@dataclass(eq=False)
class Loop:
    """Advances the requests of a scheduler in rounds, and posts an event for each token.

    Attributes:
        scheduler: holds the requests.
        speculations: their drafters by `SamplingParams.drafter`; drafters may be added and removed
            between rounds.
        prefill: caches up to this many committed tokens, see `fastspec.engine.verify.prefill`.
        verify: verifies a proposal by a drafter's rule, against a model's logits or against an
            output written earlier.
        stats: counters summed over all requests.
        chunk_size: tokens of texts read in a round, over all requests.
        inboxes: events by request id, for requests that a caller waits for.
        events: events of all other requests.
        abandoned: ids of inboxes to drop before the next round, including those of ended requests.
        queues_are_torn: whether queues and blocks are being changed; if that is still so when they
            are used next, an interrupt has left them half changed.
        unreleased: requests that have ended or lost their blocks, and that drafters still know.
    """

    scheduler: Scheduler
    speculations: dict[str | None, Speculation]
    prefill: Callable[[list[EngineRequest], int], int]
    verify: Callable[[Batch, Proposal, SpecConfig], list[Verdict]]
    stats: SpecStats
    chunk_size: int
    inboxes: dict[str, deque[StreamEvent]] = field(default_factory=dict, init=False)
    events: list[StreamEvent] = field(default_factory=list, init=False)
    abandoned: deque[str] = field(default_factory=deque, init=False)
    queues_are_torn: bool = field(default=False, init=False)
    unreleased: deque[EngineRequest] = field(default_factory=deque, init=False)
    _name_numbers: Iterator[int] = field(default_factory=partial(count, 1), init=False)

    @torch.inference_mode()
    def round(self) -> None:
        """Schedule, then propose, verify and commit for the requests of each drafter.

        Requests that get no drafts join the first target pass whose acceptance rule draws the same
        tokens from a seed as theirs, or get a pass of their own.
        """
        if self.queues_are_torn:
            self._reset()
        if self.unreleased:
            self._release()
        for request in [each for each in self.scheduler.running if each.is_torn]:
            self._end(request, End("error", _INTERRUPTED))
        if self.abandoned:
            self.drop_abandoned()
        start = perf_counter()
        ready = self._schedule()
        seconds = perf_counter() - start
        for stats in (self.stats, *(request.stats for request in self.scheduler.running)):
            stats.seconds["prefill"] += seconds
        # By whether the pass also reads text before, which gives it another shape.
        groups: dict[tuple[Speculation, bool], list[EngineRequest]] = {}
        others: dict[tuple[bool, bool], list[EngineRequest]] = {}
        for request in ready:
            speculation, length = self.speculations[request.params.drafter], len(request.token_ids)
            reads_text = request.num_cached < length - 1
            is_first = length == request.num_prompt_tokens
            if speculation.limit(request) and not (
                is_first and speculation.must_start_plainly(request)
            ):
                groups.setdefault((speculation, reads_text), []).append(request)
            else:
                others.setdefault((speculation.is_coupled, reads_text), []).append(request)
        for (speculation, reads_text), requests in groups.items():
            joining = others.pop((speculation.is_coupled, reads_text), [])
            self._step(speculation, requests, joining, len(ready))
        for requests in others.values():
            speculation = self.speculations[requests[0].params.drafter]
            self._step(speculation, [], requests, len(ready))

    def use_of(self, request_id: str) -> str | None:
        """Say what keeps an id from a new request; None if nothing does."""
        if self.scheduler.samples(request_id) or request_id in self.inboxes:
            return "is already running"
        if any(event.request_id == request_id for event in self.events):
            return "has events that step() has not returned yet"
        return None

    def new_id(self) -> str:
        """Return an id that no request has, or has had from here."""
        names = (f"request-{number}" for number in self._name_numbers)
        return next(name for name in names if self.use_of(name) is None)

    def add(self, request: EngineRequest) -> None:
        """Queue a request that fits."""
        if self.queues_are_torn:
            self._reset()
        self.queues_are_torn = True
        self.scheduler.add(request)
        self.queues_are_torn = False

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request and all its samples now; return its output so far, None if unknown."""
        if self.queues_are_torn:
            self._reset()
        requests = self.scheduler.samples(request_id)
        if not requests:
            return None
        output, *others = [self._end(request, End("abort")) for request in requests]
        ended = {(request_id, request.index) for request in requests}
        self.events = [e for e in self.events if (e.request_id, e.index) not in ended]
        return replace(output, others=tuple(others)) if others else output

    def drop_abandoned(self) -> None:
        """Drop the abandoned inboxes, and abort their requests that have not ended."""
        while self.abandoned:
            self.abort(self.abandoned[0])
            self.inboxes.pop(self.abandoned[0], None)
            self.abandoned.popleft()  # last, so that after an interrupt the rest is done again

    def _step(
        self,
        speculation: Speculation,
        requests: list[EngineRequest],
        others: list[EngineRequest],
        batch_size: int,
    ) -> None:
        """Run one target pass over the requests of a drafter and others that get no drafts.

        No fault of the drafter or of one request harms the others:
        - a proposal that the kernels refuse is dropped, and the requests are decoded plainly;
        - requests that fail, some of whose draft logits are not finite, are verified again without
          those drafts;
        - `verify` accepts drafts up to a row of the target that is not finite, which plain decoding
          might never reach.
        What then still has no verdict fails in `_commit`.
        """
        times, running = [perf_counter()], requests + others
        reads_text = running[0].num_cached < len(running[0].token_ids) - 1
        phases = "propose", "prefill" if reads_text else "verify", "commit"
        try:
            batch, proposal = speculation.propose(requests, others, batch_size)
            times.append(perf_counter())
            try:
                verdicts = self.verify(batch, proposal, speculation.spec)
            except ValueError as error:  # such as a tree that is none, seen by the kernels alone
                if not any(batch.num_draft_tokens):
                    raise
                batch, proposal = speculation.refuse(error, batch)
                verdicts = self.verify(batch, proposal, speculation.spec)
            failed = [b for b, verdict in enumerate(verdicts) if verdict.accepted_len < 0]
            if failed:  # perhaps for their draft logits alone
                places, usable = speculation.without_non_finite_drafts(batch, proposal, failed)
                again = self.verify(batch.at(places), usable, speculation.spec) if places else []
                for place, verdict in zip(places, again, strict=True):
                    verdicts[place] = verdict
            times.append(perf_counter())
            self._commit(speculation, running, batch, proposal, verdicts, reads_text)
        except BaseException:
            for request in running:  # the drafter would wait for a commit that never comes
                speculation.release(request)
            raise
        times.append(perf_counter())
        for phase, (start, end) in zip(phases, pairwise(times), strict=True):
            for stats in (self.stats, *(request.stats for request in running)):
                stats.seconds[phase] += end - start

    def _reach(self, request: EngineRequest) -> int:
        """Tokens the next step may cache; a tree needs room even past the request's last token."""
        speculation, length = self.speculations[request.params.drafter], len(request.token_ids)
        num = speculation.limit(request)
        if num and speculation.max_nodes:
            return length + speculation.max_nodes
        return min(length + num, request.max_len)

    def _release(self) -> None:
        """Let all drafters forget the requests that are unreleased; any may know them."""
        while self.unreleased:
            for speculation in self.speculations.values():
                speculation.release(self.unreleased[0])
            self.unreleased.popleft()  # last, so that after an interrupt the rest is done again

    def _schedule(self) -> list[EngineRequest]:
        """Read one chunk of uncached tokens, and return the requests that take part in this step.

        Requests are served in order of arrival, and take no part until their tokens are read, or
        are left to the pass that verifies what follows them. Waiting ones are admitted in waves, so
        that a prefix shared by several is read once.
        """
        scheduler, left = self.scheduler, self.chunk_size
        self.queues_are_torn = True
        preempted = scheduler.schedule(self._reach)
        self.unreleased.extend(preempted)
        self.queues_are_torn = False
        if preempted:
            self._release()
        for request in preempted:
            for stats in (self.stats, request.stats):
                stats.num_preemptions += 1
        ends: list[EngineRequest] = []
        if unread := [r for r in scheduler.running if r.num_cached < len(r.token_ids) - 1]:
            left -= self._read(unread, left, ends)
        while left and scheduler.waiting and not preempted:
            self.queues_are_torn = True
            admitted = scheduler.admit(self._reach)
            self.queues_are_torn = False
            if not admitted:
                if not (ends and scheduler.awaits_prefix):
                    break
                left -= self.prefill(ends, left)
                ends.clear()
                continue
            for request in [each for each in admitted if each.is_torn]:  # by an interrupted abort
                self._end(request, End("error", _INTERRUPTED))
                admitted.remove(request)
            for request in admitted:
                if not request.stats.num_prompt_tokens:  # it has not been preempted
                    for stats in (self.stats, request.stats):
                        stats.record_prompt(len(request.prompt_ids), request.num_cached)
            left -= self._read(admitted, left, ends)
        return [r for r in scheduler.running if r.num_cached == len(r.token_ids) - 1 or r in ends]

    def _read(self, requests: list[EngineRequest], most: int, ends: list[EngineRequest]) -> int:
        """Cache up to `most` tokens in all, in order of requests; return how many.

        If these and the texts of `ends` can all be read whole, they are left to the pass that
        verifies what follows them, and appended to `ends`; otherwise all are read by one pass.
        """
        unread = [r for r in requests if r.num_cached < len(r.token_ids) - 1]
        num = sum(len(request.token_ids) - request.num_cached for request in ends + unread)
        if num <= most and all(map(self._reads_at_once, unread)):
            ends += unread
            return 0
        num = self.prefill(ends + requests, most)
        ends.clear()
        return num

    def _reads_at_once(self, request: EngineRequest) -> bool:
        """Whether the pass that reads the text may verify what follows it, drafts or none."""
        is_first = len(request.token_ids) == request.num_prompt_tokens
        reads_target = self.speculations[request.params.drafter].reads_target
        return not request.lacks_prompt_logprobs and (is_first or not reads_target)

    def _commit(
        self,
        speculation: Speculation,
        running: list[EngineRequest],
        batch: Batch,
        proposal: Proposal,
        verdicts: list[Verdict],
        reads_text: bool,
    ) -> None:
        """Append the tokens of each verdict, notify drafter and schedule, and update counters."""
        ended: list[tuple[EngineRequest, bool]] = []  # and whether they failed
        for index, (request, verdict) in enumerate(zip(running, verdicts, strict=True)):
            if verdict.accepted_len < 0:
                self._post_output(request, _failure_of(request))
                ended.append((request, True))
                continue
            writers: Sequence[str] = [speculation.drafter.name] * verdict.accepted_len
            if proposal.writers is not None:
                writers = proposal.writers[index]
                if verdict.parents:
                    writers = [writers[node - 1] for node in verdict.path]
            if proposal.branch is not None:
                writer, paths = proposal.branch
                shared = common_prefix_len(paths[index], verdict.output_ids[: len(writers)])
                writers = [writer] * shared + list(writers[shared:])
            kept, end = self._append(request, verdict, writers)
            proposed = kept if kept <= verdict.accepted_len else verdict.num_draft_tokens
            accepted = min(kept, verdict.accepted_len)
            passes = proposal.passes[index] if proposal.passes else None
            for stats in (self.stats, request.stats):
                stats.record_step(proposed, accepted, kept, passes)
                stats.num_prompt_steps += reads_text
            if end is not None:
                self._post_output(request, end)
                ended.append((request, end.error is not None))
            drafts = batch.own_limits is None or batch.own_limits[index] > 0
            if speculation.schedule is not None and drafts:
                wanted = (proposal.num_asked or batch.num_draft_tokens)[index]
                if wanted is not None:
                    speculation.record(request, Step(wanted, proposed, accepted))
        try:
            speculation.commit(batch, [max(verdict.accepted_len, 0) for verdict in verdicts])
        finally:  # last, so that the drafter is not told of requests after their release
            for request, failed in ended:
                self._remove(request, failed)

    def _append(
        self, request: EngineRequest, verdict: Verdict, writers: Sequence[str]
    ) -> tuple[int, End | None]:
        """Append a verdict's tokens until the request ends; return their number, and its end."""
        events = self.inboxes.get(request.public_id, self.events)
        logprobs = verdict.logprobs if request.params.logprobs is not None else None
        for index, token_id in enumerate(verdict.output_ids):
            is_draft = index < verdict.accepted_len
            source, writer = ("draft", writers[index]) if is_draft else (verdict.extra_source, None)
            logprob = logprobs[index] if logprobs else None
            top = verdict.top_logprobs[index] if verdict.top_logprobs else None
            request.is_torn = True
            try:
                finish_reason = request.append(token_id, source, writer, logprob, top)
            except Exception as error:  # the tokenizer's, or a grammar's: the others go on
                request.give_up_text()
                return index, End("error", f"its text cannot be continued: {error!r}")
            text = request.detokenizer.take() if request.detokenizer is not None else ""
            tree = verdict if verdict.parents and index == 0 else None
            event = StreamEvent(
                request.public_id,
                text,
                token_ids=(token_id,),
                source=source,
                drafter=writer,
                tree=tree,
                logprob=logprob,
                top_logprobs=top,
                index=request.index,
                prompt_index=request.prompt_index,
            )
            events.append(event)
            request.num_cached = len(request.token_ids) - 1
            if finish_reason is not None:
                return index + 1, End(finish_reason)
            request.is_torn = False
        return len(verdict.output_ids), None

    def _end(self, request: EngineRequest, end: End) -> RequestOutput:
        """Post the output of a request with its last event, and remove it."""
        output = self._post_output(request, end)
        self._remove(request, failed=end.error is not None)
        return output

    def _remove(self, request: EngineRequest, failed: bool) -> None:
        self.queues_are_torn = True
        self.scheduler.remove(request, failed)
        self.unreleased.append(request)
        self.queues_are_torn = False
        self._release()

    def _post_output(self, request: EngineRequest, end: End) -> RequestOutput:
        request.is_torn = True
        try:
            output = request.output(*end)
        except Exception as raised:  # the tokenizer's
            request.give_up_text()
            error = end.error or f"its text cannot be decoded: {raised!r}"
            end = End("error", error, end.is_request_error)
            output = request.output(*end)
        if request.has_ended:
            return output
        for stats in (self.stats, request.stats):
            stats.finish_reasons[end.finish_reason] += 1
        text = request.detokenizer.take(final=True) if request.detokenizer else ""
        event = StreamEvent(
            request.public_id,
            text,
            output=output,
            index=request.index,
            prompt_index=request.prompt_index,
        )
        self.inboxes.get(request.public_id, self.events).append(event)
        request.has_ended = True
        return output

    def _reset(self) -> None:
        """Free all blocks and end all requests, as an interrupt left them half changed."""
        requests = self.scheduler.all_requests()
        for request in requests:  # known until all have ended
            request.give_up_text()
            self._post_output(request, End("error", _INTERRUPTED))
        self.unreleased.extend(requests)
        self.scheduler.reset()
        self.queues_are_torn = False
        self._release()


def _failure_of(request: EngineRequest) -> End:
    """Say why no token could follow."""
    where = len(request.token_ids)
    error = f"logits after {where} tokens contain NaN or inf, or no finite value"
    if request.rules is None:
        return End("error", error)
    failure = request.rules.failure
    if isinstance(failure, GrammarError):
        return End("error", str(failure), is_request_error=True)
    if failure is not None:
        return End("error", f"the request's logit rules raised {failure!r}")
    dead_end = request.rules.dead_end(request.token_ids)
    if dead_end is not None:
        return End("error", dead_end, is_request_error=True)
    if request.params.logits_processors:
        error += ", or its logits processors made it so"
    return End("error", error + ", or the request allows none of the remaining tokens")
