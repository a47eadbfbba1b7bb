"""The decoding methods that a benchmark times: ours and Hugging Face's, on the same weights."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fastspec.config import EngineConfig, SamplingParams, SpecConfig
from fastspec.config.k_matrix import MAG_TOKENS
from fastspec.config.methods import OWN_DRAFTS, method_named
from fastspec.drafters.auto import kind_of
from fastspec.drafters.cascade import numbered
from fastspec.drafters.context import DrafterContext
from fastspec.drafters.dflash import DFlashDraft, load_dflash
from fastspec.drafters.eagle3 import Eagle1Draft, EagleDraft, load_eagle
from fastspec.drafters.gemma_assistant import is_assistant
from fastspec.drafters.glide import GlideLlamaForCausalLM, load_glide
from fastspec.drafters.reencoding import tokenizers_of
from fastspec.engine.engine import Engine
from fastspec.engine.stats import SpecStats
from fastspec.models.loading import bigram_beside, load_model, load_tokenizer
from fastspec.models.twin import copy_of_modules
from fastspec.tools.settings import BenchConfig

TokenIds = list[int]
_TRIAL_TOKENS = 16
_HF_LOOKUP_TOKENS = 10  # what Hugging Face's documentation and the method's author use
Decode = Callable[[TokenIds, float, int], TokenIds]  # prompt ids, temperature, seed -> new ids


class Methods:
    """Our plain and speculative decoding and Hugging Face's plain and assisted generation.

    Each method generates exactly `max_tokens` new ids: end-of-sequence ids do not end a text.
    Hugging Face's assisted generation appears twice: drafting K tokens in each step, as ours does
    ("hf_assisted"), and with its own defaults ("hf_assisted_default"). Without a draft model ours
    proposes by spec.method, and theirs by its prompt lookup; theirs also uses prompt lookup with a
    draft that only we run (GLIDE, EAGLE, DFlash). If ours uses early exit, so does theirs. Assisted
    generation, or early exit, that fails on a few tokens is left out. The parts of a cascade are
    also run by themselves, and so is the draft model ("draft"), if it accepts texts as long as the
    target's, with the same ids, and needs no target: its speed is the upper limit for drafting.
    Without `peers` Hugging Face's are left out. With several draft models, for a cascade, both use
    the first.

    Args:
        target, drafts: names of the models.
        spec: how ours drafts; with a draft model whose text ours re-encodes, theirs uses universal
            assisted generation.
        config: of ours; without its prefix caching, as each prompt is read again in every run by
            Hugging Face's methods.
        settings: number of tokens, whether Hugging Face's run at all, and K of a cascade's draft
            models by themselves.
        costs: of one pass of the target and of each draft model, for the SWI; by default their
            parameter counts. With early exit one is added: the target's times the share of its
            layers that draft, so the head, which each pass runs whole, counts by the same share.
    Attributes:
        target, tokenizer, drafts: the loaded models.
        parts: of a cascade, by name.
        levels: what counters of a cascade's passes call each draft model.
        refused: why Hugging Face's assisted generation is left out, with a draft model or with
            layers of the target; None if it runs.
        uncompared: methods whose output differs from plain decoding: the draft model by itself, and
            ours with synthetic acceptance.
        last_stats: counters of the last run of ours.
    Raises:
        ValueError: a model or option that cannot be used.
    """

    def __init__(
        self,
        target: str,
        drafts: Sequence[str],
        spec: SpecConfig,
        config: EngineConfig,
        settings: BenchConfig,
        costs: Sequence[float] | None = None,
    ):
        config = replace(config, prefix_caching=False)
        self.max_tokens, self._peers = settings.max_tokens, settings.peers
        self._names = [Path(name).name for name in (target, *drafts)]
        method, spec = method_named(spec.method), spec.for_repeated_prompts()
        bigram = spec.bigram_path or bigram_beside(target)
        num_models = len(drafts) + spec.copies_target
        has_mag = not method.takes_several or len(spec.cascade_matrix) > num_models
        if "bigram_path" in method.fields and has_mag:
            spec = replace(spec, bigram_path=bigram)
        self.tokenizer = load_tokenizer("target", target)
        self.target = load_model("target", target, config)
        context = drafter_context(self.target, self.tokenizer, spec, config)
        own_tokenizer = _tokenizer_of_reencoded(drafts, context)
        self._own_tokenizer = own_tokenizer
        self.drafts = [
            load_model("draft", name, config) if own_tokenizer else load_named_draft(name, context)
            for name in drafts
        ]
        draft = self.drafts[0] if drafts else None
        drafter: Any = self.drafts if len(drafts) > 1 else draft
        given = (drafts[0], self.tokenizer) if own_tokenizer else (drafter, None)
        self._engine = Engine(self.target, *given, spec=spec, config=config)
        self.parts: dict[str, SpecConfig] = {}
        self._engines: dict[str, Engine] = {}
        if method.takes_several:
            parts: dict[str, tuple[SpecConfig, Any]] = {}
            if spec.copies_target:
                copy = SpecConfig("quantized", draft_bits=spec.draft_bits)
                parts["quantized"] = copy, None
            for n, each in enumerate(self.drafts, start=1):
                kind = kind_of(each)
                kind = kind if kind in OWN_DRAFTS else "draft_model"
                alone = SpecConfig(kind, settings.num_speculative_tokens)
                parts[kind if len(drafts) == 1 else f"{kind}_{n}"] = alone, each
            mag = SpecConfig("mag", MAG_TOKENS, bigram_path=bigram)
            for name, (part, model) in (parts | {"mag": (mag, None)}).items():
                self.parts[name] = part
                self._engines[name] = Engine(self.target, model, spec=part, config=config)
        is_ours = isinstance(draft, (GlideLlamaForCausalLM, EagleDraft, DFlashDraft))
        self._draft = None if is_ours else draft
        # To sample, universal assisted generation changes the model that it is given.
        self._sampled_draft = copy_of_modules(draft) if own_tokenizer and draft else self._draft
        runs_alone = self._draft is not None and not is_assistant(self._draft.config)
        if self._draft is not None and runs_alone and own_tokenizer is None:
            engine = Engine(self._draft, spec=SpecConfig("none"), config=config)
            if engine.max_model_len >= self._engine.max_model_len:
                self._engines["draft"] = engine
        self.uncompared = {"draft"}
        if spec.synthetic_acceptance_rate is not None:
            self.uncompared.add("speculative")
        self.levels = _level_names(self.drafts)
        models = self.target, *self.drafts
        self.costs: list[float] = [*(costs or (model.num_parameters() for model in models))]
        # Hugging Face's arguments for layers of the target that draft.
        self._own_layers: dict[str, Any] = {}
        if spec.exit_layer is not None:
            self._own_layers["assistant_early_exit"] = spec.exit_layer
        elif method.name == "mtp":
            self._own_layers["use_mtp"] = True
        if self._own_layers:
            num_layers = self.target.config.get_text_config(decoder=True).num_hidden_layers
            self.costs.append(self.costs[0] * (spec.exit_layer or 1) / num_layers)
        self._generate = cast(Any, self.target).generate  # only generative classes have it
        self._num_speculative_tokens = spec.num_draft_tokens()
        self._num_assistant_tokens = spec.num_model_tokens()  # the peers copy nothing
        self.last_stats = SpecStats()
        self.refused = None
        if self._peers and self._runs_layers:
            self.refused = self._trial((0.0, *settings.temperatures))

    @property
    def _runs_layers(self) -> bool:
        """Whether Hugging Face's assisted generation runs layers that draft, and copies nothing."""
        return self._draft is not None or self._own_layers != {}

    def _trial(self, temperatures: Sequence[float]) -> str | None:
        """The error of Hugging Face's assisted generation on a few tokens, if there is one."""
        config = self.target.config.get_text_config(decoder=True)
        num_layers = config.num_hidden_layers  # as early exit changes it
        try:
            with _changed(self, {"max_tokens": _TRIAL_TOKENS}):
                for temperature in temperatures:
                    self._hf_assisted([0, 0], temperature, 0)
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        finally:
            config.num_hidden_layers = num_layers
        return None

    def describe(self) -> dict[str, Any]:
        """The models and how they draft, as plain JSON values."""
        target, *drafts = map(_described, self._names, (self.target, *self.drafts))
        return {
            "device": str(self.target.device),
            "dtype": str(self.target.dtype).removeprefix("torch."),
            "target": target,
            "draft": drafts[0] if len(drafts) == 1 else drafts or None,
            "heterogeneous_vocab": self._engine.spec.heterogeneous_vocab,
            "parts": {name: part.num_draft_tokens() for name, part in self.parts.items()},
            "pass_costs": self.costs,
        }

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
        if self.refused is not None:
            peers = {"hf_generate": self._hf_generate}
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
        num = self._num_assistant_tokens
        if not self._runs_layers:
            return self._hf_generate(prompt, temperature, seed, prompt_lookup_num_tokens=num)
        changes = {
            "num_assistant_tokens": num,
            "num_assistant_tokens_schedule": "constant",
            "assistant_confidence_threshold": 0.0,
        }
        assistant = self._assistant(temperature)
        drafting = cast(Any, assistant.get("assistant_model", self.target)).generation_config
        with _changed(drafting, changes):
            return self._hf_generate(prompt, temperature, seed, **assistant)

    def _hf_assisted_default(self, prompt: TokenIds, temperature: float, seed: int) -> TokenIds:
        if not self._runs_layers:
            num = _HF_LOOKUP_TOKENS
            return self._hf_generate(prompt, temperature, seed, prompt_lookup_num_tokens=num)
        return self._hf_generate(prompt, temperature, seed, **self._assistant(temperature))

    def _assistant(self, temperature: float) -> dict[str, Any]:
        """Hugging Face's arguments for the draft model, or for layers of the target."""
        if self._own_layers:
            return self._own_layers
        draft = self._sampled_draft if temperature else self._draft
        named: dict[str, Any] = {"assistant_model": draft}
        if self._own_tokenizer is not None:
            named["tokenizer"] = self.tokenizer
            named["assistant_tokenizer"] = self._own_tokenizer
        return named

    def _hf_generate(
        self, prompt: TokenIds, temperature: float, seed: int, **assistant
    ) -> TokenIds:
        input_ids = torch.tensor([prompt], device=self.target.device)
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
        num_before = 1 if self.target.config.is_encoder_decoder else len(prompt)
        return output[0, num_before:].tolist()


def drafter_context(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    spec: SpecConfig,
    config: EngineConfig,
) -> DrafterContext:
    """The context of drafters for a loaded target."""
    vocab_size = target.config.get_text_config(decoder=True).vocab_size
    return DrafterContext(spec, config, tokenizer, vocab_size, target, target_model=target)


def load_named_draft(name: str, context: DrafterContext) -> PreTrainedModel:
    """A draft model of any kind for a loaded target; see `DrafterContext.load_pretrained`."""
    kind = kind_of(name, context.read_config)
    if kind in ("eagle3", "dflash"):
        load = load_eagle if kind == "eagle3" else load_dflash
        assert context.target_model is not None
        return load(name, context.config, context.target_model)
    if kind == "gemma_assistant":
        return load_model("draft", name, context.config_of_files)
    load = partial(load_glide, target=context.target_model) if kind == "glide" else None
    return context.load_pretrained(name, load, "draft")


def _tokenizer_of_reencoded(
    drafts: Sequence[str], context: DrafterContext
) -> PreTrainedTokenizerBase | None:
    """The draft model's tokenizer, if the engine would re-encode its text."""
    if len(drafts) != 1 or not method_named(context.spec.method).reencodes:
        return None
    if tokenizers_of(replace(context, drafter=drafts[0])) is None:
        return None
    return context.read_tokenizer("draft", drafts[0])


def _level_names(drafts: Sequence[PreTrainedModel]) -> list[str]:
    """Return what a cascade's counters call the passes of its draft models."""
    kinds = {"reduced": "draft_model", "model": "draft_model"}
    found = map(kind_of, drafts)
    return numbered(
        [
            "eagle" if isinstance(draft, Eagle1Draft) else kinds.get(kind, kind)
            for draft, kind in zip(drafts, found, strict=True)
        ]
    )


def _described(name: str, model: PreTrainedModel) -> dict[str, Any]:
    config = model.config.get_text_config(decoder=True)
    return {
        "name": name,
        "architecture": type(model).__name__,
        "parameters": model.num_parameters(),
        "layers": config.num_hidden_layers,
        "vocab_size": config.vocab_size,
    }


@contextmanager
def _changed(holder: object, changes: dict) -> Iterator[None]:
    """Attributes changed for the duration of a block."""
    previous = {name: getattr(holder, name) for name in changes}
    try:
        for name, value in changes.items():
            setattr(holder, name, value)
        yield
    finally:
        for name, value in previous.items():
            setattr(holder, name, value)
