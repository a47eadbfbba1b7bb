"""Reviews between drafts: lenience at the right places, with the right probabilities."""

import numpy as np
import pytest
import torch

from fastspec import Engine, SamplingParams, SpecConfig
from fastspec.drafters.cascade.draft import Draft, DraftToken
from fastspec.drafters.cascade.drafter import CascadeDrafter
from fastspec.drafters.cascade.levels import ModelLevel
from fastspec.models.reduced_vocabulary import DraftVocabulary
from fastspec_kernels.testing import chi_square

from ..models import random_model
from .helpers import ALPHA, PLAIN, p_value, small_model, small_pair
from .probes import batch_of, request_of

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0, max_tokens=50)


class FixedLogits:
    """A model whose rows are known."""

    name = "model"

    def __init__(self, logits):
        self._logits = logits
        self.vocabulary = DraftVocabulary(logits[0].shape[1])

    def read(self, requests, texts, num_rows):
        return torch.cat([rows[:n] for rows, n in zip(self._logits, num_rows, strict=True)])


def draft_of(tokens, name="r", limit=37):
    request = request_of([1, 2, 3], name)
    draft = Draft(request, limit, is_greedy=True)
    draft.replace(0, tokens)
    return draft


def by_the_rules(tokens, logits, lenience):
    """Kept while argmax or lenience * p > q, each at its own place; then the argmax there."""
    probs = logits.softmax(-1)
    kept = []
    for token, row in zip(tokens, probs, strict=False):
        is_best = token.token_id == int(row.argmax())
        if not is_best and not (lenience > 1 and lenience * row[token.token_id] > token.prob):
            break
        kept.append((token.token_id, token.writer, row[token.token_id].item()))
    row = probs[len(kept)]
    return [*kept, (int(row.argmax()), "model", row.max().item())]


@pytest.mark.parametrize("lenience", [1.0, 1.5, 4.0])
def test_greedy_reviews_follow_the_rule(lenience):
    """Published bugs 2 to 4: probabilities one place off, and those of another call."""
    generator = torch.Generator().manual_seed(3)
    num_kept = set()
    for _ in range(60):
        counts = torch.randint(0, 6, (3,), generator=generator).tolist()
        logits = [2 * torch.randn((6, 5), generator=generator) for _ in counts]
        drafts = []
        for number, count in enumerate(counts):
            ids = torch.randint(0, 5, (count,), generator=generator).tolist()
            probs = torch.rand(count, generator=generator).tolist()
            tokens = [DraftToken(i, "small", None, p) for i, p in zip(ids, probs, strict=True)]
            drafts.append(draft_of(tokens, str(number)))
        expected = [
            by_the_rules(draft.tokens, rows, lenience)
            for draft, rows in zip(drafts, logits, strict=True)
        ]
        batch = batch_of(*(draft.request for draft in drafts), wanted=9)
        level = ModelLevel(FixedLogits(logits), lenience)
        level.review(drafts, [0] * 3, batch)
        for draft, wanted in zip(drafts, expected, strict=True):
            assert [token[:2] for token in draft.tokens] == [row[:2] for row in wanted]
            if lenience > 1:
                probs = [token.prob for token in draft.tokens]
                assert probs == pytest.approx([row[2] for row in wanted], abs=1e-5)
            num_kept.add(len(wanted) - 1)
            assert draft.text[3:] == [token.token_id for token in draft.tokens]
    assert num_kept >= {0, 1, 2}


def test_nothing_follows_a_token_that_ends_the_text_or_the_limit():
    request = request_of([1, 2, 3], stop_ids=frozenset({7}))
    draft = Draft(request, 6, is_greedy=True)
    draft.replace(0, [DraftToken(i, "mag") for i in (4, 7, 5)])
    assert draft.text == [1, 2, 3, 4, 7]
    assert not draft.lacks(6)
    draft.replace(1, [DraftToken(i, "model") for i in (5, 5, 5, 5, 5, 5)])
    assert draft.text == [1, 2, 3, 4, 5, 5, 5, 5, 5]
    assert draft.num_unchanged == 1
    assert not draft.lacks(6)
    draft.replace(1, [])
    assert draft.lacks(6)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("lenience", [1.0, 2.0])
@pytest.mark.parametrize("spoilt", [0, 1, 2])
def test_a_review_ends_before_a_row_that_is_not_finite(spoilt, lenience, temperature):
    params = SamplingParams(temperature=temperature)
    request = request_of([1, 2, 3], params=params)
    draft = Draft(request, 37, is_greedy=temperature == 0)
    draft.replace(0, [DraftToken(1, "mag"), DraftToken(2, "mag")])
    logits = torch.full((3, 5), -torch.inf)
    for row, best in enumerate((1, 2, 4)):
        logits[row, best] = 0.0
    logits[spoilt, 3] = torch.nan
    level = ModelLevel(FixedLogits([logits]), lenience)
    level.review([draft], [0], batch_of(request, wanted=9))
    assert draft.text == [1, 2, 3, 1, 2][: 3 + spoilt]


@pytest.mark.check
@pytest.mark.parametrize(
    ("num_drafts", "k_matrix", "prompt"),
    [
        (2, [[2, 0], [0, 2]], [2, 4, 3, 2, 4, 3, 2, 4]),
        (1, [[2, 2], [0, 2]], [2, 1, 5, 2, 1, 5, 2]),
    ],
    ids=["models", "mag"],
)
def test_reviews_that_end_early_bend_no_distribution(num_drafts, k_matrix, prompt):
    """After token 1 the draft models may write nothing: what was accepted before that counts."""
    target = small_model()
    drafts = [random_model("llama", seed=n, vocab_size=5, eos_token_id=0) for n in (5, 6)]
    num = 6000
    params = [
        SamplingParams(
            temperature=1.0,
            seed=seed,
            max_tokens=3,
            ignore_eos=True,
            bad_words=[[1, token] for token in range(5)],
        )
        for seed in range(num)
    ]
    engine = Engine(
        target,
        drafts[:num_drafts],
        spec=SpecConfig("cascade", k_matrix=k_matrix),
        config={"max_batch_size": 512},
    )
    outputs = engine.generate([prompt] * num, params)
    counts = np.bincount([output.token_ids[0] for output in outputs], minlength=6)
    probs = target(torch.tensor([prompt])).logits[0, -1].double().softmax(-1)
    assert chi_square(counts, probs.detach().numpy()) > ALPHA


def test_distributions_bent_by_lenience_are_caught(monkeypatch):
    """Judged by a model's own distribution, what a lenient review kept would bias the output."""
    before = CascadeDrafter.propose

    def keeps_logits(self, batch):
        self._keeps_logits = True
        return before(self, batch)

    monkeypatch.setattr(CascadeDrafter, "propose", keeps_logits)
    models = small_pair()
    spec = SpecConfig("cascade", k_matrix=[[2, 1], [0, 2]], lenience=4.0)
    assert p_value(models, PLAIN, spec, num_draws=6000) < ALPHA
