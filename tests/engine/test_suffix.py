"""Suffix decoding: what it proposes, where that comes from, what it keeps; same output always."""

from array import array
from collections import Counter
from dataclasses import replace
from threading import Thread

import pytest
import torch

from fastspec import Engine, EngineConfig, SamplingParams, SpecConfig
from fastspec.drafters.suffix import PastTexts, SuffixDrafter, SuffixIndex, SuffixTreeDrafter
from fastspec.tools.simulate import Simulator
from fastspec.tools.stored_outputs import StoredOutput

from ..models import VOCAB_SIZE, random_model
from .helpers import ALPHA, FILTERED, hugging_face_greedy, p_value, small_model
from .probes import batch_of, drafter_of, request_of

REPETITIVE = [[5, 6, 7, 8] * 9, [1, 2, 3], list(range(1, 41)) * 2, [9]]
GREEDY = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.7, seed=5, max_tokens=40, ignore_eos=True)
SMALL = {"suffix_max_spec_factor": 4.0, "suffix_min_token_prob": 0.0}


def by_the_rules(text, num, factor, least):
    """Of all lengths of a match, the chain that most is expected of; of one token, if none else."""
    best, best_score = [], 0.0
    for size in range(len(text) - 1, 0, -1):
        if size == 1 and best:
            break
        ends = [i for i in range(len(text) - 1, size - 1, -1) if text[i - size : i] == text[-size:]]
        drafts, share, score = [], 1.0, 0.0
        while ends and len(drafts) < int(min(num, factor * size)):
            following = Counter(text[i] for i in ends if i < len(text))
            if not following:
                break
            token, count = following.most_common(1)[0]
            share = share * count / following.total()
            if share < least:
                break
            drafts.append(token)
            score += share
            ends = [i + 1 for i in ends if i < len(text) and text[i] == token]
        if score > best_score:
            best, best_score = drafts, score
    return best + [-1] * (num - len(best))


@pytest.mark.parametrize(
    ("factor", "least"), [(1.0, 0.0), (2.0, 0.4), (0.5, 0.6), (9.0, 0.1), (1e308, 0.1)]
)
def test_chains_follow_the_rules(factor, least):
    generator = torch.Generator().manual_seed(5)
    for _ in range(30):
        words = int(torch.randint(2, 6, (1,), generator=generator))
        drafter = SuffixDrafter(factor, least, 100)
        texts = torch.randint(words, (3, 30), generator=generator).tolist()
        requests = [request_of(text[:4], name) for text, name in zip(texts, "abc", strict=True)]
        for end in (4, 5, 9, 20, 30):
            for request, text in zip(requests, texts, strict=True):
                request.token_ids += text[len(request.token_ids) : end]
            proposal = drafter.propose(batch_of(*requests, wanted=5, num=6))
            expected = [[*by_the_rules(r.token_ids, 5, factor, least), -1] for r in requests]
            assert proposal.token_ids.tolist() == expected
            assert proposal.num_tokens == [sum(t >= 0 for t in row) for row in expected]
            assert proposal.draft_logits is None


def test_trees_hold_the_likeliest_paths():
    """After 1 2 came 3 4 twice, 3 5 once and 6 once."""
    text = [1, 2, 3, 4, 0, 1, 2, 3, 4, 9, 1, 2, 3, 5, 8, 1, 2, 6, 7, 1, 2]
    drafter = SuffixTreeDrafter(4, 1.0, 0.1, 100)
    proposal = drafter.propose(batch_of(request_of(text), wanted=4))
    assert proposal.token_ids.tolist() == [[3, 4, 6, 5]]
    assert proposal.parents.tolist() == [[0, 1, 0, 1]]
    assert (proposal.num_tokens, proposal.sibling_rule) == ([4], "target_only")
    pruned = SuffixTreeDrafter(4, 1.0, 0.5, 100).propose(batch_of(request_of(text), wanted=4))
    assert pruned.token_ids.tolist() == [[3, 4, -1, -1]]
    assert pruned.parents.tolist() == [[0, 1, -1, -1]]


@pytest.mark.parametrize("trees", [{}, {"tree_nodes": 12}])
@pytest.mark.parametrize("blocks", [{}, {"block_size": 4, "num_blocks": 44}])
def test_greedy_output_is_that_of_plain_decoding(trees, blocks):
    model = random_model("llama")
    engine = Engine(
        model,
        spec=SpecConfig("suffix", 6, **trees),
        config=EngineConfig(max_batch_size=3, **blocks),
    )
    expected = [hugging_face_greedy(model, prompt, GREEDY.max_tokens) for prompt in REPETITIVE]
    for _ in range(2):
        outputs = engine.generate(REPETITIVE, GREEDY)
        assert [output.token_ids for output in outputs] == expected
    assert engine.stats.num_accepted_tokens > 0
    assert {writer for output in outputs for writer in output.drafters} == {None, "suffix"}


@pytest.mark.parametrize("options", [{}, {"tree_nodes": 5}])
def test_sampled_output_has_the_targets_distribution(options):
    model = small_model()
    spec = SpecConfig("suffix", 2, **SMALL, **options)
    prompt = [1, 4, 2, 1, 4, 3, 1, 4, 2, 1, 4]
    assert p_value((model, None), FILTERED, spec, prompt=prompt) > ALPHA


def num_steps(engine, prompt, params):
    (output,) = engine.generate([prompt], params)
    return output.stats.num_steps, output.token_ids


@pytest.mark.parametrize("trees", [{}, {"tree_nodes": 30}])
def test_what_a_request_has_said_drafts_for_the_next(trees):
    engine = Engine(random_model("llama"), spec=SpecConfig("suffix", **trees))
    before, text = num_steps(engine, [9, 8, 7], GREEDY)
    after, again = num_steps(engine, [9, 8, 7], GREEDY)
    assert again == text
    assert after < before / 2


def test_a_sampled_text_does_not_depend_on_other_requests():
    """Unless it is judged by coupled draws, which no draft can change."""
    model = random_model("llama")
    for method in ("standard", "coupled"):
        engine = Engine(model, spec=SpecConfig("suffix", rejection_sample_method=method))
        before, text = num_steps(engine, [9, 8, 7], SAMPLED)
        after, again = num_steps(engine, [9, 8, 7], SAMPLED)
        assert again == text
        assert after < before if method == "coupled" else after == before


def test_a_corpus_drafts():
    model = random_model("llama")
    for params in (GREEDY, SAMPLED):
        plain = Engine(model, spec="none")
        (said,) = plain.generate([[9, 8, 7]], GREEDY)
        engine = Engine(model, spec=SpecConfig("suffix"))
        engine.add_corpus([[3, 9, 8, 7, *said.token_ids], [4, 4]])
        (output,) = engine.generate([[9, 8, 7]], params)
        assert output.stats.num_draft_tokens > 0
    with pytest.raises(ValueError, match=r"^texts: no drafter of this engine reads a corpus"):
        plain.add_corpus([[1, 2]])
    with pytest.raises(ValueError, match=rf"^texts: token id {VOCAB_SIZE} is not in"):
        engine.add_corpus([[VOCAB_SIZE]])
    with pytest.raises(ValueError, match=r"^texts: a text needs a tokenizer"):
        engine.add_corpus(["a text"])
    with pytest.raises(ValueError, match=r"^texts: expected a text, .* got bytes"):
        engine.add_corpus([b"ab"])
    with pytest.raises(ValueError, match=r"^texts: expected one of the keys"):
        engine.add_corpus([{"text": "ab"}])
    tiny = Engine("tiny", spec="suffix")
    with pytest.raises(ValueError, match=r"^texts: "):
        tiny.add_corpus("half a character \ud800")
    tiny.add_corpus("import os\nimport sys\n")
    (output,) = tiny.generate("import os\n", SamplingParams(temperature=0, max_tokens=2))
    assert output.stats.num_draft_tokens > 0


def test_past_texts_are_bounded_and_the_oldest_go():
    past = PastTexts(100)
    for number in range(40):
        past.add([100 + number] * 9)
        assert sum(map(len, past.indices)) <= 100

    def finds(token):
        index = SuffixIndex()
        index.add([token] * 3)
        return any(each.places(index.end(3)) for each in past.indices)

    found = [finds(100 + number) for number in range(40)]
    assert found == sorted(found)  # the latest are there
    assert 5 <= sum(found) <= 10
    past.add(range(1000))  # of a text that is too long the end is kept
    assert len(past.indices[0]) == 50


def test_a_search_looks_at_few_places():
    index = SuffixIndex()
    index.add([7] * 5000)
    places = index.places(index.end(32))
    assert len(places) == 32
    assert places[0] == (32, 4999)


@pytest.mark.parametrize("place", ["_token_ids", "first", "second"])
@pytest.mark.parametrize("nth", [0, 1, 5])
def test_an_interrupt_leaves_the_beginning_of_a_text(place, nth):
    """Then what follows is found as if nothing had happened."""

    class Interrupted(array):
        def append(self, value):
            if len(self) == nth:
                raise KeyboardInterrupt
            super().append(value)

    text = [1, 2, 3, 1, 2, 3, 1]
    index, whole = SuffixIndex(), SuffixIndex()
    earlier = index._earlier
    if place == "_token_ids":
        index._token_ids = Interrupted("i")
    else:
        index._earlier = tuple(
            Interrupted("i") if (each is earlier[0]) == (place == "first") else each
            for each in earlier
        )
    with pytest.raises(KeyboardInterrupt):
        index.add(text)
    assert len(index) == nth
    index._token_ids = array("i", index._token_ids)
    index._earlier = tuple(array("i", each) for each in index._earlier)
    index.add(text[nth:])
    whole.add(text)
    assert index._earlier == whole._earlier
    assert index.places(index.end(32)) == whole.places(whole.end(32))


def test_requests_of_other_drafters_leave_nothing():
    engine = Engine(random_model("llama"), spec="suffix")
    engine.add_request([1, 2, 3, 1, 2, 3], GREEDY)
    engine.add_request([7, 8, 9, 7, 8, 9], replace(GREEDY, drafter="none"))
    while engine.has_unfinished:
        engine.step()
    (index, _) = drafter_of(engine)._past.indices
    assert list(index.end(99)).count(-1) == 1


def test_requests_that_end_leave_their_texts_once():
    drafter = SuffixDrafter(1.0, 0.1, 1000)
    request = request_of([1, 2, 3])
    drafter.release(request)  # never seen
    drafter.propose(batch_of(request))
    request.token_ids += [4, 5, 6]
    drafter.release(request)  # preempted
    drafter.propose(batch_of(request))
    request.token_ids += [7, 8]
    drafter.release(request)
    drafter.release(request)
    (index, _) = drafter._past.indices
    assert list(index.end(99)) == [4, 5, 6, -1, 7, 8, -1]


def test_threads_share_the_past():
    model = random_model("llama")
    engine = Engine(model, spec="suffix")
    outputs = {}

    def run(number):
        outputs[number] = engine.generate([REPETITIVE[number]], GREEDY)[0].token_ids

    threads = [Thread(target=run, args=(number,)) for number in range(len(REPETITIVE))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, prompt in enumerate(REPETITIVE):
        assert outputs[number] == hugging_face_greedy(model, prompt, GREEDY.max_tokens)


def test_aborted_requests_leave_what_they_have_said():
    engine = Engine(random_model("llama"), spec="suffix")
    for _ in range(3):
        name = engine.add_request([1, 2, 3], GREEDY)
        engine.step()
        assert engine.abort(name).finish_reason == "abort"
    assert not engine.has_unfinished


def test_it_is_simulated():
    model = random_model("llama")
    spec = SpecConfig("suffix", 6)
    outputs = Engine(model, spec=spec, config=EngineConfig(max_batch_size=1)).generate(
        REPETITIVE, GREEDY
    )
    simulator = Simulator(model, None, VOCAB_SIZE, spec=spec, config=EngineConfig(max_batch_size=1))
    stored = [StoredOutput(list(o.prompt_token_ids), list(o.token_ids), GREEDY) for o in outputs]
    simulated = simulator.run(stored)
    assert [s.stats.num_steps for s in simulated] == [o.stats.num_steps for o in outputs]


def test_defaults():
    assert SpecConfig("suffix").num_draft_tokens() == 24
    assert SpecConfig("suffix").num_draft_tokens(most=8) == 8
    assert SpecConfig("suffix", suffix_min_token_prob=0).suffix_limits[1] == 0
    assert not hasattr(SuffixDrafter(1.0, 0.1, 10), "max_nodes")


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("suffix_max_spec_factor", {"suffix_max_spec_factor": 0}),
        ("suffix_min_token_prob", {"suffix_min_token_prob": 1.5}),
        ("suffix_max_cached_tokens", {"suffix_max_cached_tokens": 1}),
        ("suffix_max_spec_factor", {"method": "mag", "suffix_max_spec_factor": 2.0}),
        ("tree_width", {"tree_width": 2}),
        ("schedule", {"tree_nodes": 9, "schedule": "adaptive"}),
        ("rejection_sample_method", {"tree_nodes": 9, "rejection_sample_method": "block"}),
        ("relaxed_acceptance", {"tree_nodes": 9, "relaxed_acceptance": 2.0}),
    ],
)
def test_wrong_options(field, options):
    with pytest.raises(ValueError, match=f"^{field}: "):
        SpecConfig(**{"method": "suffix", **options})
