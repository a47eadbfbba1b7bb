"""transformers' `generate` run by an engine, through its `custom_generate` or directly.

`generate` prepares inputs, configuration, processors and criteria as usual; the engine decodes.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.utils import (
    GenerateDecoderOnlyOutput,
    GenerateEncoderDecoderOutput,
)

from fastspec.config import EngineConfig, SamplingParams, SpecConfig
from fastspec.config.checks import refuse, require
from fastspec.drafters.context import DrafterSource
from fastspec.engine.engine import Engine
from fastspec.engine.generation_config import is_off
from fastspec.engine.hf_processors import processed, split_rules, split_warpers
from fastspec.engine.prompts import as_prompt_list

_HEURISTIC = ("heuristic", "heuristic_transient")  # same here: nothing carries over between calls
# GenerationConfig fields for decoding or results that are not supported, or for unused drafting.
_REFUSED = (
    *("num_beams", "num_beam_groups", "constraints", "force_words_ids", "penalty_alpha"),
    *("dola_layers", "guidance_scale", "output_scores", "output_logits", "output_attentions"),
    *("output_hidden_states", "cache_implementation", "is_assistant"),
    *("assistant_ensemble_weight", "assistant_confidence_threshold"),
)
_ASKED = (
    "num_assistant_tokens, prompt_lookup_num_tokens, assistant_early_exit, use_mtp,"
    " speculation_type"
)
_DEFAULT_ASSISTANT_TOKENS = 20
_DEFAULT_NGRAM_SIZE = 2
# Inputs that `generate` prepares for a forward pass and the engine makes itself.
_PREPARED = {
    "attention_mask",
    "cache",
    "cache_params",
    "encoder_outputs",
    "logits_to_keep",
    "past_key_values",
    "position_ids",
    "use_cache",
}


class _EngineOfGenerate(Engine):
    """An engine whose requests come from `generate`, which applies the generation_config."""

    _applies_generation_config = True


class HFGenerator:
    """Decodes for `model.generate(..., custom_generate=generator)`, speculatively with a drafter.

    It keeps one engine, which takes time to build; `hf_generate` builds one per call. Statistics
    are in its `engine.stats`. Several threads may use it.

    Args:
        model: the model whose `generate` will call it, or a PeftModel around that model.
        drafter, spec, config: as for `Engine`.
    Raises:
        ValueError: the engine cannot use the model or an option.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        drafter: DrafterSource | None = None,
        spec: SpecConfig | str | Mapping[str, Any] = SpecConfig(),  # noqa: B008 (frozen)
        config: EngineConfig | Mapping[str, Any] = EngineConfig(),  # noqa: B008 (frozen)
    ):
        self.engine = _EngineOfGenerate(model, drafter, spec=spec, config=config)
        self._model = model if isinstance(model, PreTrainedModel) else model.get_base_model()

    def generate(self, inputs: Any = None, **options: Any) -> Any:
        """Return what `model.generate` returns for these arguments; see `hf_generate`."""
        return _prepare_and_call(self, self._model, inputs, **options)

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        *,
        generation_config: GenerationConfig,
        logits_processor: Sequence[Callable],
        stopping_criteria: Sequence[Callable],
        token_streamer: Any = None,
        inputs_tensor: Tensor | None = None,
        **model_kwargs: Any,
    ) -> Any:
        """Decode the inputs that `model.generate` has prepared."""
        if model is not self._model:
            raise ValueError(f"model: this generator is for another {type(self._model).__name__}")
        asked = _asked_spec(generation_config)
        if asked not in (None, self.engine.spec):
            raise ValueError(f"{_ASKED}: set by spec= here")
        _refuse(model, generation_config, model_kwargs)
        batch = _Batch.of(input_ids, inputs_tensor, model_kwargs, self.engine.decoder_start_id)
        if inputs_tensor is not None and batch.is_encoded and not model.training:
            _check_encoded(model, inputs_tensor, model_kwargs)
        limit, ends, criteria = _split_criteria(stopping_criteria)
        vocab_size = model.config.get_text_config(decoder=True).vocab_size
        ends = [token_id for token_id in ends if 0 <= token_id < vocab_size]
        room = None if limit is None else limit - input_ids.shape[1]
        read = input_ids.shape[1] if batch.is_encoded else max(map(len, batch.given))
        longest = read + (room or 1)
        if longest > self.engine.max_model_len:
            raise ValueError(
                f"max_length: {longest} prompt and output tokens, but the engine has room for"
                f" {self.engine.max_model_len}"
            )
        pad_id = generation_config.pad_token_id
        if pad_id is None and ends:
            pad_id = ends[0]
        if pad_id is None and criteria and len(batch.given) > 1:
            raise ValueError("pad_token_id: needed for rows that stop at different lengths")
        params = batch.params(logits_processor, generation_config.do_sample, ends, room)
        ids = _write(self.engine, batch, params, criteria, pad_id or 0, token_streamer)
        if not generation_config.return_dict_in_generate:
            return ids
        kinds: Any = GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput
        return kinds[batch.is_encoded](sequences=ids)


def hf_generate(
    model: PreTrainedModel,
    inputs: Any = None,
    *,
    drafter: DrafterSource | None = None,
    assistant_model: DrafterSource | None = None,
    spec: SpecConfig | str | Mapping[str, Any] | None = None,
    config: EngineConfig | Mapping[str, Any] | None = None,
    token_streamer: Any = None,
    inputs_tensor: Tensor | None = None,
    **options: Any,
) -> Any:
    """Run `model.generate` on an engine: speculative, batched, the same greedy output.

    Call it with the arguments of `model.generate`, or pass it to that as `custom_generate`; then
    pass a drafter as `drafter=` and a streamer as `token_streamer=`, names that transformers
    forwards. Sampling draws its seeds from torch's generator, so `set_seed` makes it repeatable.

    Args:
        inputs: token ids [B, n], or what a tokenizer returns for return_tensors="pt".
        drafter, spec, config: as for `Engine`; assistant_model is an alias of drafter.
        options: arguments of `model.generate`, including streamer and tokenizer.
    Returns:
        Token ids [B, m]; with return_dict_in_generate, an output whose `sequences` they are.
    Raises:
        ValueError: the engine does not support an argument; the message names it.
    """
    if drafter is not None and assistant_model is not None:
        raise ValueError("assistant_model: an alias of drafter; pass only one")
    drafter = assistant_model if drafter is None else drafter
    prepared: Any = options.get("generation_config")
    if not hasattr(prepared, "_eos_token_tensor"):  # the mark of a call by `generate`
        given = {"drafter": drafter, "spec": spec, "config": config}
        given["token_streamer"] = token_streamer
        return _prepare_and_call(hf_generate, model, inputs, **given, **options)
    for name in ("prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp"):
        if drafter is not None:
            given = getattr(prepared, name) or None
            refuse(name, given, "not with assistant_model or another drafter")
    asked = _asked_spec(prepared)
    if asked is not None and spec is not None:
        raise ValueError(f"{_ASKED}: cannot go with spec")
    if config is None:
        encoded = 0 if inputs_tensor is None else inputs_tensor.shape[1]
        longest = max(prepared.max_length, encoded + 1)
        text_config = model.config.get_text_config(decoder=True)
        most = getattr(text_config, "max_position_embeddings", None) or longest
        require("max_length", longest, longest <= most, f"at most the model's {most} positions")
        config = EngineConfig(max_batch_size=len(inputs), max_model_len=longest)
    generator = HFGenerator(model, drafter, asked or spec or SpecConfig(), config)
    passed_on = {"token_streamer": token_streamer, "inputs_tensor": inputs_tensor}
    return generator(model, inputs, **passed_on, **options)


class _Batch(NamedTuple):
    """The rows of one call.

    Attributes:
        input_ids: [B, n], the beginning of the output, padded on either side.
        given: the ids of each row that the engine reads, without padding.
        starts: where these begin in each padded row.
        is_encoded: whether an encoder reads them rather than the decoder that continues them.
    """

    input_ids: Tensor
    given: list[list[int]]
    starts: list[int]
    is_encoded: bool

    @classmethod
    def of(
        cls,
        input_ids: Tensor,
        encoded: Tensor | None,
        model_kwargs: Mapping[str, Any],
        decoder_start_id: int | None,
    ) -> "_Batch":
        is_encoded = decoder_start_id is not None
        read = input_ids
        if is_encoded:
            if encoded is None or encoded.ndim != 2 or encoded.is_floating_point():
                raise ValueError("input_ids: required, the encoder reads no other input")
            if input_ids.tolist() != [[decoder_start_id]] * len(input_ids):
                raise ValueError(f"decoder_input_ids: expected [{decoder_start_id}] in each row")
            read = encoded.repeat_interleave(len(input_ids) // len(encoded), dim=0)
        mask = model_kwargs.get("attention_mask")
        mask = torch.ones_like(read) if mask is None else mask.long()
        given: list[Any] = as_prompt_list({"input_ids": read, "attention_mask": mask})
        starts = [row.index(1) if 1 in row else 0 for row in mask.tolist()]
        positions = model_kwargs.get("position_ids")
        if positions is not None:
            expected = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 0)
            # [B, n], or [axes, B, n] of models that also place images, equal where there are none.
            fits = positions.ndim in (2, 3) and positions.shape[-1] == mask.shape[1]
            if not fits or bool((positions != expected).any()):
                raise ValueError("position_ids: expected those that follow from attention_mask")
        return cls(input_ids, given, starts, is_encoded)

    def params(
        self, processors: Sequence[Callable], do_sample: bool, ends: list[int], room: int | None
    ) -> list[SamplingParams]:
        """Return the parameters of each row, with seeds drawn from torch's generator."""
        num_rows, length = self.input_ids.shape
        paddings = [0] * num_rows if self.is_encoded else self.starts
        rest, sampling = split_warpers(processors)
        rules, rest = split_rules(rest, ends, length, paddings)
        if room is not None:
            rules["min_tokens"] = min(rules["min_tokens"], room)
        seeds = torch.randint(2**63 - 1, (num_rows,)).tolist() if do_sample else [0] * num_rows
        return [
            SamplingParams(
                **(sampling if do_sample else {"temperature": 0}),
                **rules,
                max_tokens=room,
                stop_token_ids=ends,
                ignore_eos=True,
                seed=seed,
                logits_processors=[self._processor(rest, row)] if rest else [],
            )
            for row, seed in enumerate(seeds)
        ]

    def _processor(self, processors: Sequence[Callable], row: int) -> Callable:
        """Wrap batch processors for one row; they see its text as padded in the batch.

        Raises:
            ValueError: the row is padded behind its prompt, where they would take padding for text.
        """
        num_rows, length = self.input_ids.shape
        num_given = 1 if self.is_encoded else len(self.given[row])
        if not self.is_encoded and self.starts[row] + num_given < length:
            names = ", ".join(sorted({type(each).__name__ for each in processors}))
            raise ValueError(
                f"attention_mask: row {row} is padded on the right, which {names} would read as"
                " text; pad on the left"
            )

        def process(input_ids: Tensor, scores: Tensor) -> Tensor:
            start = self.input_ids[row : row + 1].to(input_ids.device)
            text = torch.cat([start, input_ids[:, num_given:]], dim=1)
            return processed(processors, text, scores, row, num_rows)

        return process


def _write(
    engine: Engine,
    batch: _Batch,
    params: list[SamplingParams],
    criteria: Callable | None,
    pad_id: int,
    streamer: Any,
) -> Tensor:
    """Return the rows with the engine's output appended, up to where a criterion holds."""
    num_rows, start = batch.input_ids.shape
    room = params[0].max_tokens or engine.max_model_len
    ids = torch.full((num_rows, start + room), pad_id, device="cpu")
    ids[:, :start] = batch.input_ids
    ends, is_done, num_shown = [start] * num_rows, [False] * num_rows, start
    if streamer is not None:
        streamer.put(ids[:, :start].clone())
    for event in engine.stream(batch.given, params):
        row = event.prompt_index
        if event.output is not None:
            if event.output.error is not None:
                raise ValueError(event.output.error)
            is_done[row] = True
        elif not is_done[row]:
            ids[row, ends[row]] = event.token_ids[0]
            ends[row] += 1
            if criteria is not None:
                texts = ids[row : row + 1, : ends[row]].expand(num_rows, -1)
                is_done[row] = bool(criteria(texts.to(batch.input_ids.device), None)[row])
            if is_done[row]:
                engine.abort(event.request_id)
        if streamer is None:
            continue
        known = [end for end, done in zip(ends, is_done, strict=True) if not done]
        while num_shown < min(known, default=max(ends)):
            streamer.put(ids[:, num_shown].clone())
            num_shown += 1
    if streamer is not None:
        streamer.end()
    return ids[:, : max(ends)].to(batch.input_ids.device)


def _prepare_and_call(
    decode: Callable,
    model: Any,
    inputs: Any,
    streamer: Any = None,
    tokenizer: Any = None,
    **options: Any,
) -> Any:
    """Call `model.generate` with `decode`, and pass on arguments that it would not forward."""
    if isinstance(inputs, Mapping):
        options, inputs = {**inputs, **options}, None
    for name, ids in {"inputs": inputs, "input_ids": options.get("input_ids")}.items():
        fits = ids is None or (isinstance(ids, Tensor) and ids.ndim == 2)
        shown = getattr(ids, "shape", ids)
        require(name, shown, fits, "a tensor of token ids [B, n], as from a tokenizer")
    for name in ("assistant_tokenizer", "synced_gpus"):
        if options.pop(name, None):
            raise ValueError(f"{name}: not supported")
    if streamer is not None:
        options["token_streamer"] = streamer
    why = "set in model.generation_config: set None there and pass stop_strings= here"
    refuse("stop_strings", getattr(model.generation_config, "stop_strings", None), why)
    config = options.get("generation_config")
    healing = options.get("token_healing") or getattr(config, "token_healing", None)
    refuse("token_healing", healing or None, "transformers gives custom decoding no tokenizer")
    stop = options.pop("stop_strings", None) or getattr(config, "stop_strings", None)
    if stop is not None:
        if tokenizer is None:
            raise ValueError("stop_strings: these need a tokenizer; pass tokenizer=")
        given = options.get("stopping_criteria") or []
        criterion = StopStringCriteria(tokenizer, stop)
        options["stopping_criteria"] = StoppingCriteriaList([criterion, *given])
        if config is not None:
            options["generation_config"] = config = copy(config)
            config.stop_strings = None
    return model.generate(inputs, custom_generate=decode, **options)


def _asked_spec(config: GenerationConfig) -> SpecConfig | None:
    """Return the spec that the fields of assisted generation ask for; None if all are default."""
    count, lookup = config.num_assistant_tokens, config.prompt_lookup_num_tokens
    kinds = {
        "prompt_lookup_num_tokens": lookup,
        "assistant_early_exit": config.assistant_early_exit,
        "use_mtp": config.use_mtp or None,
        "speculation_type": getattr(config, "speculation_type", None),  # of transformers 5.24
    }
    kind = kinds["speculation_type"]
    require("speculation_type", kind, kind in (None, "dflash"), "'dflash'")
    given = [name for name, value in kinds.items() if value is not None]
    for name in given[1:]:
        refuse(name, kinds[name], f"cannot be combined with {given[0]}")
    if lookup is not None:
        most = config.max_matching_ngram_size or _DEFAULT_NGRAM_SIZE
        return SpecConfig("prompt_lookup", lookup, prompt_lookup_min=1, prompt_lookup_max=most)
    asked: dict[str, Any] = {}
    if count not in (None, _DEFAULT_ASSISTANT_TOKENS):
        asked["num_speculative_tokens"] = count
    schedule, known = config.num_assistant_tokens_schedule, ("constant", *_HEURISTIC)
    fits = schedule is None or schedule in known
    require("num_assistant_tokens_schedule", schedule, fits, f"one of {known}")
    if schedule in _HEURISTIC:
        asked["schedule"] = "heuristic"
    if (exit_layer := config.assistant_early_exit) is not None:
        asked |= {"method": "early_exit", "exit_layer": exit_layer}
    if config.use_mtp:
        asked["method"] = "mtp"
    if kind is not None:
        asked["method"] = kind
    return SpecConfig(**asked) if asked else None


def _refuse(
    model: PreTrainedModel, config: GenerationConfig, model_kwargs: Mapping[str, Any]
) -> None:
    """Raise for fields and inputs that would otherwise be silently ignored."""
    for name in _REFUSED:
        if not is_off(name, value := getattr(config, name, None)):
            raise ValueError(f"{name}: {value!r} is not supported")
    for name, value in model_kwargs.items():
        if value is not None and name not in _PREPARED and not _is_of_text(model, name, value):
            given = "pixel_values" if name == "mm_encoder_outputs" else name  # made of it
            raise ValueError(f"{given}: not supported")
        if getattr(value, "_is_user_defined", False):
            raise ValueError(f"{name}: not supported, the engine keeps its own cache")


def _is_of_text(model: PreTrainedModel, name: str, value: Any) -> bool:
    """Whether an input of a model that also takes images or sound says that there are none."""
    if name == "mm_encoder_outputs":
        return not any(value.values())
    takes_more = (
        name in ("mm_token_type_ids", "token_type_ids") and model.input_modalities != "text"
    )
    return takes_more and not torch.as_tensor(value).any()  # 0 marks text


def _check_encoded(model: Any, ids: Tensor, model_kwargs: Mapping[str, Any]) -> None:
    """Refuse encoder_outputs of other inputs; those of `generate` itself come in the same way."""
    given, mask = model_kwargs["encoder_outputs"][0], model_kwargs["attention_mask"]
    first = slice(None, None, len(mask) // len(ids))  # of the num_return_sequences of each row
    again = model.get_encoder()(input_ids=ids, attention_mask=mask[first])[0]
    fits = given.shape == (len(mask), *again.shape[1:]) and bool(
        (given[first] - again)[mask[first] > 0].norm() <= 0.01 * again.norm()
    )
    require("encoder_outputs", "others", fits, "those of input_ids")


def _split_criteria(
    criteria: Sequence[Callable],
) -> tuple[int | None, list[int], Callable | None]:
    """Return the length limit, the ids that end a text, and the other criteria as one, if any."""
    limits = [each.max_length for each in criteria if type(each) is MaxLengthCriteria]
    ends = [each.eos_token_id.tolist() for each in criteria if type(each) is EosTokenCriteria]
    others = [each for each in criteria if type(each) not in (MaxLengthCriteria, EosTokenCriteria)]
    known = [*chain.from_iterable(ends)]
    return min(limits, default=None), known, StoppingCriteriaList(others) if others else None
