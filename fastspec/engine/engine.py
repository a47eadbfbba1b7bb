"""The loop: propose, verify, commit, over a ragged batch of requests."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fastspec.config import EngineConfig, SamplingParams, SpecConfig
from fastspec.drafters import Drafter, Proposal
from fastspec.drafters.base import Batch
from fastspec.drafters.context import DrafterContext, DrafterSource
from fastspec.drafters.registry import plan_drafter, plan_given
from fastspec.engine.block_manager import BlockManager
from fastspec.engine.outputs import RequestOutput, StreamEvent
from fastspec.engine.pacing import Pacer, StepCostMeter
from fastspec.engine.request import EngineRequest
from fastspec.engine.request_factory import Prompt, RequestFactory, as_params_list, as_prompt_list
from fastspec.engine.schedule import Step
from fastspec.engine.scheduler import Scheduler
from fastspec.engine.speculation import Speculation
from fastspec.engine.stats import PHASES, SpecStats
from fastspec.engine.turn import Turn
from fastspec.engine.verify import Verdict, prefill, verify
from fastspec.models.cache_size import cache_blocks, model_len
from fastspec.models.encoder_decoder import check_same_kind, paged_model_of
from fastspec.models.loading import eos_token_ids, load_model, load_tokenizer
from fastspec.models.runner import ModelRunner


class Engine:
    """Generates with a Hugging Face language model, faster with a drafter, losslessly either way.

    The prompts of an encoder-decoder are its encoder's input, and its output is what its decoder
    writes after the start token.

    Args:
        target: a path, a hub id, a loaded PreTrainedModel, or "tiny" for the bundled pair.
        drafter: a path, a hub id, a loaded model or a Drafter; of a cascade several in a list,
            biggest first. None where spec.method needs none, else no speculation ("tiny" brings
            its own).
        tokenizer: of the target; None loads the one beside the target. Needed for text prompts and
            stop strings.
        spec: how drafts are made and verified: a SpecConfig, the name of its method, or a mapping
            of its fields.
        config: device, dtype and cache; an EngineConfig or a mapping of its fields.
    Raises:
        ValueError: a model or option that cannot be used; the message names it.

    Several threads may use one engine: calls take turns, and what they ask for is batched. Each
    event is delivered once: those of `generate` and `stream` to that call, all others by `step`.

    A drafter that raises harms no request: that step is decoded plainly, and the error reaches
    the caller once: from the next `step`, or at the end of a `generate` (as an exception
    whose `outputs` are complete) or of a `stream`.

    Greedy output equals plain greedy decoding of the target token for token, as far as the model's
    own forward pass gives the same logits for one token and for several; sampled output has exactly
    the target's distribution (Leviathan et al., 2211.17192; Chen et al., 2302.01318).
    """

    def __init__(
        self,
        target: str | Path | PreTrainedModel,
        drafter: DrafterSource | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        spec: SpecConfig | str | Mapping[str, Any] = SpecConfig(),  # noqa: B008 (frozen)
        config: EngineConfig | Mapping[str, Any] = EngineConfig(),  # noqa: B008 (frozen)
    ):
        spec, config = SpecConfig.of(spec), EngineConfig.of(config)
        self.config = config
        self.spec = spec
        self.stats = SpecStats()
        model = load_model("target", target, config)
        if tokenizer is None and not isinstance(target, PreTrainedModel):
            tokenizer = load_tokenizer("target", target)
        self.tokenizer = tokenizer
        target_model = paged_model_of(model, config)
        self.device = target_model.device
        self.max_model_len = model_len(config, target_model)
        self._factory = RequestFactory(
            tokenizer,
            target_model.vocab_size,
            self.max_model_len,
            eos_token_ids(model, tokenizer),
            target_model.decoder_start_id,
            config.prompt_template,
            target_model.rotary.rereads_above if target_model.rotary else None,
        )
        vocab_size = target_model.vocab_size
        self._drafting = DrafterContext(spec, config, tokenizer, vocab_size, target)
        plan = plan_drafter(replace(self._drafting, drafter=drafter))
        models = [target_model, *(plan.models if plan else ())]
        check_same_kind(target_model, models)
        num_blocks = cache_blocks(config, models, self.max_model_len)
        sizes = num_blocks, config.block_size, config.prefill_chunk_size
        self._runner = ModelRunner(target_model, *sizes, config.cuda_graphs)
        block_manager = BlockManager(num_blocks, config.block_size, config.prefix_caching)
        self._scheduler = Scheduler(block_manager, config.max_batch_size)
        self._speculation = Speculation(self.device, vocab_size, spec, config)
        meter = StepCostMeter(self._runner, block_manager, self._factory, config.backend)
        self._pacer = Pacer(spec, meter)
        num_draft_tokens = spec.num_draft_tokens(config.max_n_spec_tokens)
        self._speculation.check_count("num_speculative_tokens", num_draft_tokens)
        if plan:
            self._turn_on(plan.build(self._runner, block_manager), num_draft_tokens)
        self._turn = Turn()
        self._inboxes: dict[str, deque[StreamEvent]] = {}  # of calls of generate() and stream()
        self._events: list[StreamEvent] = []  # for step(), of all other requests
        self._abandoned: deque[str] = deque()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Run prompts to their end, batched; outputs in the order of the prompts.

        Args:
            prompts: a text, a list of texts, a list of ids, or a list of lists of ids.
            params: one for all, or one for each prompt; None = SamplingParams().
        Raises:
            ValueError: a prompt or parameter that cannot be run; nothing is started then.
        """
        prompt_list = as_prompt_list(prompts)
        request_ids = self._open(prompt_list, as_params_list(params, len(prompt_list)))
        try:
            outputs = [self._output(request_id) for request_id in request_ids]
        finally:
            for request_id in request_ids:
                self._close(request_id)
        self._raise_error(outputs)
        return outputs

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[StreamEvent]:
        """Run one prompt and yield each token as it is committed; the last event has the output.

        Leaving the loop early aborts the request.
        """
        (request_id,) = self._open([prompt], [params or SamplingParams()])
        try:
            while (event := self._next_event(request_id)).output is None:
                yield event
            yield event
        finally:
            self._close(request_id)
        self._raise_error([event.output])

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
    ) -> str:
        """Queue a request for step(); its id.

        Raises:
            ValueError: the prompt, a parameter or the id cannot be used; other requests are
                untouched.
        """
        with self._turn:
            request = self._build(prompt, params or SamplingParams(), request_id)
            self._scheduler.add(request)
        return request.request_id

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now; its output so far, or None for an unknown or finished request.

        A `generate` or `stream` that waits for it gets that output too; step() returns no further
        events of it.
        """
        with self._turn:
            return self._abort(request_id)

    @property
    def has_unfinished(self) -> bool:
        """Whether step() has work to do, or events to return."""
        is_idle = not self._scheduler.has_unfinished and not self._events
        return not is_idle or self._speculation.error is not None

    @property
    def decoder_start_id(self) -> int | None:
        """The token that the output of an encoder-decoder follows; None for a decoder."""
        return self._runner.paged_model.decoder_start_id

    @property
    def is_speculative(self) -> bool:
        """Whether a drafter is on."""
        return self._speculation.is_on

    def enable_spec_dec(
        self,
        drafter: DrafterSource | None = None,
        n_spec_tokens: int | None = None,
        use_glide_drafter: bool = False,
    ) -> None:
        """Turn speculation on between steps; without a drafter the last one is used again.

        Args:
            n_spec_tokens: tokens proposed in each step, >= 1, at most config.max_n_spec_tokens;
                None = as many as spec says.
            use_glide_drafter: load the drafter as a GLIDE model; without a drafter, the last one
                must be such a model.
        Raises:
            ValueError: there is no drafter to use, or it is not the GLIDE model asked for.
        """
        speculation = self._speculation
        if n_spec_tokens is None:
            n_spec_tokens = self.spec.num_draft_tokens(self.config.max_n_spec_tokens)
        with self._turn:
            speculation.check_count("n_spec_tokens", n_spec_tokens)
            known = speculation.known
            if drafter is None and known is None:
                raise ValueError("drafter: there is none to enable; pass one")
            if drafter is None and use_glide_drafter and not speculation.knows_glide:
                raise ValueError("use_glide_drafter: the drafter to enable is not a GLIDE model")
            if drafter is not None:
                given = {"drafter": drafter, "wants_glide": use_glide_drafter}
                plan = plan_given(replace(self._drafting, **given))
                check_same_kind(self._runner.paged_model, plan.models)
                known = plan.build(self._runner, self._scheduler.block_manager)
            self._turn_on(known, n_spec_tokens)
            self._raise_error()

    def disable_spec_dec(self) -> None:
        """Decode plainly from the next step on; the drafter is remembered."""
        with self._turn:
            self._speculation.disable(self._scheduler.running)
            self._raise_error()

    def clear_spec_dec(self) -> None:
        """Decode plainly from the next step on and let the drafter go."""
        with self._turn:
            self._speculation.disable(self._scheduler.running)
            self._speculation.known = None
            self._raise_error()

    def step(self) -> list[StreamEvent]:
        """Advance every running request by one target pass; what was committed and ended.

        Events that an interrupted step could not return are returned by the next one.

        Raises:
            Exception: whatever the drafter raised in the step before, which was decoded plainly.
        """
        with self._turn:
            if self._speculation.error is not None:
                self._raise_error()
            self._round()
            events, self._events = self._events, []
        return events

    @torch.inference_mode()
    def _round(self) -> None:
        """Schedule, propose, verify, commit: one pass of the target over all running requests."""
        while self._abandoned:
            self._drop(self._abandoned.popleft())
        times = [perf_counter()]
        running = self._schedule()
        if not running:
            return
        times.append(perf_counter())
        batch, proposal = self._speculation.propose(running)
        times.append(perf_counter())
        try:
            method, lenience = self.spec.rejection_sample_method, self.spec.relaxed_acceptance
            verdicts = verify(self._runner, batch, proposal, method, lenience)
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

    def _schedule(self) -> list[EngineRequest]:
        """The requests of the step; what the cache lacks of their tokens is read.

        Waiting requests come in waves, so that a prefix which several share is read once.
        """
        scheduler = self._scheduler
        room = self._speculation.num_speculative_tokens, self._speculation.max_nodes
        preempted = scheduler.schedule(*room)
        for request in preempted:
            self._speculation.release(request)
        if any(request.num_cached < len(request.token_ids) - 1 for request in scheduler.running):
            prefill(self._runner, scheduler.running)
        while scheduler.waiting and not preempted and (admitted := scheduler.admit(*room)):
            for request in admitted:
                if len(request.token_ids) == request.num_prompt_tokens:
                    for stats in (self.stats, request.stats):
                        stats.record_prompt(len(request.prompt_ids), request.num_cached)
            prefill(self._runner, admitted)
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
                self._end(request, "error", error)
                continue
            writers: Sequence[str] = [speculation.drafter.name] * verdict.accepted_len
            if proposal.writers is not None:
                writers = proposal.writers[index]
                if verdict.tree is not None:
                    writers = [writers[node - 1] for node in verdict.tree.path]
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
        events = self._inboxes.get(request.request_id, self._events)
        logprobs = verdict.logprobs if request.params.logprobs else None
        finish_reason = None
        kept = 0
        for index, token_id in enumerate(verdict.token_ids):
            is_draft = index < verdict.accepted_len
            source, writer = ("draft", writers[index]) if is_draft else (verdict.extra_source, None)
            logprob = logprobs[index] if logprobs else None
            finish_reason = request.append(token_id, source, writer, logprob)
            text = request.detokenizer.take() if request.detokenizer is not None else ""
            tree = verdict.tree if index == 0 else None
            ids = (token_id,)
            events.append(StreamEvent(request.request_id, text, ids, source, writer, tree=tree))
            kept += 1
            if finish_reason is not None:
                break
        request.num_cached = len(request.token_ids) - 1
        return kept, finish_reason

    def _end(
        self, request: EngineRequest, finish_reason: str, error: str | None = None
    ) -> RequestOutput:
        """Let a request go, and post its last event."""
        self._scheduler.remove(request.request_id, failed=error is not None)
        self._speculation.release(request)
        output = request.output(finish_reason, error)
        text = request.detokenizer.take(final=True) if request.detokenizer else ""
        events = self._inboxes.get(request.request_id, self._events)
        events.append(StreamEvent(request.request_id, text, output=output))
        return output

    def _abort(self, request_id: str) -> RequestOutput | None:
        request = self._scheduler.get(request_id)
        if request is None:
            return None
        output = self._end(request, "abort")
        self._events = [event for event in self._events if event.request_id != request_id]
        return output

    def _open(self, prompts: list[Prompt], params: list[SamplingParams]) -> list[str]:
        """Queue requests whose events have an inbox; their ids."""
        with self._turn:
            requests = [self._build(*pair) for pair in zip(prompts, params, strict=True)]
            for request in requests:
                self._inboxes[request.request_id] = deque()
                self._scheduler.add(request)
        return [request.request_id for request in requests]

    def _next_event(self, request_id: str) -> StreamEvent:
        """The next event of an inbox, whoever runs the step that it comes from."""
        inbox = self._inboxes[request_id]
        while not inbox:
            with self._turn:
                if not inbox:
                    self._round()
        return inbox.popleft()

    def _output(self, request_id: str) -> RequestOutput:
        while (output := self._next_event(request_id).output) is None:
            pass
        return output

    def _close(self, request_id: str) -> None:
        """Abort a request of an inbox unless it has ended, and drop the inbox."""
        if self._turn.is_mine:  # a stream collected as garbage during a step
            self._abandoned.append(request_id)
            return
        with self._turn:
            self._drop(request_id)

    def _drop(self, request_id: str) -> None:
        self._abort(request_id)
        del self._inboxes[request_id]

    def _raise_error(self, outputs: Sequence[RequestOutput] = ()) -> None:
        """Raise what a drafter or schedule raised, if it did, with complete outputs attached."""
        error, self._speculation.error = self._speculation.error, None
        if error is not None:
            error.__dict__["outputs"] = list(outputs)
            raise error

    def _turn_on(self, drafter: Drafter | None, num_draft_tokens: int) -> None:
        """Switch to a drafter with its schedule; nothing has changed where that fails."""
        assert drafter is not None
        schedule = self._pacer.schedule(drafter, num_draft_tokens)
        running = self._scheduler.running
        self._speculation.enable(drafter, num_draft_tokens, schedule, running)

    def _build(
        self, prompt: Prompt, params: SamplingParams, request_id: str | None = None
    ) -> EngineRequest:
        request = self._factory.build(prompt, params, request_id)
        if self._scheduler.get(request.request_id) or request.request_id in self._inboxes:
            raise ValueError(f"request_id: {request.request_id!r} is already running")
        self._scheduler.check_fits(request)
        return request
