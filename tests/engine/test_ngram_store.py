"""The n-gram store: what it counts, what it proposes, same output whatever it proposes."""

from collections import Counter, defaultdict
from dataclasses import replace

import pytest
import torch

from fastspec import Engine, EngineConfig, SamplingParams, SpecConfig
from fastspec.drafters import ngram_table
from fastspec.drafters.ngram import NgramDrafter
from fastspec.drafters.ngram_table import NgramTable

from ..models import random_model
from .helpers import ALPHA, FILTERED, hugging_face_greedy, p_value, small_model
from .probes import batch_of, drafter_of, is_free_store, request_of
from .test_ngram_drafters import GREEDY, REPETITIVE


def by_the_rules(text, ngram_size, num, shortest=1):
    """The most frequent successor of the longest known end, of equals the latest; repeatedly."""
    counts, latest = defaultdict(Counter), {}
    for place, token in enumerate(text):
        for size in range(shortest, min(ngram_size - 1, place) + 1):
            context = tuple(text[place - size : place])
            counts[context][token] += 1
            latest[context, token] = place
    drafts = []
    while len(drafts) < num:
        end = (text + drafts)[-ngram_size + 1 :]
        known = next((tuple(end[i:]) for i in range(len(end)) if tuple(end[i:]) in counts), None)
        if known is None:
            break
        best = max(counts[known], key=lambda token: (counts[known][token], latest[known, token]))
        drafts.append(best)
    return drafts + [-1] * (num - len(drafts))


@pytest.mark.parametrize(
    ("ngram_size", "one_level"), [(2, False), (3, False), (5, False), (2, True), (3, True)]
)
def test_proposals_follow_the_rules(ngram_size, one_level):
    """A published store held no successors of single tokens, so with n = 2 none at all."""
    generator = torch.Generator().manual_seed(5)
    drafter = NgramDrafter(ngram_size, filler_top_k=1, one_level=one_level)
    shortest = ngram_size - 1 if one_level else 1
    for _ in range(15):
        words = int(torch.randint(2, 9, (1,), generator=generator))
        texts = [torch.randint(words, (30,), generator=generator).tolist() for _ in range(3)]
        starts = torch.randint(1, 15, (3,), generator=generator).tolist()
        requests = [
            request_of(text[:start], name)
            for text, start, name in zip(texts, starts, "abc", strict=True)
        ]
        for growth in (0, 1, 4, 9):
            for request, text in zip(requests, texts, strict=True):
                length = len(request.token_ids)
                request.token_ids += text[length : length + growth]
            proposal = drafter.propose(batch_of(*requests, wanted=5))
            expected = [
                by_the_rules(request.token_ids, ngram_size, 5, shortest) for request in requests
            ]
            assert proposal.token_ids.tolist() == expected
            assert proposal.num_tokens == [sum(t >= 0 for t in row) for row in expected]
        for request in requests:
            drafter.release(request)


def test_fillers_are_counted_after_every_verified_place():
    drafter = NgramDrafter(2, filler_top_k=2)
    request = request_of([7, 8, 7])
    proposal = drafter.propose(batch_of(request, wanted=2))
    assert proposal.token_ids.tolist() == [[8, 7]]
    logits = torch.full((3, 20), -9.0)
    for row, (first, second) in enumerate([(3, 4), (5, 6), (1, 2)]):
        logits[row, first], logits[row, second] = 2.0, 1.0
    proposal.on_target_logits(logits, [3])
    # After 7: 8 and now 3 and 4; after 8: 7, 5 and 6; after 7 as a draft: 1 and 2.
    request.token_ids += [3]
    after_3 = drafter.propose(batch_of(request, wanted=2)).token_ids.tolist()
    assert after_3 == [[-1, -1]]
    request.token_ids += [8]
    assert drafter.propose(batch_of(request, wanted=1)).token_ids.tolist() == [[7]]
    request.token_ids += [7]
    # What was said twice is first, then by recency: 3, said once and a filler once, after 7.
    assert drafter.propose(batch_of(request, wanted=1)).token_ids.tolist() == [[3]]


def test_paused_requests_learn_no_fillers_in_a_batch_either():
    """Alone they would not ask the drafter, and what a seed says must not depend on the batch."""
    drafter = NgramDrafter(2, filler_top_k=2)
    paused, other = request_of([7, 8, 9], "paused"), request_of([7, 8, 7], "other")
    proposal = drafter.propose(replace(batch_of(paused, other, wanted=2), num_draft_tokens=[0, 2]))
    logits = torch.full((4, 20), -9.0)
    logits[:, 3], logits[:, 4] = 2.0, 1.0
    proposal.on_target_logits(logits, [1, 3])
    for request, expected in ((paused, [[-1]]), (other, [[3]])):
        request.token_ids += [3, request.token_ids[-1]] if request is other else []
        assert drafter.propose(batch_of(request, wanted=1)).token_ids.tolist() == expected


def test_paused_requests_learn_their_text_as_if_alone(monkeypatch):
    """Where buckets are shared, what is counted together decides between equal counts."""
    monkeypatch.setattr(ngram_table, "_BUCKETS", 32)
    generator = torch.Generator().manual_seed(0)
    for _ in range(40):
        text = torch.randint(6, (24,), generator=generator).tolist()
        proposals = []
        for has_company in (False, True):
            drafter = NgramDrafter(3, filler_top_k=1)
            paused, other = request_of(text[:12], "paused"), request_of(text[::-1], "other")
            drafter.propose(batch_of(paused, wanted=2))
            for length in range(13, 24):
                paused.token_ids = text[:length]
                if has_company:
                    batch = replace(batch_of(paused, other, wanted=2), num_draft_tokens=[0, 2])
                    drafter.propose(batch)
            proposal = drafter.propose(batch_of(paused, wanted=6))
            proposals.append(proposal.token_ids.tolist())
        assert proposals[0] == proposals[1]


@pytest.mark.parametrize("filler_top_k", [1, 3])
@pytest.mark.parametrize("ngram_size", [2, 4])
def test_greedy_output_is_that_of_plain_decoding(ngram_size, filler_top_k):
    model = random_model("llama")
    spec = SpecConfig("ngram", 4, ngram_size=ngram_size, filler_top_k=filler_top_k)
    engine = Engine(model, spec=spec, config=EngineConfig(max_batch_size=3))
    outputs = engine.generate(REPETITIVE, GREEDY)
    expected = [hugging_face_greedy(model, prompt, GREEDY.max_tokens) for prompt in REPETITIVE]
    assert [output.token_ids for output in outputs] == expected
    assert engine.stats.num_accepted_tokens > 0
    assert {writer for output in outputs for writer in output.drafters} == {None, "ngram"}


def test_requests_do_not_learn_from_each_other():
    """Neither batch mates, nor earlier requests, nor preemption change what a seed says."""
    model = random_model("llama")
    params = [
        SamplingParams(temperature=0.7, seed=seed, max_tokens=40, ignore_eos=True)
        for seed in range(len(REPETITIVE))
    ]
    spec = SpecConfig("ngram", 4)
    alone = Engine(model, spec=spec)
    expected = [
        alone.generate([prompt], one)[0] for prompt, one in zip(REPETITIVE, params, strict=True)
    ]
    for config in (EngineConfig(), EngineConfig(block_size=4, num_blocks=40)):
        outputs = Engine(model, spec=spec, config=config).generate(REPETITIVE, params)
        assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
        assert [o.stats.num_steps for o in outputs] == [o.stats.num_steps for o in expected]


def test_where_nothing_is_known_any_token_is_proposed():
    proposals = [
        NgramDrafter(3, 1, vocab_size=6).propose(batch_of(request_of(text), wanted=4))
        for text in ([1], [1], [2])
    ]
    assert [proposal.num_tokens for proposal in proposals] == [[4]] * 3
    first, again, other = (proposal.token_ids.tolist() for proposal in proposals)
    assert first == again != other
    assert set(first[0] + other[0]) <= {*range(6)}
    spec = SpecConfig("ngram", 2, ngram_guesses=True)
    assert p_value((small_model(), None), FILTERED, spec, num_draws=1000) > ALPHA


def test_a_store_kept_across_prompts():
    """What one prompt taught drafts for the next, and no text depends on it, whatever its seed."""
    model = random_model("llama")
    params = [
        SamplingParams(temperature=t, seed=5, max_tokens=40, ignore_eos=True) for t in (0, 0.7)
    ]
    prompts = REPETITIVE[:1] * 2
    plain = Engine(model, spec=SpecConfig("none", rejection_sample_method="coupled"))
    expected = [output.token_ids for output in plain.generate(prompts, params)]
    options = {"rejection_sample_method": "coupled", "ngram_store": "engine"}
    engine = Engine(model, spec=SpecConfig("ngram", 4, **options))
    first, again = engine.generate(prompts, params), engine.generate(prompts, params)
    assert [o.token_ids for o in first] == [o.token_ids for o in again] == expected
    for before, after in zip(first, again, strict=True):
        assert after.stats.num_steps < before.stats.num_steps
    with pytest.raises(ValueError, match=r"^ngram_store: .* 'coupled', got 'engine'"):
        SpecConfig("ngram", ngram_store="engine")


def test_a_store_ends_with_its_request():
    engine = Engine(random_model("llama"), spec=SpecConfig("ngram", 4))
    engine.generate(REPETITIVE, GREEDY)
    assert is_free_store(drafter_of(engine))


def test_sampled_output_has_the_targets_distribution(monkeypatch):
    monkeypatch.setattr("fastspec.drafters.ngram_table._BUCKETS", 64)
    model = small_model()
    spec = SpecConfig("ngram", 2, ngram_size=3, filler_top_k=2)
    assert p_value((model, None), FILTERED, spec, num_draws=3000) > ALPHA


def test_contexts_that_share_a_bucket_are_told_apart(monkeypatch):
    monkeypatch.setattr("fastspec.drafters.ngram_table._BUCKETS", 1)
    table = NgramTable(1)
    table.grow(1, torch.device("cpu"))
    row, zero = torch.tensor([0]), torch.tensor([0])
    table.learn(row, torch.tensor([[5]]), torch.tensor([9]), zero)
    assert table.next_tokens(row, torch.tensor([[5]])).tolist() == [9]
    assert table.next_tokens(row, torch.tensor([[6]])).tolist() == [-1]


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("ngram_size", {"ngram_size": 1}),
        ("ngram_size", {"ngram_size": 2.0}),
        ("ngram_size", {"method": "mag", "ngram_size": 3}),
        ("filler_top_k", {"filler_top_k": 0}),
        ("filler_top_k", {"method": "none", "filler_top_k": 2}),
        ("ngram_store", {"ngram_store": "disk"}),
        ("ngram_one_level", {"method": "mag", "ngram_one_level": True}),
        ("ngram_guesses", {"ngram_guesses": 1}),
        ("bigram_path", {"bigram_path": "table.json"}),
        ("k_matrix", {"k_matrix": [[5]]}),
    ],
)
def test_wrong_options(field, options):
    with pytest.raises(ValueError, match=f"^{field}: "):
        SpecConfig(**{"method": "ngram", **options})


def test_it_takes_no_drafter():
    with pytest.raises(ValueError, match=r"^drafter: method 'ngram' does not take one"):
        Engine(random_model(), random_model(), spec=SpecConfig("ngram"))
