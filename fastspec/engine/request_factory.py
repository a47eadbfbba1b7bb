"""Builds requests from user input: checked token ids, limits, seeds and logit rules."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

import numpy as np

from fastspec.config import SamplingParams
from fastspec.config.checks import refuse, require, require_unicode
from fastspec.drafters.grammar import GrammarCompiler, LlguidanceGrammar
from fastspec.drafters.logit_rules import LogitRules
from fastspec.engine.detokenizer import Detokenizer
from fastspec.engine.prefix_index import Content
from fastspec.engine.prompt_reader import PromptReader
from fastspec.engine.prompts import Prompt
from fastspec.engine.request import EngineRequest
from fastspec.models.layout import EncoderInput
from fastspec.models.paged_model import PagedModel

_BEFORE_INDEX = "\0"  # separates the index in sample ids, which let drafters tell samples apart


def sample_seed(seed: int, index: int) -> int:
    """Return the seed of sample `index` of a prompt; the first has the request's own.

    The others get the upper 63 bits of output number `index` of the generator splitmix64 seeded
    with the request's seed (Steele et al., OOPSLA 2014).
    """
    if index == 0:
        return seed
    mask = 2**64 - 1
    mixed = (seed + index * 0x9E3779B97F4A7C15) & mask
    mixed = ((mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9) & mask
    mixed = ((mixed ^ mixed >> 27) * 0x94D049BB133111EB) & mask
    return (mixed ^ mixed >> 31) >> 1


@dataclass(eq=False)
class RequestFactory:
    """Builds requests for one target.

    Attributes:
        reader: converts the prompts; those of an encoder-decoder are read by its encoder.
        eos_ids: ids that end a text.
        shares_prompts: whether the samples of a prompt share its blocks among themselves only.
        new_seed: makes seeds for requests without one.
    """

    reader: PromptReader
    target: PagedModel
    eos_ids: frozenset[int]
    shares_prompts: bool
    new_seed: Callable[[], int]

    def __post_init__(self):
        reader = self.reader
        self._tokenizer, self._vocab_size = reader.tokenizer, reader.vocab_size
        self._grammars = GrammarCompiler(reader.tokenizer, reader.vocab_size, self.eos_ids)
        self._encoder_inputs = WeakValueDictionary[tuple[int, ...], EncoderInput]()

    def build(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str,
        decoder_input_ids: Sequence[int] | None = None,
    ) -> list[EngineRequest]:
        """Build the samples of a request.

        Raises:
            ValueError: an empty prompt, ids outside the vocabulary, more tokens than the model
                allows, text or stop strings without a tokenizer, or an argument of a wrong type.
        """
        if not isinstance(request_id, str) or _BEFORE_INDEX in request_id:
            raise ValueError(f"request_id: expected a text without NUL, got {request_id!r}")
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params: expected SamplingParams, got {type(params).__name__}")
        token_ids, encoder_input = self.reader.ids(prompt), None
        if (start_id := self.target.decoder_start_id) is not None:
            why = "an encoder-decoder does not predict its prompt"
            refuse("prompt_logprobs", params.prompt_logprobs, why)
            encoder_input = self._encoder_input(token_ids)
            token_ids = [start_id]
        if decoder_input_ids is not None:
            begun = self.reader.checked_ids("decoder_input_ids", decoder_input_ids)
            if encoder_input is None or begun[:1] != token_ids:
                start = "None for a decoder" if encoder_input is None else f"{token_ids} first"
                raise ValueError(f"decoder_input_ids: expected {start}, got {begun}")
            token_ids = begun
        if params.stop and self._tokenizer is None:
            raise ValueError("stop: stop strings need a tokenizer, but the engine has none")
        stop_ids = frozenset(params.stop_token_ids or ())
        self._check_ids("stop_token_ids", stop_ids)
        stop_ids = stop_ids if params.ignore_eos else stop_ids | self.eos_ids
        room = self.reader.max_model_len - len(token_ids)
        expected = f"at most {room}, as {len(token_ids)} tokens come first"
        require("min_tokens", params.min_tokens, params.min_tokens <= room, expected)
        most = self.reader.max_model_len if params.max_tokens is None else params.max_tokens
        seed = self.new_seed() if params.seed is None else params.seed
        root = Content(None) if params.n > 1 and self.shares_prompts else None
        structure = params.structured_outputs
        grammar = None if structure is None else self._grammars.compile(structure)
        prediction, rotary = self._prediction(params), self.target.rotary
        return [
            EngineRequest(
                request_id=f"{request_id}{_BEFORE_INDEX}{index}" if index else request_id,
                public_id=request_id,
                index=index,
                root=root,
                token_ids=[*token_ids],
                params=params,
                seed=sample_seed(seed, index),
                stop_ids=stop_ids,
                max_len=min(len(token_ids) + most, self.reader.max_model_len),
                detokenizer=self._detokenizer(params, token_ids),
                encoder_input=encoder_input,
                rereads_above=rotary and rotary.rereads_above,
                rules=self._rules(params, token_ids, stop_ids, grammar and grammar.copy()),
                prediction=prediction,
            )
            for index in range(params.n)
        ]

    def _prediction(self, params: SamplingParams) -> list[int]:
        """Return the ids of a prediction, which is not longer than any output can be."""
        if params.prediction is None:
            return []
        ids = self.reader.plain_ids("prediction", params.prediction)
        most = self.reader.max_model_len
        if len(ids) > most:
            raise ValueError(f"prediction: has {len(ids)} tokens; the limit is {most}")
        return ids

    def _detokenizer(self, params: SamplingParams, token_ids: list[int]) -> Detokenizer | None:
        if self._tokenizer is None:
            return None
        keeps_stop, skips_special = params.include_stop_str_in_output, params.skip_special_tokens
        options = tuple(params.stop or ()), keeps_stop, skips_special, params.min_tokens
        return Detokenizer(self._tokenizer, *options, token_ids)

    def _rules(
        self,
        params: SamplingParams,
        token_ids: list[int],
        stop_ids: frozenset[int],
        grammar: LlguidanceGrammar | None,
    ) -> LogitRules | None:
        """Return the request's logit rules other than temperature and filters, if any."""
        self._check_ids("logit_bias", params.logit_bias or ())
        self._check_ids("allowed_token_ids", params.allowed_token_ids or ())
        allowed = None
        if params.allowed_token_ids is not None:
            bits = np.zeros(-(-self._vocab_size // 32) * 32, np.uint8)
            bits[list(params.allowed_token_ids)] = 1
            allowed = np.packbits(bits, bitorder="little").view(np.int32)
        bad_words = [ids for word in params.bad_words or () for ids in self._spellings(word)]
        rules = LogitRules(
            params, self._vocab_size, len(token_ids), stop_ids, bad_words, allowed, grammar
        )
        if not rules.any:
            return None
        if (dead_end := rules.dead_end(token_ids)) is not None:
            raise ValueError(dead_end)
        return rules

    def _spellings(self, word: str | Sequence[int]) -> list[Sequence[int]]:
        """Return a bad word's token sequences; a text is also tokenized with a leading space."""
        if not isinstance(word, str):
            self._check_ids("bad_words", word)
            return [word]
        if self._tokenizer is None:
            raise ValueError("bad_words: texts need a tokenizer, but the engine has none")
        require_unicode("bad_words", word)
        bare = word.lstrip(" ")
        texts = (bare, f" {bare}") if bare and not bare[0].isspace() else (word,)
        ids = [tuple(self._tokenizer(t, add_special_tokens=False)["input_ids"]) for t in texts]
        return [each for each in dict.fromkeys(ids) if each]

    def _check_ids(self, name: str, token_ids: Iterable[int]) -> None:
        if (largest := max(token_ids, default=0)) >= self._vocab_size:
            raise ValueError(f"{name}: {largest} is not in 0..{self._vocab_size - 1}")

    def _encoder_input(self, token_ids: list[int]) -> EncoderInput:
        """Return one shared object for all requests with these ids, so they are encoded once."""
        return self._encoder_inputs.setdefault(tuple(token_ids), EncoderInput(token_ids))


def as_params_list(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    """Return one SamplingParams for each of `count` prompts."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, Sequence):
        what = type(params).__name__
        raise ValueError(f"params: expected SamplingParams or a list of them, got {what}")
    several = list(params)
    if len(several) != count:
        raise ValueError(f"params: {len(several)} given for {count} prompts")
    return several
