"""The loop: propose, verify, commit, over a ragged batch of requests."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fastspec.block_manager import BlockManager
from fastspec.commit import Ending, commit_round
from fastspec.config import EngineConfig, SamplingParams, SpecConfig
from fastspec.drafters.factory import DrafterFactory, DrafterSource
from fastspec.models.cache_size import cache_blocks, model_len
from fastspec.models.encoder_decoder import check_same_kind, paged_model_of
from fastspec.models.loading import eos_token_ids, load_model, load_tokenizer
from fastspec.outputs import RequestOutput, StreamEvent
from fastspec.pacing import Pacer, StepCostMeter
from fastspec.request import Request
from fastspec.request_factory import Prompt, RequestFactory, as_params_list, as_prompt_list
from fastspec.runner import ModelRunner
from fastspec.scheduler import Scheduler
from fastspec.speculation import Speculation
from fastspec.stats import PhaseClock, SpecStats
from fastspec.tree_verification import verify_trees
from fastspec.verification import AcceptanceRule, prefill, verify


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
        )
        self._drafter_factory = DrafterFactory(spec, config, tokenizer, target_model.vocab_size)
        plan = self._drafter_factory.plan(target, drafter)
        models = [target_model, *(plan.models if plan else ())]
        check_same_kind(target_model, models)
        num_blocks = cache_blocks(config, models, self.max_model_len)
        sizes = num_blocks, config.block_size, config.prefill_chunk_size
        self._runner = ModelRunner(target_model, *sizes, config.cuda_graphs)
        block_manager = BlockManager(num_blocks, config.block_size, config.prefix_caching)
        self._scheduler = Scheduler(block_manager, config.max_batch_size)
        first = plan.build(self._runner, block_manager) if plan else None
        most = config.max_n_spec_tokens
        self._speculation = Speculation(first, spec.num_draft_tokens(most), most)
        meter = StepCostMeter(self._runner, block_manager, self._factory, config.backend)
        self._pacer = Pacer(spec, meter)
        self._pace()
        self._ids_in_use: set[str] = set()

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
        requests = [self._build(*pair) for pair in zip(prompt_list, params_list, strict=True)]
        for request in requests:
            self._add(request)
        wanted = {request.request_id: index for index, request in enumerate(requests)}
        outputs: dict[int, RequestOutput] = {}
        while len(outputs) < len(requests):
            for event in self.step():
                if event.output is not None and event.request_id in wanted:
                    outputs[wanted[event.request_id]] = event.output
        return [outputs[index] for index in range(len(requests))]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[StreamEvent]:
        """Run one prompt and yield each token as it is committed; the last event has the output.

        Leaving the loop early aborts the request.
        """
        request_id = self.add_request(prompt, params)
        finished = False
        try:
            while not finished:
                for event in self.step():
                    if event.request_id == request_id:
                        finished = finished or event.output is not None
                        yield event
        finally:
            self.abort(request_id)

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
        request = self._build(prompt, params or SamplingParams(), request_id)
        self._add(request)
        return request.request_id

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now; its output so far, or None when it is not (or no longer) here."""
        request = self._scheduler.remove(request_id)
        if request is None:
            return None
        self._forget(request)
        return request.output("abort")

    @property
    def has_unfinished(self) -> bool:
        """Whether step() has something to do."""
        return self._scheduler.has_unfinished

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
            use_glide_drafter: read the drafter as a GLIDE model. The last one is used as what it
                is in any case.
        Raises:
            ValueError: a drafter that is missing, or no GLIDE model where one is asked for.
        """
        if n_spec_tokens is None:
            n_spec_tokens = self.spec.num_draft_tokens(self.config.max_n_spec_tokens)
        self._speculation.check_count("n_spec_tokens", n_spec_tokens)
        if drafter is None and not self._speculation.has_known_drafter:
            raise ValueError("drafter: there is none to enable; pass one")
        if drafter is None and use_glide_drafter and not self._speculation.knows_glide:
            raise ValueError("use_glide_drafter: the drafter to enable is no GLIDE model")
        chosen = None
        if drafter is not None:
            plan = self._drafter_factory.plan_given(drafter, use_glide_drafter)
            check_same_kind(self._runner.paged_model, plan.models)
            chosen = plan.build(self._runner, self._scheduler.block_manager)
        self._speculation.enable(chosen, n_spec_tokens, self._scheduler.running)
        self._pace()

    def disable_spec_dec(self) -> None:
        """Decode plainly from the next step on; the drafter is remembered."""
        self._speculation.disable(self._scheduler.running)

    def clear_spec_dec(self) -> None:
        """Decode plainly from the next step on and let the drafter go."""
        self._speculation.clear(self._scheduler.running)

    @torch.inference_mode()
    def step(self) -> list[StreamEvent]:
        """Advance every running request by one target pass; what was committed and ended."""
        clock = PhaseClock()
        self._schedule()
        running = list(self._scheduler.running)
        if not running:
            return []
        clock.lap("prefill")
        block_size, backend = self.config.block_size, self.config.backend
        batch = self._speculation.batch(running, block_size, self.device, backend)
        proposal = self._speculation.propose(batch)
        clock.lap("propose")
        rule = AcceptanceRule(self.spec.rejection_sample_method, self.spec.relaxed_acceptance)
        judge = verify if proposal.parents is None else verify_trees
        verdicts = judge(self._runner, batch, proposal, rule)
        clock.lap("verify")
        events, endings = commit_round(batch, proposal, verdicts, self._speculation, self.stats)
        events += [self._end(ending) for ending in endings]
        clock.lap("commit")
        for stats in (self.stats, *(request.stats for request in running)):
            for phase, seconds in clock.laps.items():
                stats.seconds[phase] += seconds
        return events

    def _schedule(self) -> None:
        """Choose the requests of the step and read what the cache lacks of their tokens.

        Waiting requests come in waves, so that a prefix which several share is read once.
        """
        num_draft, num_nodes = self._speculation.num_draft_tokens, self._speculation.num_nodes
        preempted = self._scheduler.schedule(num_draft, num_nodes)
        self._speculation.release(preempted)
        prefill(self._runner, self._scheduler.running)
        while not preempted and (admitted := self._scheduler.admit(num_draft, num_nodes)):
            for request in admitted:
                if len(request.token_ids) == request.num_prompt_tokens:
                    for stats in (self.stats, request.stats):
                        stats.record_prompt(len(request.prompt_ids), request.num_cached)
            prefill(self._runner, admitted)

    def _end(self, ending: Ending) -> StreamEvent:
        """Let a request go; its last event."""
        request, finish_reason, error = ending
        self._scheduler.remove(request.request_id, failed=error is not None)
        self._forget(request)
        output = request.output(finish_reason, error)
        text = request.detokenizer.take(final=True) if request.detokenizer else ""
        return StreamEvent(request.request_id, text, output=output)

    def _pace(self) -> None:
        """Give the drafter that is on its schedule."""
        speculation = self._speculation
        num_draft = speculation.num_draft_tokens
        speculation.schedule = self._pacer.schedule(speculation.drafter, num_draft)

    def _build(
        self, prompt: Prompt, params: SamplingParams, request_id: str | None = None
    ) -> Request:
        request = self._factory.build(prompt, params, request_id)
        if request.request_id in self._ids_in_use:
            raise ValueError(f"request_id: {request.request_id!r} is already running")
        self._scheduler.check_fits(request)
        return request

    def _add(self, request: Request) -> None:
        self._ids_in_use.add(request.request_id)
        self._scheduler.add(request)

    def _forget(self, request: Request) -> None:
        self._ids_in_use.discard(request.request_id)
        self._speculation.release([request])
