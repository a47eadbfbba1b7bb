"""Who is called how often, by the worked examples of CS-Drafting's rules; bad k_matrices."""

import pytest
import torch

from fastspec import Engine, SamplingParams, SpecConfig
from fastspec.config.k_matrix import as_k_matrix, most_draft_tokens
from fastspec.drafters import MagDrafter, PromptLookupDrafter
from fastspec.drafters.cascade.draft import DraftToken
from fastspec.drafters.cascade.drafter import CascadeDrafter

from ..models import perturbed, random_model
from .probes import batch_of, drafter_of, request_of
from .test_errors import assert_one_line

GREEDY = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
RECIPE_OF_ONE = [[13, 10], [0, 10]]
RECIPE_OF_TWO = [[5, 14, 10], [0, 1, 10], [0, 0, 10]]


class Toy:
    """A level that keeps as much as its script says, and notes every call."""

    def __init__(self, name, log, kept=None, piece=0):
        self.name, self.can_review, self._log, self._kept = name, kept is not None, log, kept or []
        self.piece = piece

    def write(self, drafts, counts, batch):
        for draft, asked in zip(drafts, counts, strict=True):
            count = self.piece or asked
            self._log.append((self.name, "writes", count))
            tokens = [
                DraftToken(1, self.name, is_surplus=self.piece > 0 and i >= 10)
                for i in range(count)
            ]
            draft.replace(len(draft.tokens), tokens)

    def review(self, drafts, starts, batch):
        for draft, start in zip(drafts, starts, strict=True):
            judged = draft.tokens[start:]
            kept = judged[: self._kept.pop(0) if self._kept else len(judged)]
            self._log.append((self.name, "reviews", len(judged), len(kept) + 1))
            draft.passes[self.name] += 1
            draft.replace(start, [*kept, DraftToken(2, self.name)])

    def room(self, length):
        return 1000

    def shorten(self, request, length):
        pass


def propose(levels, k_matrix, num_requests=1, limit=100):
    requests = [request_of([1, 2, 3], f"r{i}") for i in range(num_requests)]
    batch = batch_of(*requests, wanted=limit, num=100)
    return CascadeDrafter(levels, k_matrix, vocab_size=9).propose(batch)


def test_all_agree_with_one_model():
    """MaG writes 10, the model adds 1: twice for 13 tokens; then MaG's 10 while below 23."""
    log = []
    proposal = propose([Toy("160m", log, kept=[10, 10]), Toy("mag", log)], RECIPE_OF_ONE)
    one_round = [("mag", "writes", 10), ("160m", "reviews", 10, 11)]
    assert log == [*one_round, *one_round, ("mag", "writes", 10)]
    assert proposal.num_tokens == [32]
    assert proposal.passes == [{"160m": 2}]
    assert proposal.writers == [(["mag"] * 10 + ["160m"]) * 2 + ["mag"] * 10]


def test_nobody_agrees_with_one_model():
    log = []
    proposal = propose([Toy("160m", log, kept=[0] * 13), Toy("mag", log)], RECIPE_OF_ONE)
    one_round = [("mag", "writes", 10), ("160m", "reviews", 10, 1)]
    assert log == [*one_round * 13, ("mag", "writes", 10)]
    assert proposal.num_tokens == [23]
    assert proposal.passes == [{"160m": 13}]


def test_a_chunk_that_reaches_the_total_ends_both_phases():
    log = []
    proposal = propose([Toy("160m", log, kept=[10, 0, 10]), Toy("mag", log)], RECIPE_OF_ONE)
    assert [entry[3] for entry in log if entry[1] == "reviews"] == [11, 1, 11]
    assert proposal.num_tokens == [23]
    assert log[-1][0] == "160m"


def test_all_agree_with_two_models():
    log = []
    levels = [Toy("base", log, [11]), Toy("small", log, [10, 10]), Toy("mag", log)]
    proposal = propose(levels, RECIPE_OF_TWO)
    assert log == [
        ("mag", "writes", 10),
        ("small", "reviews", 10, 11),
        ("base", "reviews", 11, 12),  # 11 of small's are enough, MaG adds nothing
        ("mag", "writes", 10),
        ("small", "reviews", 10, 11),  # 23 of 19
        ("mag", "writes", 10),  # 33 of 29
    ]
    assert proposal.num_tokens == [33]
    assert proposal.passes == [{"base": 1, "small": 2}]


def test_nobody_agrees_with_two_models():
    log = []
    levels = [Toy("base", log, [0] * 5), Toy("small", log, [0] * 19), Toy("mag", log)]
    proposal = propose(levels, RECIPE_OF_TWO)
    small = [("mag", "writes", 10), ("small", "reviews", 10, 1)]
    base = [*small, ("mag", "writes", 10), ("base", "reviews", 11, 1)]
    assert log == [*base * 5, *small * 14, ("mag", "writes", 10)]
    assert proposal.num_tokens == [29]
    assert proposal.passes == [{"base": 5, "small": 19}]


def test_a_surplus_stays_uncounted_and_the_target_gets_a_piece_last():
    """Pieces of 14 of which k_matrix counts 10."""
    log = []
    levels = [Toy("160m", log, []), Toy("mag", log, piece=14)]
    one_round = [("mag", "writes", 14), ("160m", "reviews", 14, 15)]
    assert propose(levels, RECIPE_OF_ONE).num_tokens == [44]
    assert log == [*one_round, *one_round, ("mag", "writes", 14)]
    log.clear()
    assert propose(levels, [[5, 6], [0, 8]]).num_tokens == [29]
    assert log == [*one_round, ("mag", "writes", 14)]  # 11 of 11, and one more
    for limit in (1, 14, 16, 28):
        assert propose(levels, RECIPE_OF_ONE, limit=limit).num_tokens == [limit]
    assert propose(levels, [[20, 0], [0, 10]]).num_tokens == [30]  # none asked of MaG, none last


def test_a_cascade_never_drafts_more_than_is_wanted():
    for limit in (1, 7, 11, 12, 30):
        log = []
        levels = [Toy("base", log, []), Toy("small", log, []), Toy("mag", log)]
        proposal = propose(levels, RECIPE_OF_TWO, limit=limit)
        assert proposal.num_tokens == [limit]
        assert (proposal.token_ids >= 0).sum() == limit


def test_requests_of_a_batch_are_reviewed_each_in_its_own_rounds():
    log = []
    proposal = propose([Toy("160m", log, [10, 0, 10, 10]), Toy("mag", log)], RECIPE_OF_ONE, 2)
    # both; both; only the second one lacks tokens of its first 13
    assert proposal.passes == [{"160m": 2}, {"160m": 3}]
    assert proposal.num_tokens == [32, 23]


def test_the_most_tokens_of_a_k_matrix():
    assert most_draft_tokens(as_k_matrix([[5]])) == 9
    assert most_draft_tokens(as_k_matrix([[6, 4], [0, 0]])) == 10
    assert SpecConfig("cascade", k_matrix=RECIPE_OF_ONE).num_draft_tokens() == 32
    assert SpecConfig("cascade", k_matrix=RECIPE_OF_TWO).num_draft_tokens() == 38
    tensor = torch.tensor(RECIPE_OF_TWO)
    surplus = {"method": "cascade", "mag_surplus": True}
    assert SpecConfig(**surplus, k_matrix=[[5]]).num_draft_tokens() == 24 + 2 * 9
    assert SpecConfig(**surplus, k_matrix=RECIPE_OF_ONE).num_draft_tokens() == 42 + 4 * 9
    assert SpecConfig(**surplus, k_matrix=[[990, 3], [0, 0]]).num_draft_tokens() == 1024
    assert SpecConfig("cascade", k_matrix=tensor) == SpecConfig("cascade", k_matrix=RECIPE_OF_TWO)


@pytest.mark.parametrize(
    ("k_matrix", "named"),
    [
        ([[5, 10], [1, 10]], r"entry \[1\]\[0\] is below the diagonal: expected 0, got 1"),
        ([[5, 10], [0, 10, 3]], "square"),
        ([[5, 10]], "square"),
        ([], "square"),
        ([5, 10], "square"),
        ("[[5]]", "square"),
        (7, "square"),
        ([[5, -1], [0, 2]], r"entry \[0\]\[1\]: expected an int >= 0, got -1"),
        ([[5, 1.0], [0, 2]], r"entry \[0\]\[1\]"),
        ([[True, 1], [0, 2]], r"entry \[0\]\[0\]"),
        (torch.ones(2, 2), r"entry \[0\]\[0\]"),
        (torch.ones(2, 2, dtype=torch.int64), "below the diagonal"),
        ([[0, 0], [0, 2]], "requests no tokens"),
    ],
)
def test_matrices_that_are_none(k_matrix, named):
    with pytest.raises(ValueError, match=f"^k_matrix: .*{named}") as error:
        SpecConfig("cascade", k_matrix=k_matrix)
    assert_one_line(error)


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("lenience", {"lenience": 0.5}),
        ("lenience", {"lenience": float("inf")}),
        ("lenience", {"lenience": "2"}),
        ("lenience", {"method": "draft_model", "k_matrix": None, "lenience": 2.0}),
        ("k_matrix", {"method": "mag", "k_matrix": [[5]]}),
        ("num_speculative_tokens", {"num_speculative_tokens": 7}),
        ("num_speculative_tokens", {"num_assistant_tokens": 7}),
        ("prompt_lookup_max", {"prompt_lookup_max": 3}),
    ],
)
def test_options_that_do_not_fit(field, options):
    with pytest.raises(ValueError, match=f"^{field}: ") as error:
        SpecConfig(**{"method": "cascade", "k_matrix": RECIPE_OF_ONE, **options})
    assert_one_line(error, field)


def test_levels_that_do_not_fit():
    model = random_model("llama")
    draft = perturbed(model, 0.03)

    def build(drafter, k_matrix):
        return Engine(model, drafter, spec=SpecConfig("cascade", k_matrix=k_matrix))

    with pytest.raises(ValueError, match=r"^k_matrix: it is 4 x 4, but the cascade has 2 levels"):
        build([draft, MagDrafter()], [[5, 4, 10, 1], [0] * 4, [0] * 4, [0] * 4])
    with pytest.raises(ValueError, match=r"^k_matrix: row 1 belongs to prompt_lookup"):
        build([PromptLookupDrafter(1, 4), MagDrafter()], RECIPE_OF_ONE)
    with pytest.raises(ValueError, match=r"^drafter: method 'cascade' needs a draft model"):
        build(None, RECIPE_OF_ONE)
    with pytest.raises(ValueError, match=r"^drafter: a cascade level"):
        build([draft, drafter_of(Engine(model, draft))], RECIPE_OF_ONE)
    with pytest.raises(ValueError, match=r"^drafter: a list of several needs"):
        Engine(model, [draft, draft])
