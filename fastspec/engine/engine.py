"""What users call: prompts in, outputs and events out, whatever the rounds do in between."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fastspec.config import EngineConfig, SamplingParams, SpecConfig
from fastspec.config.checks import require
from fastspec.drafters.context import DrafterContext, DrafterSource
from fastspec.drafters.registry import plan_drafter, plan_given
from fastspec.engine.block_manager import BlockManager
from fastspec.engine.loop import Loop
from fastspec.engine.outputs import RequestOutput, StreamEvent
from fastspec.engine.pacing import Pacer
from fastspec.engine.request import EngineRequest
from fastspec.engine.request_factory import Prompt, RequestFactory, as_params_list, as_prompt_list
from fastspec.engine.scheduler import Scheduler
from fastspec.engine.speculation import Speculation
from fastspec.engine.stats import SpecStats
from fastspec.engine.turn import Turn
from fastspec.engine.verify import prefill, verify
from fastspec.models.cache_size import cache_blocks, model_len
from fastspec.models.encoder_decoder import check_same_kind, paged_model_of, prefix_obstacle
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
        if not isinstance(target, (str, Path)):
            target = model
        elif tokenizer is None:
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
            not config.prefix_caching and prefix_obstacle(target_model, config) is None,
        )
        vocab_size = target_model.vocab_size
        self._drafting = DrafterContext(
            spec, config, tokenizer, vocab_size, target, target_model=model
        )
        plan = plan_drafter(replace(self._drafting, drafter=drafter))
        models = [target_model, *(plan.models if plan else ())]
        check_same_kind(target_model, models)
        num_blocks = cache_blocks(config, models, self.max_model_len)
        sizes = num_blocks, config.block_size, config.prefill_chunk_size
        self._runner = ModelRunner(target_model, *sizes, config.cuda_graphs)
        block_manager = BlockManager(num_blocks, config.block_size, config.prefix_caching)
        self._scheduler = Scheduler(block_manager, config.max_batch_size)
        self._speculation = self._new_speculation(spec)
        speculations = {None: self._speculation, "none": self._new_speculation(SpecConfig("none"))}
        sides = partial(prefill, self._runner), partial(verify, self._runner)
        chunk_size = config.prefill_chunk_size
        self._loop = Loop(self._scheduler, speculations, *sides, self.stats, chunk_size)
        num_draft_tokens = self._speculation.usual_num_tokens
        self._speculation.check_count("num_speculative_tokens", num_draft_tokens)
        if plan:
            drafter = plan.build(self._runner, block_manager)
            self._speculation.enable(drafter, num_draft_tokens, [])
        self._turn = Turn()

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
        params_list = as_params_list(params, len(prompt_list))
        request_ids = self._open(prompt_list, params_list)
        try:
            pairs = zip(request_ids, params_list, strict=True)
            outputs = [self._output(request_id, one.n) for request_id, one in pairs]
        finally:
            for request_id in request_ids:
                self._close(request_id)
        self._raise_error(outputs)
        return outputs

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[StreamEvent]:
        """Run one prompt and yield each token as it is committed; the last event has the output.

        Where n > 1, the events of the samples are mixed, and each has a last one. Leaving the loop
        early aborts the request.
        """
        params = params or SamplingParams()
        (request_id,) = self._open([prompt], [params])
        outputs: list[RequestOutput] = []
        try:
            while len(outputs) < params.n:
                event = self._next_event(request_id)
                if event.output is not None:
                    outputs.append(event.output)
                yield event
        finally:
            self._close(request_id)
        self._raise_error(outputs)

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
            samples = self._build(prompt, params or SamplingParams(), request_id)
            for request in samples:
                self._scheduler.add(request)
        return samples[0].public_id

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now; its output so far, or None for an unknown or finished request.

        Where n > 1, all samples that go on end; the output is that of the first of them, which has
        the others.

        A `generate` or `stream` that waits for it gets that output too; step() returns no further
        events of it.
        """
        with self._turn:
            return self._loop.abort(request_id)

    @property
    def has_unfinished(self) -> bool:
        """Whether step() has work to do, or events to return."""
        is_idle = not self._scheduler.has_unfinished and not self._loop.events
        return not is_idle or any(each.error for each in [*self._loop.speculations.values()])

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
            n_spec_tokens = speculation.usual_num_tokens
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
            assert known is not None
            speculation.enable(known, n_spec_tokens, self._scheduler.running)
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

    def add_drafter(
        self,
        name: str,
        spec: SpecConfig | str | Mapping[str, Any],
        drafter: DrafterSource | None = None,
    ) -> None:
        """Make a drafter known beside the engine's own, for `SamplingParams(drafter=name)`.

        Requests of unlike drafters share a batch; those of each are proposed for and verified
        together, so a step takes one target pass for each drafter in use. Like that of
        `enable_spec_dec`, a draft model's cache comes on top of config.kv_cache_memory. Turning the
        engine's own drafter off and on changes nothing for the others.

        Args:
            spec: as of the engine: the method, K, the rule of acceptance, the schedule.
            drafter: as of the engine.
        Raises:
            ValueError: the name is in use, or the drafter or an option cannot be used.
        """
        with self._turn:
            speculations, is_name = self._loop.speculations, isinstance(name, str) and name != ""
            free = is_name and name not in speculations
            require("name", name, free, "a name that no drafter of the engine has")
            spec = SpecConfig.of(spec)
            plan = plan_drafter(replace(self._drafting, spec=spec, drafter=drafter))
            if plan is None:
                raise ValueError('spec: there is nothing to draft with; "none" is known already')
            check_same_kind(self._runner.paged_model, plan.models)
            speculation = self._new_speculation(spec)
            num_draft_tokens = speculation.usual_num_tokens
            speculation.check_count("num_speculative_tokens", num_draft_tokens)
            known = plan.build(self._runner, self._scheduler.block_manager)
            speculation.enable(known, num_draft_tokens, [])
            speculations[name] = speculation

    def remove_drafter(self, name: str) -> None:
        """Let go what `add_drafter` added.

        Raises:
            ValueError: there is none of that name, or unfinished requests use it.
        """
        with self._turn:
            speculations = self._loop.speculations
            names = [each for each in speculations if each not in (None, "none")]
            require("name", name, name in names, f"one of {names}")
            requests = (*self._scheduler.running, *self._scheduler.waiting)
            users = {request.public_id for request in requests if request.params.drafter == name}
            if users:
                raise ValueError(f"name: {name!r} drafts for requests that go on: {sorted(users)}")
            error = speculations.pop(name).error
            if error is not None:
                raise error

    def step(self) -> list[StreamEvent]:
        """Advance every running request by one target pass; what was committed and ended.

        Up to config.prefill_chunk_size prompt tokens are read before; requests whose prompts are
        not read yet take no part, so there may be no events. Events that an interrupted step could
        not return are returned by the next one.

        Raises:
            Exception: whatever the drafter raised in the step before, which was decoded plainly.
        """
        with self._turn:
            if any(each.error for each in self._loop.speculations.values()):
                self._raise_error()
            self._loop.round()
            events, self._loop.events = self._loop.events, []
        return events

    def _open(self, prompts: list[Prompt], params: list[SamplingParams]) -> list[str]:
        """Queue requests whose events have an inbox; their ids."""
        with self._turn:
            requests = [self._build(*pair) for pair in zip(prompts, params, strict=True)]
            request_ids = [samples[0].public_id for samples in requests]
            self._loop.inboxes |= {request_id: deque() for request_id in request_ids}
            for request in chain(*requests):
                self._scheduler.add(request)
        return request_ids

    def _next_event(self, request_id: str) -> StreamEvent:
        """The next event of an inbox, whoever runs the step that it comes from."""
        inbox = self._loop.inboxes[request_id]
        while not inbox:
            with self._turn:
                if not inbox:
                    self._loop.round()
        return inbox.popleft()

    def _output(self, request_id: str, num: int) -> RequestOutput:
        """The first of so many samples, with the others, when all have ended."""
        outputs: dict[int, RequestOutput] = {}
        while len(outputs) < num:
            event = self._next_event(request_id)
            if event.output is not None:
                outputs[event.index] = event.output
        others = tuple(outputs[index] for index in range(1, num))
        return replace(outputs[0], others=others) if others else outputs[0]

    def _close(self, request_id: str) -> None:
        """Abort a request of an inbox unless it has ended, and drop the inbox."""
        if self._turn.is_mine:  # a stream collected as garbage during a step
            self._loop.abandoned.append(request_id)
            return
        with self._turn:
            self._loop.drop(request_id)

    def _raise_error(self, outputs: Sequence[RequestOutput] = ()) -> None:
        """Raise what a drafter or schedule raised, if it did, with complete outputs attached."""
        for speculation in self._loop.speculations.values():
            error, speculation.error = speculation.error, None
            if error is not None:
                error.__dict__["outputs"] = list(outputs)
                raise error

    def _new_speculation(self, spec: SpecConfig) -> Speculation:
        """One with nothing turned on yet."""
        target, blocks = self._runner.paged_model, self._scheduler.block_manager
        pacer = Pacer(spec, self._runner, blocks, self._factory, self.config.backend)
        sizes = self.device, target.vocab_size
        return Speculation(*sizes, spec, self.config, target.chains_only, pacer)

    def _build(
        self, prompt: Prompt, params: SamplingParams, request_id: str | None = None
    ) -> list[EngineRequest]:
        samples = self._factory.build(prompt, params, request_id)
        request = samples[0]
        name = request.public_id
        if self._scheduler.samples(name) or name in self._loop.inboxes:
            raise ValueError(f"request_id: {name!r} is already running")
        speculations, drafter = self._loop.speculations, request.params.drafter
        names = [each for each in speculations if each is not None]
        require("drafter", drafter, drafter in speculations, f"one of {names}")
        speculations[drafter].check_request(request.params)
        self._scheduler.check_fits(request)
        return samples
