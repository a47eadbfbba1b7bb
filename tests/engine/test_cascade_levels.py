"""Reviews between drafts: lenience at the right places, with the right probabilities."""

import pytest
import torch

from fastspec import SamplingParams, SpecConfig
from fastspec.drafters.cascade.draft import Draft, DraftToken
from fastspec.drafters.cascade.drafter import CascadeDrafter
from fastspec.drafters.cascade.levels import ModelLevel
from fastspec.models.reduced_vocabulary import DraftVocabulary
from fastspec_kernels.testing import chi_square

from .helpers import ALPHA, PLAIN, drawn_counts, exact_distribution, small_pair
from .probes import batch_of, request_of

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0, max_tokens=50)


class FixedLogits:
    """A model whose rows are known."""

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
        level = ModelLevel(FixedLogits(logits), "model", lenience)
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


def test_rows_that_are_not_finite_leave_nothing():
    for lenience in (1.0, 2.0):
        draft = draft_of([DraftToken(1, "mag"), DraftToken(2, "mag")])
        logits = torch.zeros(3, 5)
        logits[0, 2] = torch.nan
        level = ModelLevel(FixedLogits([logits]), "model", lenience)
        level.review([draft], [0], batch_of(draft.request, wanted=9))
        assert draft.text == [1, 2, 3]


def test_distributions_bent_by_lenience_are_caught(monkeypatch):
    """Judged by a model's own distribution, what a lenient review kept would bias the output."""
    before = CascadeDrafter.propose

    def keeps_logits(self, batch):
        self._keeps_logits = True
        return before(self, batch)

    monkeypatch.setattr(CascadeDrafter, "propose", keeps_logits)
    models = small_pair()
    spec = SpecConfig("cascade", k_matrix=[[2, 1], [0, 2]], lenience=4.0)
    counts = drawn_counts(models, PLAIN, spec, num_draws=6000)
    assert chi_square(counts, exact_distribution(models[0], PLAIN)) < ALPHA
