"""The functions of LLMSpeculativeSampling and romsto: signatures and results, not their bugs."""

import inspect
import logging
from itertools import product

import numpy as np
import pytest
import torch

import fastspec
from fastspec import SpecConfig, compat
from fastspec.tools.compat.romsto import _sampling
from fastspec_kernels.testing import chi_square

from ..engine.helpers import (
    ALPHA,
    LENGTH,
    PROMPT,
    VOCAB_SIZE,
    drawn_counts,
    generated_greedily,
    small_pair,
)
from ..models import EOS_ID, perturbed, random_model, random_t5

SAMPLER = ["temperature", "top_k", "top_p"]
GENERATOR = ["logits_processor", "max_gen_len", "eos_tokens_id", "pad_token_id", "use_cache"]
PUBLISHED = {
    "autoregressive_sampling": ["x", "model", "N", *SAMPLER],
    "speculative_sampling": [
        *("prefix", "approx_model", "target_model", "max_len", "gamma"),
        *(*SAMPLER, "verbose", "random_seed"),
    ],
    "speculative_sampling_v2": [
        *("prefix", "approx_model", "target_model", "max_len", "gamma", *SAMPLER, "random_seed"),
    ],
    "autoregressive_generate": [
        *("inputs", "model", "max_gen_len", "logits_processor", "eos_tokens_id"),
        *("pad_token_id", "use_cache", "debug"),
    ],
    "speculative_generate": [
        *("inputs", "drafter", "target", "tokenizer", "gamma", *GENERATOR),
        *("skip_sample_adjustment", "first_target", "debug"),
    ],
    "ngram_assisted_speculative_generate": [
        *("inputs", "ngramstorage", "target", "tokenizer", "gamma", "filler_top_k", *GENERATOR),
        *("first_target", "stop_if_unknown", "debug"),
    ],
    "beam_search_generate": [
        *("inputs", "model", "max_gen_len", "num_beams", "top_k", "min_length", "alpha"),
        *("eos_tokens_id", "pad_token_id", "debug"),
    ],
}
IDS = [40, 7, 40, 7, 40, 7, 9]


@pytest.fixture(scope="module")
def pair():
    model = random_model("llama")
    return model, perturbed(model, 0.03)


@pytest.mark.parametrize("name", PUBLISHED)
def test_signatures_are_the_published_ones(name):
    parameters = inspect.signature(getattr(compat, name)).parameters.values()
    assert [p.name for p in parameters if p.kind != p.KEYWORD_ONLY] == PUBLISHED[name]


def test_names():
    assert set(PUBLISHED) <= set(dir(compat)) == set(dir(fastspec.tools.compat)) | set(dir(compat))
    assert all(hasattr(compat, name) for name in compat.__all__)
    with pytest.raises(AttributeError, match="no attribute 'KVCacheModel'"):
        compat.KVCacheModel  # noqa: B018


def test_speculative_sampling(pair, caplog):
    model, draft = pair
    prefix, expected = torch.tensor([IDS]), generated_greedily(model, IDS, 20)
    expected = expected[: expected.index(EOS_ID) + 1] if EOS_ID in expected else expected
    caplog.set_level(logging.INFO, "fastspec")
    greedy = compat.speculative_sampling(prefix, draft, model, 20, temperature=0, verbose=True)
    assert greedy.tolist() == [[*IDS, *expected]]  # no token more, where the published one wrote 4
    assert greedy.dtype == torch.int64
    assert "draft tokens accepted" in caplog.text
    plain = compat.autoregressive_sampling(prefix, model, 20, temperature=0)
    assert torch.equal(greedy, plain)
    filters = {"temperature": 0.9, "top_k": 20, "top_p": 0.9}
    seeded = [
        function(prefix, draft, model, 20, gamma=3, **filters, random_seed=seed)
        for function in (compat.speculative_sampling, compat.speculative_sampling_v2)
        for seed in (0, 1)
    ]
    assert torch.equal(seeded[0], seeded[2])  # a seed of 0 was ignored
    assert torch.equal(seeded[1], seeded[3])
    assert not torch.equal(seeded[0], seeded[1])
    again = []
    for _ in range(2):
        torch.manual_seed(7)
        again.append(compat.autoregressive_sampling(prefix, model, 20))
    assert torch.equal(*again)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("prefix", {"prefix": torch.tensor([1, 2])}),
        ("prefix", {"prefix": [[1, 2]]}),
        ("max_len", {"max_len": 0}),
        ("gamma", {"gamma": 0}),
        ("top_p", {"top_p": 1.5}),
        ("random_seed", {"random_seed": -1}),
    ],
)
def test_wrong_arguments_of_speculative_sampling(pair, name, arguments):
    given = {"prefix": torch.tensor([IDS]), "max_len": 4, **arguments}
    with pytest.raises(ValueError, match=f"^{name}: "):
        compat.speculative_sampling(approx_model=pair[1], target_model=pair[0], **given)


def test_generate(pair):
    model, draft = pair
    expected = [*generated_greedily(model, IDS, 30)]
    options = {"max_gen_len": 30, "eos_tokens_id": EOS_ID, "pad_token_id": None}
    assert compat.autoregressive_generate(IDS, model, **options) == expected
    ids, rate = compat.speculative_generate(IDS, draft, model, gamma=4, **options)
    assert ids == expected
    assert 0 < rate < 1
    ends = [expected[9], expected[4]]  # the earliest counts, whichever comes first in the list
    ids, _ = compat.speculative_generate(IDS, draft, model, max_gen_len=30, end_tokens_id=ends)
    assert ids == expected[: min(map(expected.index, ends)) + 1]
    ids, rate = compat.speculative_generate(IDS, draft, model, max_gen_len=1)
    assert (ids, rate) == (expected[:1], 0.0)  # divided by zero


def test_encoder_decoders_keep_their_start_token():
    model = random_t5()
    expected = [0, *generated_greedily(model, IDS, 12)]
    options = {"max_gen_len": 12, "eos_tokens_id": 99}
    assert compat.autoregressive_generate_encoder_decoder(IDS, model, **options) == expected
    draft = perturbed(model, 0.05)
    ids, _ = compat.speculative_generate_encoder_decoder(IDS, draft, model, **options)
    assert ids == expected


@pytest.mark.parametrize("kind", ["NGramStorage", "OneLevelNGramStorage"])
@pytest.mark.parametrize("stop_if_unknown", [False, True])
def test_a_store_is_kept_from_call_to_call(pair, kind, stop_if_unknown):
    model = pair[0]
    storage = getattr(compat, kind)(3, model.config.vocab_size)
    options = {"max_gen_len": 30, "eos_tokens_id": EOS_ID, "stop_if_unknown": stop_if_unknown}
    expected, rates = [*generated_greedily(model, IDS, 30)], []
    for index in range(3):
        if index == 2:
            storage.reset()
        ids, rate = compat.ngram_assisted_speculative_generate(IDS, storage, model, **options)
        assert ids == expected
        rates.append(rate)
    assert rates[0] == rates[2] < rates[1]


def test_storage():
    storage, one_level = compat.NGramStorage(3, 50), compat.OneLevelNGramStorage(3, 50)
    for each in (storage, one_level):
        assert not each.next_token(torch.tensor([[5, 6]]))[1].any()
        each.initialize(torch.tensor([[5, 6, 7, 5, 6, 7]]))
        each.update(torch.tensor([[7, 8]]), torch.tensor([[9, 9, 4]]))
        tokens, known = each.next_token(torch.tensor([[5, 6], [7, 8], [1, 2]]))
        assert tokens[:2].tolist() == [7, 9]
        assert known.tolist() == [True, True, False]
        assert 0 <= tokens[2] < 50
    ends = torch.tensor([[1, 6]])  # one token is known, two are not: that was never stored
    assert storage.next_token(ends)[1].tolist() == [True]
    assert one_level.next_token(ends)[1].tolist() == [False]


def test_end_tokens_by_any_form(pair):
    """None, ints, lists, and numpy's and torch's."""
    target, _ = pair
    free = compat.autoregressive_generate(IDS, target, 12, eos_tokens_id=None)
    assert len(free) == 12
    end = free[4]
    expected = free[: free.index(end) + 1]
    for form in (end, [end], (end,), np.int64(end), torch.tensor(end), [torch.tensor(end)]):
        assert compat.autoregressive_generate(IDS, target, 12, eos_tokens_id=form) == expected
        assert compat.autoregressive_generate(IDS, target, 12, end_tokens_id=form) == expected
    both = {"eos_tokens_id": end, "end_tokens_id": None}
    assert compat.autoregressive_generate(IDS, target, 12, **both) == free
    assert len(compat.beam_search_generate(IDS, target, 5, eos_tokens_id=None)) == 5
    for form in ([None], -1, "a", 1.5):
        with pytest.raises(ValueError, match=r"^eos_tokens_id: expected an id, ids in a list"):
            compat.autoregressive_generate(IDS, target, 5, eos_tokens_id=form)
    with pytest.raises(ValueError, match=r"^end_tokens_id: "):
        compat.autoregressive_generate(IDS, target, 5, end_tokens_id=[-1])
    with pytest.raises(ValueError, match=r"^inputs: expected the ids of a prompt"):
        compat.beam_search_generate([], target, 5)


def test_processors_alone():
    """They can be called, and draw, as the published ones; what they refuse they refuse at once."""
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    for processor in (compat.GreedyProcessor(0), compat.NucleusProcessor(0, 0.9)):
        assert processor(logits).tolist() == [[0.0, 1.0, 0.0]]
    assert compat.GreedyProcessor().sample(logits).tolist() == [[1]]
    draw = compat.TopKProcessor(0.7, 1)
    assert draw.sample(draw(logits)).tolist() == [[1]]
    assert torch.equal(compat.NucleusProcessor(1, 1.0)(logits), logits.softmax(dim=-1))
    for make, named in (
        (lambda: compat.NucleusProcessor(1, 0.0), "top_p"),
        (lambda: compat.NucleusProcessor(0.5, 0.0), "top_p"),
        (lambda: compat.TopKNucleusProcessor(0.5, 3, 2.0), "top_p"),
        (lambda: compat.TopKProcessor(1.0, 0), "top_k"),
        (lambda: compat.MultinomialProcessor(-1.0), "temperature"),
        (lambda: compat.GreedyProcessor("hot"), "temperature"),
    ):
        with pytest.raises(ValueError, match=f"^{named}: "):
            make()


def test_beam_search_is_that_of_hugging_face(pair):
    model, ids = pair[0], torch.tensor([IDS])
    expected = model.generate(
        ids, max_new_tokens=8, num_beams=3, length_penalty=1.2, eos_token_id=EOS_ID, pad_token_id=0
    )
    out = compat.beam_search_generate(IDS, model, 8, num_beams=3, eos_tokens_id=EOS_ID)
    assert out == expected[0, len(IDS) :].tolist()


class Sharper(compat.MultinomialProcessor):
    def _process(self, logits):
        logits *= 1.5
        return logits


class Picked(compat.MultinomialProcessor):
    def __call__(self, logits):
        return torch.zeros_like(logits).index_fill_(-1, torch.tensor(5), 1)


def test_processors_whose_result_would_be_ignored_are_refused(pair):
    changed = compat.MultinomialProcessor(0.7)
    changed._process = lambda logits: logits * 2
    for processor in (Picked(1.0), changed):
        with pytest.raises(ValueError, match=r"^logits_processor: expected a class with _process"):
            compat.autoregressive_generate(IDS, pair[0], 5, processor)


PROCESSORS = [
    compat.NucleusProcessor(0.6, 0.8),
    compat.TopKNucleusProcessor(1.6, 4, 0.9),
    Sharper(1.2),
]


@pytest.mark.parametrize("processor", PROCESSORS)
def test_filters_come_before_the_temperature(processor):
    """In the distribution itself: the nucleus is that of temperature 1."""
    model, draft = small_pair()
    texts = torch.tensor(list(product(range(VOCAB_SIZE), repeat=LENGTH)))
    prompts = torch.tensor([PROMPT] * len(texts))
    with torch.no_grad():
        logits = model(torch.cat([prompts, texts[:, :-1]], dim=1)).logits[:, len(PROMPT) - 1 :]
    distribution = processor(logits.flatten(0, 1)).view(logits.shape).gather(2, texts[:, :, None])
    distribution = distribution[:, :, 0].double().prod(dim=1).view((VOCAB_SIZE,) * LENGTH).numpy()
    counts = drawn_counts((model, draft), _sampling(processor), SpecConfig("auto", 1), 800)
    assert chi_square(counts, distribution / distribution.sum()) > ALPHA


@pytest.mark.parametrize(
    ("processor", "expected"),
    [
        (compat.GreedyProcessor(), {"temperature": 0.0}),
        (compat.MultinomialProcessor(0.7), {"temperature": 0.7}),
        (compat.TopKProcessor(0.7, 9), {"temperature": 0.7, "top_k": 9}),
        (compat.NucleusProcessor(1, 0.9), {"temperature": 1, "top_p": 0.9}),
        (compat.TopKNucleusProcessor(1, 9, 0.9), {"temperature": 1, "top_k": 9, "top_p": 0.9}),
    ],
)
def test_what_is_equal_is_left_to_the_kernels(processor, expected):
    assert _sampling(processor) == expected


class Drawing(compat.LogitsProcessor):
    def sample(self, probs):
        return probs.argmax(dim=-1)


def test_wrong_arguments_of_generate(pair):
    model, draft = pair
    for name, options in [
        ("skip_sample_adjustment: .*LOSSY", {"skip_sample_adjustment": True}),
        ("gamma", {"gamma": 0}),
        ("max_gen_len", {"max_gen_len": 0}),
        ("logits_processor: .*sample", {"logits_processor": Drawing(1)}),
        ("logits_processor", {"logits_processor": torch.nn.Identity()}),
    ]:
        with pytest.raises(ValueError, match=f"^{name}"):
            compat.speculative_generate(IDS, draft, model, **options)
    for name, options in [("filler_top_k", {"filler_top_k": 0}), ("ngramstorage", {})]:
        storage = compat.NGramStorage(3, 9) if options else draft
        with pytest.raises(ValueError, match=f"^{name}"):
            compat.ngram_assisted_speculative_generate(IDS, storage, model, **options)
    with pytest.raises(ValueError, match=r"^n: "):
        compat.NGramStorage(1, 9)
