"""The public engine: prompts in, outputs and events out."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, NoReturn

from tqdm.auto import tqdm
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from fastspec.config import EngineConfig, SamplingParams, SpecConfig
from fastspec.config.checks import require
from fastspec.config.options import with_hints
from fastspec.drafters.base import Drafter
from fastspec.drafters.context import DrafterContext, DrafterSource
from fastspec.drafters.draft_model import draft_model_of
from fastspec.drafters.registry import plan_drafter
from fastspec.engine.block_manager import BlockManager
from fastspec.engine.calls import Calls
from fastspec.engine.drafter_table import DrafterTable
from fastspec.engine.generation_config import params_of, warn_of_unapplied
from fastspec.engine.loop import Loop
from fastspec.engine.outputs import RequestOutput, StreamEvent, with_others
from fastspec.engine.prompt_reader import PromptReader
from fastspec.engine.prompts import Message, Prompt, as_conversations, as_prompt_list, telling_which
from fastspec.engine.ranks import SameRounds, check_options, new_seeds
from fastspec.engine.request_factory import RequestFactory, as_params_list
from fastspec.engine.scheduler import Scheduler
from fastspec.engine.stats import SpecStats
from fastspec.engine.turn import Turn
from fastspec.engine.verify import prefill, verify
from fastspec.models.cache_size import cache_blocks, model_len
from fastspec.models.chat import chat_prompt_ids
from fastspec.models.loading import eos_token_ids, load_model, load_tokenizer, pad_token_ids
from fastspec.models.model_kinds import check_same_kind, paged_model_of, prefix_obstacle
from fastspec.models.named import usual_spec
from fastspec.models.runner import runner_of
from fastspec.models.shared_vocabulary import vocabulary_of
from fastspec.models.twin import TwinSource


class Engine:
    """Generates with a Hugging Face language model, faster with a drafter and without loss.

    Greedy output equals plain greedy decoding of the target token for token, as far as the model's
    own forward pass gives the same logits for one token and for several; sampled output has exactly
    the target's distribution (Leviathan et al., 2211.17192; Chen et al., 2302.01318).

    The prompts of an encoder-decoder are its encoder's input; its output is what the decoder
    writes after the start token.

    Args:
        target: a path, a hub id, a loaded PreTrainedModel, or "tiny" for the bundled pair.
        drafter: a path, a hub id, a loaded model or a Drafter; for a cascade a list of them,
            biggest first. None if spec.method needs no model ("tiny" and "smollm2" bring their
            own); method "auto" then decodes plainly.
        tokenizer: the target's tokenizer; None = the one stored with a target given by path or hub
            id, none for a loaded model. Needed for text prompts and stop strings.
        spec: how drafts are made and verified: a SpecConfig, the name of its method, or a mapping
            of its fields.
        config: device, dtype and cache; an EngineConfig or a mapping of its fields.
    Raises:
        ValueError: a model or option cannot be used; the message names it.

    Several threads may use one engine: calls take turns, and their requests are batched. Each
    event is delivered once: to the `generate` or `stream` call that made the request, or by `step`.
    A forked process can use an engine made before only after `torch.set_num_threads(1)`: torch's
    threads do not survive a fork, and calls raise a RuntimeError instead of waiting for them.

    A drafter that raises harms no request: that step is decoded plainly, and the caller gets the
    error once: from the next `step`, or at the end of a `generate` (as an exception whose
    `outputs` are complete) or of a `stream`.
    """

    _applies_generation_config = False  # whether requests come with the model's already applied

    @with_hints
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
        self.stats = SpecStats()
        model = load_model("target", target, config)
        if not isinstance(target, (str, Path)):
            target = model
        elif tokenizer is None:
            tokenizer = load_tokenizer("target", target)
        self.tokenizer = tokenizer
        self._generation_config = getattr(model, "generation_config", None)
        self._pad_ids = pad_token_ids(model, tokenizer)
        if not self._applies_generation_config:
            warn_of_unapplied(model, tokenizer)
        check_options(model, spec, config)
        if drafter is None:
            spec = usual_spec(spec, target, on_cpu=model.device.type == "cpu")
        paged_target = paged_model_of(model, config)
        ranks = paged_target.ranks
        self.device = paged_target.device
        self.max_model_len = model_len(config, paged_target)
        vocab_size = paged_target.vocab_size
        self._factory = RequestFactory(
            PromptReader(tokenizer, vocab_size, self.max_model_len, config.prompt_template),
            paged_target,
            eos_token_ids(model),
            not config.prefix_caching and prefix_obstacle(paged_target, config) is None,
            new_seeds(ranks),
        )
        drafting = DrafterContext(spec, config, tokenizer, vocab_size, target, target_model=model)
        plan = plan_drafter(replace(drafting, drafter=drafter))
        models = [paged_target, *(plan.models if plan else ())]
        check_same_kind(paged_target, models)
        num_blocks = cache_blocks(config, models, self.max_model_len)
        self._runner = runner_of(paged_target, num_blocks, config)
        block_manager = BlockManager(num_blocks, config.block_size, config.prefix_caching)
        self._scheduler = Scheduler(block_manager, config.max_batch_size)
        parts = self._runner, block_manager, self._factory
        self._drafter_table = DrafterTable(drafting, plan, *parts)
        self._speculation = self._drafter_table[None]
        make_loop = Loop if ranks is None else partial(SameRounds, ranks)
        self._loop = make_loop(
            scheduler=self._scheduler,
            speculations=self._drafter_table,
            prefill=partial(prefill, self._runner),
            verify=partial(verify, self._runner),
            stats=self.stats,
            chunk_size=config.prefill_chunk_size,
        )
        self._turn = Turn()
        source = TwinSource(model) if target is model else None
        parts = self._factory, self._loop, self._drafter_table, self._turn, source
        self._calls = Calls(*parts)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = False,
        *,
        generation_config: GenerationConfig | None = None,
    ) -> list[RequestOutput]:
        """Run prompts to completion in batches; return outputs in the order of the prompts.

        Args:
            prompts: a text, a list of ids, an integer tensor or array (two dimensions = a batch),
                a tokenizer's output (tokens its attention_mask hides are dropped), vLLM's
                {"prompt": text} or {"prompt_token_ids": ids}, or a list of any of these.
            params: one for all prompts, or one per prompt; None = SamplingParams().
            use_tqdm: show a progress bar with tokens per second and acceptance rate.
            generation_config: transformers' GenerationConfig instead of params, with the defaults
                and semantics of its `generate`: fields that are None are those of the model's own
                config, greedy unless do_sample, max_length includes the prompt.
        Raises:
            ValueError: a prompt or parameter cannot be used, which of several is said at the end;
                no request has been started.
        """
        prompt_list = as_prompt_list(prompts, pad_ids=self._pad_ids)
        if generation_config is not None:
            require("params", params, params is None, "None with generation_config")
            for place, prompt in enumerate(prompt_list):
                with self._turn, telling_which(place, len(prompt_list)):  # a step tokenizes too
                    prompt_list[place] = self._factory.reader.ids(prompt)
            is_decoder = self.decoder_start_id is None
            lengths = [len(ids) if is_decoder else 1 for ids in prompt_list]
            of_model = self._generation_config
            params = [params_of(generation_config, length, of_model) for length in lengths]
        params_list = as_params_list(params, len(prompt_list))
        samples: list[dict[int, RequestOutput]] = [{} for _ in prompt_list]
        stats, start = SpecStats(), perf_counter()
        with tqdm(total=len(prompt_list), desc="Processed prompts", disable=not use_tqdm) as bar:
            for event in self._calls.run(prompt_list, params_list, samples):
                if event.output is None:
                    continue
                place = event.prompt_index
                stats.add(event.output.stats)
                speed = {"tok/s": f"{stats.num_output_tokens / (perf_counter() - start):.1f}"}
                if (rate := stats.acceptance_rate) is not None:
                    speed["acceptance"] = f"{rate:.2f}"
                bar.set_postfix(speed, refresh=False)
                bar.update(len(samples[place]) == params_list[place].n)
        return [with_others(outputs) for outputs in samples]

    def prompt_reader(self) -> PromptReader:
        """Return a reader that turns prompts into ids as `generate` does, for another thread."""
        return self._factory.reader.for_another_thread()

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Any] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Answer one or several conversations, formatted by the tokenizer's chat template.

        Args:
            messages: a list of {"role": ..., "content": ...}, or a list of such conversations.
            params, use_tqdm: as for `generate`.
            add_generation_prompt: end the prompt with the tokens that open an answer.
            tools: functions or JSON schemas that the template lists.
            chat_template: a Jinja template to use instead of the tokenizer's own.
            chat_template_kwargs: further arguments for the tokenizer's apply_chat_template, such as
                the variables that the template reads.
        Raises:
            ValueError: no tokenizer or template, or one that refuses messages or reads no tools.
        """
        several = as_conversations(messages)
        given = {"tools": tools, "add_generation_prompt": add_generation_prompt}
        if chat_template is not None:
            require("chat_template", chat_template, isinstance(chat_template, str), "a string")
            given["chat_template"] = chat_template
        if taken := given.keys() & set(chat_template_kwargs or ()):
            raise ValueError(f"chat_template_kwargs: {min(taken)} cannot be set here")
        options = given | dict(chat_template_kwargs or {})
        with self._turn:
            prompts = [chat_prompt_ids(self.tokenizer, each, **options) for each in several]
        return self.generate(prompts, params, use_tqdm)

    def stream(
        self,
        prompt: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[StreamEvent]:
        """Run one or several prompts and yield an event for each token as it is committed.

        The last event of each prompt carries its output. `event.prompt_index` says which prompt an
        event belongs to and, with n > 1, `event.index` which sample. Leaving the loop early aborts
        unfinished requests. Prompts and params are as for `generate`.
        """
        prompt_list = as_prompt_list(prompt, "prompt", pad_ids=self._pad_ids)
        samples: list[dict[int, RequestOutput]] = [{} for _ in prompt_list]
        return self._calls.run(prompt_list, as_params_list(params, len(prompt_list)), samples)

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        decoder_input_ids: Sequence[int] | None = None,
    ) -> str:
        """Queue a request for step() and return its id.

        Args:
            prompt, params: see `generate`.
            request_id: an id for the request; None generates one.
            decoder_input_ids: for an encoder-decoder, the beginning of its output: the start token
                and any tokens already written.
        Raises:
            ValueError: the prompt, a parameter or the id cannot be used; other requests are
                unaffected.
        """
        with self._turn:
            params = SamplingParams() if params is None else params
            self._calls.check_target()
            samples = self._calls.build(prompt, params, request_id, decoder_input_ids)
            for request in samples:
                self._loop.add(request)
        return samples[0].public_id

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now and return its output so far; None if it is unknown or finished.

        With n > 1 this ends all unfinished samples; the output is that of the first of them, with
        the rest in its `others`.

        A `generate` or `stream` call waiting for the request also gets that output; step() returns
        no further events for it.
        """
        with self._turn:
            return self._loop.abort(request_id)

    @property
    def has_unfinished(self) -> bool:
        """Whether step() has work to do, or events to return."""
        if self._scheduler.has_unfinished or self._loop.events or self._loop.queues_are_torn:
            return True
        known = [*self._drafter_table.values()]  # a copy, as another thread may add one
        return any(each.error for each in known)

    @property
    def decoder_start_id(self) -> int | None:
        """The token that an encoder-decoder's output starts after; None for a decoder."""
        return self._runner.paged_model.decoder_start_id

    @property
    def spec(self) -> SpecConfig:
        """The options given, with what was chosen for the current drafter or the last one."""
        return self._speculation.spec

    @property
    def drafter(self) -> Drafter | None:
        """The current drafter, or the last one if speculation is off."""
        return self._speculation.last_drafter

    @property
    def drafters(self) -> dict[str | None, int]:
        """K of each drafter by its name for `SamplingParams.drafter`; None is the engine's own."""
        known = [*self._drafter_table.items()]  # a copy, as another thread may add one
        return {name: each.num_speculative_tokens for name, each in known}

    @property
    def is_speculative(self) -> bool:
        """Whether speculation is on."""
        return self._speculation.is_on

    def enable_spec_dec(
        self,
        drafter: DrafterSource | None = None,
        n_spec_tokens: int | None = None,
        use_glide_drafter: bool = False,
    ) -> None:
        """Turn speculation on from the next step; without a drafter, reuse the last one.

        Args:
            drafter: as for the engine; one instead of the current drafter, also of a whole cascade
                and the copy of the target in it.
            n_spec_tokens: tokens proposed per step, from 1 to 1024 and up to
                config.max_n_spec_tokens; None = the number in spec. A number that is given also
                limits copies beside a draft model (suffix_tokens, tree_suffix).
            use_glide_drafter: load the drafter as a GLIDE model; without a drafter, the last one
                must be such a model.
        Raises:
            ValueError: no drafter, or one that does not support these options; nothing changes.
            Exception: an error a drafter raised in the last step, as from `step`; the change is
                made.
        """
        with self._turn:
            running = self._scheduler.running
            self._drafter_table.enable(drafter, n_spec_tokens, use_glide_drafter, running)
            self._drafter_table.raise_unreported_error()

    def disable_spec_dec(self) -> None:
        """Decode plainly from the next step on; the drafter is remembered."""
        with self._turn:
            self._speculation.disable(self._scheduler.running)
            self._drafter_table.raise_unreported_error()

    def clear_spec_dec(self) -> None:
        """Decode plainly from the next step on and discard the drafter."""
        with self._turn:
            self._speculation.clear(self._scheduler.running)
            self._drafter_table.raise_unreported_error()

    def add_drafter(
        self,
        name: str,
        spec: SpecConfig | str | Mapping[str, Any],
        drafter: DrafterSource | None = None,
    ) -> None:
        """Add a drafter that requests select with `SamplingParams(drafter=name)`.

        Requests with different drafters share a batch; those of one drafter are drafted for and
        verified together, so a step takes one target pass per drafter in use. As with
        `enable_spec_dec`, a draft model's cache comes on top of config.kv_cache_memory. Turning the
        engine's own drafter off or on does not affect the others.

        Args:
            spec: as for the engine: method, K, acceptance rule, schedule.
            drafter: as for the engine.
        Raises:
            ValueError: the name is in use, or the drafter or an option cannot be used.
        """
        with self._turn:
            self._drafter_table.add(name, SpecConfig.of(spec), drafter)

    def remove_drafter(self, name: str) -> None:
        """Remove a drafter that `add_drafter` added.

        Raises:
            ValueError: there is no drafter of that name, or unfinished requests use it.
        """
        with self._turn:
            unfinished = (*self._scheduler.running, *self._scheduler.waiting)
            self._drafter_table.remove(name, unfinished)

    def add_corpus(self, texts: Prompt | Sequence[Prompt]) -> None:
        """Add texts that suffix decoding may copy from, in addition to those of requests.

        Each drafter of the engine with a method `add_corpus` receives them as lists of token ids.

        Args:
            texts: as the prompts of `generate`; no special tokens are added.
        Raises:
            ValueError: a text is not a valid prompt, or no drafter reads a corpus.
        """
        read, given = self._factory.reader.plain_ids, as_prompt_list(texts, "texts", "texts")
        with self._turn:
            self._drafter_table.add_corpus([read("texts", text) for text in given])

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes; needed after the target's or a draft's weights have changed.

        They may change in place. With other modules, parameters, hooks or adapters a target needs a
        new engine: this method, and requests when none is running, raise a ValueError then.

        Raises:
            ValueError: requests are unfinished, or the target needs a new engine.
        """
        with self._turn:
            if self._scheduler.has_unfinished:
                raise ValueError("reset_prefix_cache: expected no unfinished requests")
            self._calls.check_target()
            self._scheduler.block_manager.reset()

    @property
    def num_cache_tokens(self) -> int:
        """Capacity of the cache in tokens, for all requests together."""
        return self._scheduler.block_manager.num_tokens

    def metrics(self) -> dict[str, Any]:
        """Return gauges and counters since the engine was made, under vLLM's metric names.

        request_success counts ended requests by reason; kv_cache_usage_perc is between 0 and 1.
        `RequestOutput.stats.to_metrics()` has the counters of one request.
        """
        blocks = self._scheduler.block_manager
        return {
            "num_requests_running": len(self._scheduler.running),
            "num_requests_waiting": len(self._scheduler.waiting),
            "kv_cache_usage_perc": 1 - blocks.num_free / blocks.num_blocks,
            **self.stats.to_metrics(),
        }

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError("an Engine cannot be copied or pickled; make another one of the same model")

    def __repr__(self) -> str:
        paged_target = self._runner.paged_model
        dtype = str(paged_target.dtype).removeprefix("torch.")
        drafter, tokens = self._speculation.drafter, None
        if (draft := draft_model_of(drafter)) is not None:
            tokens = vocabulary_of(draft.runner.paged_model.model)
        part = f" drafting {tokens} tokens," if tokens else ""
        return (
            f"Engine({type(paged_target.model).__name__}, drafter={drafter.name!r},{part}"
            f" dtype={dtype}, device={self.device},"
            f" num_blocks={self._scheduler.block_manager.num_blocks})"
        )

    def step(self) -> list[StreamEvent]:
        """Advance every running request by one target pass and return the events of that step.

        Up to config.prefill_chunk_size prompt tokens are read; the pass that reads the end of a
        prompt is the first that emits tokens. Requests whose prompts are not fully read yet emit
        none, so there may be no events. Events that an interrupted step could not return are
        returned by the next one.

        Raises:
            Exception: whatever a drafter raised in the previous step, which was decoded plainly.
        """
        with self._turn:
            if any(each.error for each in self._drafter_table.values()):
                self._drafter_table.raise_unreported_error()
            self._loop.round()
            events, self._loop.events = self._loop.events, []
        return events

    def take_drafter_errors(self) -> list[Exception]:
        """Return errors of drafters that the next step would raise; they only cost drafts."""
        with self._turn:
            errors = [each.take_error() for each in self._drafter_table.values()]
        return [error for error in errors if error is not None]
