"""The ways of decoding that a benchmark compares, all on one pair of loaded models."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from fastspec.config import EngineConfig, SamplingParams, SpecConfig
from fastspec.config.methods import method_named
from fastspec.drafters.eagle3 import Eagle3Draft
from fastspec.drafters.glide import GlideLlamaForCausalLM
from fastspec.engine.engine import Engine
from fastspec.engine.stats import SpecStats

TokenIds = list[int]
_HF_LOOKUP_TOKENS = 10  # what Hugging Face's documentation and the method's author use
Decode = Callable[[TokenIds, float, int], TokenIds]  # prompt ids, temperature, seed -> new ids


class Methods:
    """Our plain and speculative decoding and Hugging Face's plain and assisted generation.

    Each method makes exactly `max_tokens` new ids: end-of-sequence ids do not end a text.
    Hugging Face's assisted generation appears twice: drafting K tokens in each step, as ours does
    ("hf_assisted"), and as its own defaults have it ("hf_assisted_default"). Without a draft model
    ours proposes by spec.method, and theirs by its prompt lookup; so does theirs with a
    GLIDE or EAGLE-3 draft, which it cannot run. The parts of a cascade run by themselves, too, and
    so does the draft model ("draft"), where it takes texts as long as the target's and needs no
    target: its speed is what drafting can gain at most. Without `peers` Hugging Face's are left
    out.

    Attributes:
        costs: of one pass of the target and of the draft model, 0 without one, for the SWI.
        last_stats: counters of the last run of ours.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        draft: PreTrainedModel | None,
        spec: SpecConfig,
        max_tokens: int,
        config: EngineConfig,
        parts: Mapping[str, SpecConfig],
        costs: tuple[float, float] | None = None,
        peers: bool = True,
    ):
        self._peers = peers
        self._engine = Engine(target, draft, spec=spec, config=config)
        needs_target = isinstance(draft, (GlideLlamaForCausalLM, Eagle3Draft))
        self._draft = None if needs_target else draft
        self.parts = parts
        self._engines = {}
        for name, part in parts.items():
            needed = draft if method_named(part.method).needs_draft else None
            self._engines[name] = Engine(target, needed, spec=part, config=config)
        if self._draft is not None:
            alone = Engine(self._draft, spec=SpecConfig("none"), config=config)
            if alone.max_model_len >= self._engine.max_model_len:
                self._engines["draft"] = alone
        parameters = num_parameters(target), 0 if draft is None else num_parameters(draft)
        self.costs = costs or parameters
        self._target = target
        self._generate = cast(Any, target).generate  # only generative classes have it
        self._num_speculative_tokens = spec.num_draft_tokens()
        self.max_tokens = max_tokens
        self.last_stats = SpecStats()

    @property
    def max_prompt_len(self) -> int:
        """Longest prompt after which every method has room for its new tokens."""
        return self._engine.max_model_len - self.max_tokens

    def by_name(self) -> dict[str, Decode]:
        """All methods."""
        peers: dict[str, Decode] = {
            "hf_generate": self._hf_generate,
            "hf_assisted": self._hf_assisted,
            "hf_assisted_default": self._hf_assisted_default,
        }
        return {
            "plain": self._plain,
            "speculative": self._speculative,
            **(peers if self._peers else {}),
            **{name: partial(self._ours, engine) for name, engine in self._engines.items()},
        }

    def _plain(self, prompt: TokenIds, temperature: float, seed: int) -> TokenIds:
        self._engine.disable_spec_dec()
        return self._ours(self._engine, prompt, temperature, seed)

    def _speculative(self, prompt: TokenIds, temperature: float, seed: int) -> TokenIds:
        self._engine.enable_spec_dec(n_spec_tokens=self._num_speculative_tokens)
        return self._ours(self._engine, prompt, temperature, seed)

    def _ours(self, engine: Engine, prompt: TokenIds, temperature: float, seed: int) -> TokenIds:
        params = SamplingParams(
            temperature=temperature, seed=seed, max_tokens=self.max_tokens, ignore_eos=True
        )
        output = engine.generate([prompt], params)[0]
        if output.error is not None:
            raise ValueError(f"target: {output.error}")
        self.last_stats = output.stats
        return list(output.token_ids)

    def _hf_assisted(self, prompt: TokenIds, temperature: float, seed: int) -> TokenIds:
        if self._draft is None:
            num = self._num_speculative_tokens
            return self._hf_generate(prompt, temperature, seed, prompt_lookup_num_tokens=num)
        changes = {
            "num_assistant_tokens": self._num_speculative_tokens,
            "num_assistant_tokens_schedule": "constant",
            "assistant_confidence_threshold": 0.0,
        }
        with _changed(self._draft.generation_config, changes):
            return self._hf_generate(prompt, temperature, seed, assistant_model=self._draft)

    def _hf_assisted_default(self, prompt: TokenIds, temperature: float, seed: int) -> TokenIds:
        if self._draft is None:
            num = _HF_LOOKUP_TOKENS
            return self._hf_generate(prompt, temperature, seed, prompt_lookup_num_tokens=num)
        return self._hf_generate(prompt, temperature, seed, assistant_model=self._draft)

    def _hf_generate(
        self, prompt: TokenIds, temperature: float, seed: int, **assistant
    ) -> TokenIds:
        input_ids = torch.tensor([prompt], device=self._target.device)
        sampling = {"do_sample": False}
        if temperature > 0:
            # Hugging Face would otherwise keep the 50 best tokens, or what the checkpoint asks for.
            sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        torch.manual_seed(seed)
        output = self._generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=self.max_tokens,
            eos_token_id=None,
            pad_token_id=0,
            num_beams=1,
            repetition_penalty=1.0,
            **sampling,
            **assistant,
        )
        num_before = 1 if self._target.config.is_encoder_decoder else len(prompt)
        return output[0, num_before:].tolist()


def num_parameters(model: PreTrainedModel) -> int:
    """Entries of all weights; shared ones count once."""
    return sum(parameter.numel() for parameter in model.parameters())


@contextmanager
def _changed(holder: object, changes: dict) -> Iterator[None]:
    """Attributes changed for the length of a block."""
    previous = {name: getattr(holder, name) for name in changes}
    try:
        for name, value in changes.items():
            setattr(holder, name, value)
        yield
    finally:
        for name, value in previous.items():
            setattr(holder, name, value)
