"""The functions of romsto's Speculative-Decoding (github.com/romsto/Speculative-Decoding).

Each call creates an engine for its models; for many prompts create one `Engine` and batch them.

Arguments that all functions share:
    inputs: ids of the prompt.
    logits_processor: how tokens are chosen, one of the processors here or a subclass of them.
    max_gen_len: maximum number of new tokens, >= 1.
    eos_tokens_id: the only ids that end the text; the last one is kept. The model's own do not
        count. None = no id does. An int, a list, or an array or tensor of them.
    end_tokens_id: its name in the published README; overrides eos_tokens_id.
    debug: log the counters at level INFO.
    tokenizer, pad_token_id, use_cache, first_target: accepted without effect. There is no buffer to
        pad, the cache is always used, and the target reads the prompt before the drafter.

Random seeds come from torch's generator, so torch.manual_seed makes samples repeatable.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import TopKLogitsWarper, TopPLogitsWarper

from fastspec.config import EngineConfig, SamplingParams, SpecConfig
from fastspec.config.checks import is_int, require, require_int
from fastspec.drafters.context import ModelSource
from fastspec.drafters.ngram import NgramDrafter
from fastspec.drafters.ngram_table import NgramTable
from fastspec.engine.outputs import RequestOutput
from fastspec.models.loading import load_model
from fastspec.tools.compat.sampling import generated, seed_from_torch

_NO_IDS: Any = torch.empty((1, 0), dtype=torch.int64)  # filters read none


class LogitsProcessor:
    """How tokens are chosen: filtered at temperature 1, and only then divided by the temperature.

    Your own processors derive from `GreedyProcessor` or `MultinomialProcessor` and change logits
    [1, V] in `_process`. Overriding `sample` or `__call__` is refused: its draws could not be
    verified.

    Args:
        temperature: >= 0; 0 leaves only the most probable token.
    Raises:
        ValueError: a temperature, top_k or top_p out of range.
    """

    def __init__(self, temperature: float = 1):
        SamplingParams(temperature=temperature)
        self.temperature = temperature

    def __call__(self, logits: Tensor) -> Tensor:
        """The probabilities that logits [..., V] stand for."""
        logits = self._process(logits.clone())
        if self.temperature == 0:
            best = logits.argmax(dim=-1, keepdim=True)
            return torch.zeros_like(logits).scatter(-1, best, 1)
        return (logits / self.temperature).softmax(dim=-1)

    def _process(self, logits: Tensor) -> Tensor:
        return logits


class GreedyProcessor(LogitsProcessor):
    """The most probable token; the temperature has no effect."""

    def sample(self, probs: Tensor) -> Tensor:
        """The most probable token of each row of probabilities [..., V]: [..., 1]."""
        return probs.argmax(dim=-1, keepdim=True)


class MultinomialProcessor(LogitsProcessor):
    """Sampling at a temperature."""

    def sample(self, probs: Tensor) -> Tensor:
        """A draw from each row of probabilities [B, V], by torch's generator: [B, 1]."""
        return torch.multinomial(probs, num_samples=1)


class TopKProcessor(MultinomialProcessor):
    """Sampling from the top_k most probable tokens, ties included; top_k >= 1."""

    def __init__(self, temperature: float, top_k: int):
        super().__init__(temperature)
        require_int("top_k", top_k, 1)
        self.top_k = top_k

    def _process(self, logits: Tensor) -> Tensor:
        return TopKLogitsWarper(self.top_k)(_NO_IDS, logits)


class NucleusProcessor(MultinomialProcessor):
    """Sampling from the most probable tokens that add up to top_p, 0 < top_p <= 1."""

    def __init__(self, temperature: float, top_p: float):
        super().__init__(temperature)
        SamplingParams(top_p=top_p)
        self.top_p = top_p

    def _process(self, logits: Tensor) -> Tensor:
        return _nucleus(logits, self.top_p)


class TopKNucleusProcessor(MultinomialProcessor):
    """Both: sampling from the nucleus of the top_k most probable tokens."""

    def __init__(self, temperature: float, top_k: int, top_p: float):
        super().__init__(temperature)
        require_int("top_k", top_k, 1)
        SamplingParams(top_p=top_p)
        self.top_k = top_k
        self.top_p = top_p

    def _process(self, logits: Tensor) -> Tensor:
        return _nucleus(TopKLogitsWarper(self.top_k)(_NO_IDS, logits), self.top_p)


def _nucleus(logits: Tensor, top_p: float) -> Tensor:
    return logits if top_p == 1 else TopPLogitsWarper(top_p)(_NO_IDS, logits)


Ids = list[int]
EndIds = int | Sequence[int] | None
_NOT_GIVEN: Any = ...
_GREEDY = GreedyProcessor()


class NGramStorage:
    """Counts of n-grams of 2 to n tokens, kept from call to call until `reset`.

    Args:
        n: >= 2.
        vocab_size: of the target.

    It has a fixed size and drops rare entries, see `fastspec.drafters.ngram_table.NgramTable`.
    """

    one_level = False

    def __init__(self, n: int, vocab_size: int):
        require_int("n", n, 2)
        require_int("vocab_size", vocab_size, 1)
        self.n = n
        self.vocab_size = vocab_size
        self.table = NgramTable(n - 1, self.one_level)

    def initialize(self, input_ids: Tensor) -> None:
        """Count the n-grams of texts [B, S]."""
        grams = pad(input_ids, (self.n - 1, 0), value=-1).unfold(1, self.n, 1)
        self._learn(grams[:, :, :-1].flatten(0, 1), grams[:, :, -1].flatten())

    def update(self, input_ids: Tensor, next_tokens: Tensor) -> None:
        """Count that each of next_tokens [B, k] followed the texts [B, S] once."""
        num = next_tokens.shape[1]
        self._learn(self._ends(input_ids).repeat_interleave(num, dim=0), next_tokens.flatten())

    def next_token(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """The most frequent token after the end of the texts [B, S], and if it is known, [B] each.

        Where it is not known, the token is arbitrary.
        """
        ends = self._ends(input_ids)
        self.table.grow(1, input_ids.device)
        tokens = self.table.next_tokens(ends.new_zeros(len(ends)), ends)
        known = tokens >= 0
        return torch.where(known, tokens, self.table.guess(ends, self.vocab_size)), known

    def reset(self) -> None:
        """Forget everything."""
        self.table = NgramTable(self.n - 1, self.one_level)

    def _ends(self, input_ids: Tensor) -> Tensor:
        return pad(input_ids, (self.n - 1, 0), value=-1)[:, -(self.n - 1) :]

    def _learn(self, windows: Tensor, successors: Tensor) -> None:
        self.table.grow(1, windows.device)
        recency = torch.arange(len(windows), device=windows.device)
        self.table.learn(recency * 0, windows, successors, recency)


class OneLevelNGramStorage(NGramStorage):
    """The same, with only n-grams of exactly n tokens."""

    one_level = True


def autoregressive_generate(
    inputs: Ids,
    model: ModelSource,
    max_gen_len: int = 40,
    logits_processor: LogitsProcessor = _GREEDY,
    eos_tokens_id: EndIds = 1,
    pad_token_id: int | None = 0,
    use_cache: bool = False,
    debug: bool = False,
    *,
    end_tokens_id: EndIds = _NOT_GIVEN,
) -> Ids:
    """Generate without speculation: the new ids, with an encoder-decoder's start token first."""
    params = _params(max_gen_len, logits_processor, eos_tokens_id, end_tokens_id)
    return _written(generated(model, None, inputs, SpecConfig("none"), params, debug))[0]


def speculative_generate(
    inputs: Ids,
    drafter: ModelSource,
    target: ModelSource,
    tokenizer: Any = None,
    gamma: int = 5,
    logits_processor: LogitsProcessor = _GREEDY,
    max_gen_len: int = 40,
    eos_tokens_id: EndIds = 1,
    pad_token_id: int | None = 0,
    use_cache: bool = False,
    skip_sample_adjustment: bool = False,
    first_target: bool = True,
    debug: bool = False,
    *,
    end_tokens_id: EndIds = _NOT_GIVEN,
) -> tuple[Ids, float]:
    """Generate with drafts of a smaller model: a faster `autoregressive_generate`.

    Greedy ids are the same; samples have the same distribution.

    Args:
        gamma: draft tokens in each step, >= 1.
        skip_sample_adjustment: must be False; True draws from the target after a rejection, not
            from the residual, which is LOSSY: rejected tokens are then too rare.
    Returns:
        The new ids, and the accepted fraction of the drafts, 0.0 if there were none.
    """
    require("skip_sample_adjustment", skip_sample_adjustment, not skip_sample_adjustment, _LOSSY)
    require_int("gamma", gamma, 1)
    params = _params(max_gen_len, logits_processor, eos_tokens_id, end_tokens_id)
    spec = SpecConfig("draft_model", gamma)
    return _written(generated(target, drafter, inputs, spec, params, debug))


# The engine tells the two kinds of models apart.
autoregressive_generate_encoder_decoder = autoregressive_generate
speculative_generate_encoder_decoder = speculative_generate


def ngram_assisted_speculative_generate(
    inputs: Ids,
    ngramstorage: NGramStorage,
    target: ModelSource,
    tokenizer: Any = None,
    gamma: int = 5,
    filler_top_k: int = 3,
    logits_processor: LogitsProcessor = _GREEDY,
    max_gen_len: int = 40,
    eos_tokens_id: EndIds = 1,
    pad_token_id: int | None = 0,
    use_cache: bool = False,
    first_target: bool = True,
    stop_if_unknown: bool = False,
    debug: bool = False,
    *,
    end_tokens_id: EndIds = _NOT_GIVEN,
) -> tuple[Ids, float]:
    """Generate with drafts of an n-gram store, which learns from the prompt and the output.

    Args:
        ngramstorage: keeps what it learns for the next call.
        gamma: draft tokens in each step, >= 1.
        filler_top_k: number of the target's top tokens to count at each position; 1 = only the text
            itself.
        stop_if_unknown: end the draft where the store knows nothing; else continue with an
            arbitrary token.
    Returns:
        The new ids, and the accepted fraction of the drafts, 0.0 if there were none.
    """
    require_int("gamma", gamma, 1)
    require_int("filler_top_k", filler_top_k, 1)
    fits = isinstance(ngramstorage, NGramStorage)
    require("ngramstorage", ngramstorage, fits, "an NGramStorage or OneLevelNGramStorage")
    storage, vocab_size = ngramstorage, None if stop_if_unknown else ngramstorage.vocab_size
    drafter = NgramDrafter(storage.n, filler_top_k, storage.one_level, vocab_size, storage.table)
    # The store may know earlier texts of the same seed: a draw must not depend on what it proposes.
    spec = SpecConfig("auto", gamma, rejection_sample_method="coupled")
    params = _params(max_gen_len, logits_processor, eos_tokens_id, end_tokens_id)
    return _written(generated(target, drafter, inputs, spec, params, debug))


def beam_search_generate(
    inputs: Ids,
    model: ModelSource,
    max_gen_len: int = 40,
    num_beams: int = 4,
    top_k: int = 3,
    min_length: float = 5.0,
    alpha: float = 1.2,
    eos_tokens_id: EndIds = 1,
    pad_token_id: int | None = 0,
    debug: bool = False,
    *,
    end_tokens_id: EndIds = _NOT_GIVEN,
) -> Ids:
    """Hugging Face's beam search, provided for compatibility; it does not use speculation.

    Args:
        num_beams: >= 1.
        top_k, min_length: accepted without effect; Hugging Face considers all tokens after each
            beam, and divides a score only by length ** alpha.
        alpha: its length_penalty.
        pad_token_id: fills up after the end of a beam; None or an id.
    Returns:
        The new ids of the best beam; an end token is kept.
    """
    for name, value in (("max_gen_len", max_gen_len), ("num_beams", num_beams)):
        require_int(name, value, 1)
    require("inputs", inputs, len(inputs) > 0, "the ids of a prompt")
    loaded: Any = load_model("model", model, EngineConfig())
    input_ids = torch.tensor([inputs], device=loaded.device)
    output = loaded.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        max_new_tokens=max_gen_len,
        num_beams=num_beams,
        length_penalty=alpha,
        do_sample=False,
        eos_token_id=_ends(eos_tokens_id, end_tokens_id) or None,
        pad_token_id=0 if pad_token_id is None else pad_token_id,
    )
    return output[0, 0 if loaded.config.is_encoder_decoder else len(inputs) :].tolist()


_LOSSY = "False (True is LOSSY: it does not keep the target's distribution, so it is not offered)"


def _params(
    max_gen_len: int, processor: LogitsProcessor, ends: EndIds, other_ends: EndIds
) -> SamplingParams:
    require_int("max_gen_len", max_gen_len, 1)
    return SamplingParams(
        **_sampling(processor),
        seed=seed_from_torch(),
        max_tokens=max_gen_len,
        ignore_eos=True,
        stop_token_ids=_ends(ends, other_ends) or None,
    )


def _ends(ends: EndIds, other_ends: EndIds) -> list[int]:
    is_other = other_ends is not _NOT_GIVEN
    name, given = "end_tokens_id" if is_other else "eos_tokens_id", cast(Any, ends)
    given = cast(Any, other_ends) if is_other else given
    if given is None:
        return []
    ids: Any = given.tolist() if hasattr(given, "tolist") else given
    ids = [*ids] if isinstance(ids, Sequence) and not isinstance(ids, str) else [ids]
    ids = [each.tolist() if hasattr(each, "tolist") else each for each in ids]
    require(name, given, all(is_int(i) and i >= 0 for i in ids), "an id, ids in a list, or None")
    return ids


def _sampling(processor: LogitsProcessor) -> dict[str, Any]:
    """The fields of SamplingParams that are equivalent to a processor."""
    is_known = isinstance(processor, LogitsProcessor)
    require("logits_processor", processor, is_known, "a processor of fastspec.compat")
    kind = type(processor)
    expected = (
        "a class with _process() of its own, but neither sample() nor __call__(), derived from"
        " GreedyProcessor or MultinomialProcessor"
    )
    is_drawn_here = getattr(kind, "sample", None) in (None, *_DRAWS)
    is_called_here = kind.__call__ is LogitsProcessor.__call__
    own = {"sample", "_process", "__call__"} & vars(processor).keys()
    is_ours = is_drawn_here and is_called_here and not own
    require("logits_processor", processor, is_ours, expected)
    heat = 0.0 if isinstance(processor, GreedyProcessor) else processor.temperature
    is_same = kind in _SAME or (kind in _SAME_AT_1 and heat == 1)
    if not is_same:
        process = processor._process
        return {"temperature": heat, "logits_processors": [lambda _, scores: process(scores)]}
    filters = {name: vars(processor).get(name) for name in ("top_k", "top_p")}
    return {"temperature": heat, **{name: v for name, v in filters.items() if v is not None}}


_DRAWS = (GreedyProcessor.sample, MultinomialProcessor.sample)
# What filters by rank, or not at all, is the same before and after the temperature.
_SAME = (GreedyProcessor, MultinomialProcessor, TopKProcessor)
_SAME_AT_1 = (NucleusProcessor, TopKNucleusProcessor)


def _written(made: tuple[RequestOutput, int | None]) -> tuple[Ids, float]:
    """The ids of a text, with an encoder-decoder's start token first; the accepted fraction."""
    output, start = made
    ids = [*output.token_ids] if start is None else [start, *output.token_ids]
    return ids, output.stats.acceptance_rate or 0.0
