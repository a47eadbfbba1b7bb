"""Colossal-Inference's two entry points (github.com/hpcaitech/ColossalAI, colossalai/inference)."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from fastspec.config import EngineConfig, SamplingParams
from fastspec.config.checks import require, require_int
from fastspec.config.colossal import GENERATION, LENGTHS
from fastspec.drafters.context import DrafterSource, ModelSource
from fastspec.engine.engine import Engine
from fastspec.engine.outputs import StreamEvent


class InferenceConfig:
    """The published InferenceConfig: `EngineConfig.from_colossal`, and the options of requests.

    Args:
        fields: those of `from_colossal`, and do_sample, top_k, top_p, temperature,
            repetition_penalty and ignore_eos, which set the defaults of requests.
    Attributes:
        engine: the EngineConfig.
        params: of a request that gives none itself: greedy unless do_sample is True, and then with
            top_k 50; up to max_output_len new tokens, 256 by default.
    Raises:
        ValueError: an unknown field, or a value that cannot be used.
    """

    def __init__(self, **fields: Any):
        given = {name: fields.pop(name) for name in GENERATION if fields.get(name) is not None}
        self.engine = EngineConfig.from_colossal(
            {name: value for name, value in fields.items() if name not in GENERATION}
        )
        samples, ignores_eos = given.pop("do_sample", False), given.pop("ignore_eos", False)
        for name, flag in (("do_sample", samples), ("ignore_eos", ignores_eos)):
            require(name, flag, isinstance(flag, bool), "a bool")
        penalty = given.pop("repetition_penalty", 1.0)
        drawn = SamplingParams(**{"top_k": 50, "temperature": 1.0, **given})
        names = ("top_k", "top_p", "temperature") if samples else ()
        chosen = {name: getattr(drawn, name) for name in names}
        self.params = SamplingParams(
            **{"temperature": 0, **chosen},
            repetition_penalty=penalty,
            ignore_eos=ignores_eos,
            max_tokens=fields.get("max_output_len", LENGTHS["max_output_len"]),
        )


class InferenceEngine(Engine):
    """An `Engine` with the published defaults and arguments.

    `generate`, `chat` and `add_request` are greedy, with up to max_output_len tokens, unless the
    configuration or a generation_config says otherwise.

    Args:
        model_or_path: a loaded model is converted to the configuration's dtype, in place.
        inference_config: an InferenceConfig, or an EngineConfig.
        verbose: without effect; messages are logged.
        model_policy: must be None; no supported architecture needs one.
    Raises:
        ValueError: a model or option that cannot be used.
    """

    def __init__(
        self,
        model_or_path: ModelSource,
        tokenizer: PreTrainedTokenizerBase | None = None,
        inference_config: InferenceConfig | EngineConfig | None = None,
        verbose: bool = False,
        model_policy: None = None,
    ):
        require("model_policy", model_policy, model_policy is None, "None")
        given: Any = InferenceConfig() if inference_config is None else inference_config
        is_published = isinstance(given, InferenceConfig)
        config = given.engine if is_published else EngineConfig.of(given)
        self._params = (given if is_published else InferenceConfig()).params
        self._dtype: Any = None
        if config.dtype != "auto":
            self._dtype = getattr(torch, config.dtype)
        if isinstance(model_or_path, PreTrainedModel):
            if self._dtype is not None:
                model_or_path.to(self._dtype)
            self._dtype = model_or_path.dtype
        super().__init__(model_or_path, tokenizer=tokenizer, config=config)

    def generate(  # pyright: ignore[reportIncompatibleMethodOverride] (published arguments)
        self,
        prompts: Any = None,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = False,
        *,
        generation_config: GenerationConfig | None = None,
        prompts_token_ids: Any = None,
        return_token_ids: bool = False,
    ) -> Any:
        """Run prompts to their end; returns outputs, where the published one returns texts.

        Args:
            prompts, params, use_tqdm, generation_config: see `Engine.generate`.
            prompts_token_ids: ids, instead of prompts.
            return_token_ids: return two lists, the new texts and the new ids.
        Raises:
            ValueError: a prompt or parameter that cannot be run, or both kinds of prompts.
        """
        given = _one_of(prompts, prompts_token_ids)
        if params is None and generation_config is None:
            params = self._params
        outputs = super().generate(given, params, use_tqdm, generation_config=generation_config)
        if not return_token_ids:
            return outputs
        return [output.text for output in outputs], [[*output.token_ids] for output in outputs]

    def stream(
        self,
        prompt: Any,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[StreamEvent]:
        """Yield events as `Engine.stream`; without params by the InferenceConfig."""
        return super().stream(prompt, self._params if params is None else params)

    def add_request(  # pyright: ignore[reportIncompatibleMethodOverride] (published arguments)
        self,
        prompt: Any = None,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        prompts: Any = None,
        prompts_token_ids: Any = None,
        decoder_input_ids: Sequence[int] | None = None,
    ) -> Any:
        """Queue a request for step(), or one for each of `prompts`; returns the id, or a list.

        Args:
            prompts, prompts_token_ids: several texts, or lists of ids.
        Raises:
            ValueError: see `Engine.add_request`.
        """
        params = self._params if params is None else params
        if prompts is None and prompts_token_ids is None:
            return super().add_request(
                prompt, params, request_id, decoder_input_ids=decoder_input_ids
            )
        require("prompt", prompt, prompt is None, "None with prompts")
        require("request_id", request_id, request_id is None, "None for several prompts")
        given = _one_of(prompts, prompts_token_ids)
        texts = [given] if isinstance(given, str) else list(given)
        return [super(InferenceEngine, self).add_request(each, params) for each in texts]

    def enable_spec_dec(
        self,
        drafter: DrafterSource | None = None,
        n_spec_tokens: int | None = None,
        use_glide_drafter: bool = False,
    ) -> None:
        """See `Engine.enable_spec_dec`; a loaded model is converted to the target's dtype."""
        if n_spec_tokens is not None:
            require_int("n_spec_tokens", n_spec_tokens, 1)
        if isinstance(drafter, nn.Module) and self._dtype is not None:
            drafter.to(self._dtype)
        super().enable_spec_dec(drafter, n_spec_tokens, use_glide_drafter)


def _one_of(prompts: Any, token_ids: Any) -> Any:
    """The prompts from whichever argument is given."""
    if (prompts is None) == (token_ids is None):
        raise ValueError("prompts: expected either prompts or prompts_token_ids")
    return token_ids if prompts is None else prompts
