"""Drafters that copy: what they propose, how little a step without a match costs, same output."""

from itertools import pairwise

import pytest
import torch

from fastspec import Engine, EngineConfig, SamplingParams, SpecConfig
from fastspec.drafters import MagDrafter, PromptLookupDrafter
from fastspec.drafters import mag as mag_module
from fastspec.drafters.bigram_table import load_bigram, save_bigram
from fastspec.drafters.texts import TextStore

from ..models import random_model
from .helpers import ALPHA, FILTERED, PLAIN, hugging_face_greedy, p_value, small_model
from .probes import batch_of, record_passes, request_of

CPU = torch.device("cpu")
REPETITIVE = [[5, 6, 7, 8] * 9, [1, 2, 3], list(range(1, 41)) * 2, [9]]
GREEDY = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
LOOKUPS = [{}, {"prompt_lookup_max": 3}, {"prompt_lookup_min": 1, "prompt_lookup_max": 4}]


@pytest.mark.parametrize("lookup", LOOKUPS)
@pytest.mark.parametrize("num_draft", [1, 4, 9])
def test_greedy_output_is_that_of_plain_decoding(lookup, num_draft):
    model = random_model("llama")
    spec = SpecConfig("prompt_lookup", num_draft, **lookup)
    engine = Engine(model, spec=spec, config=EngineConfig(max_batch_size=3))
    outputs = engine.generate(REPETITIVE, GREEDY)
    expected = [hugging_face_greedy(model, prompt, GREEDY.max_tokens) for prompt in REPETITIVE]
    assert [output.token_ids for output in outputs] == expected
    assert engine.stats.num_accepted_tokens > 0
    writers = {writer for output in outputs for writer in output.drafters}
    assert writers == {None, "prompt_lookup"}


@pytest.mark.parametrize("with_table", [False, True])
@pytest.mark.parametrize("num_draft", [1, 5])
def test_greedy_output_with_mag(with_table, num_draft, tmp_path):
    model = random_model("llama")
    expected = [hugging_face_greedy(model, prompt, GREEDY.max_tokens) for prompt in REPETITIVE]
    path = None
    if with_table:
        path = tmp_path / "bigram.json"
        successors = [0] * 200
        for text in expected:
            for token, successor in pairwise(text):
                successors[token % 200] = successor
        save_bigram(successors, path)
    engine = Engine(model, spec=SpecConfig("mag", num_draft, bigram_path=path))
    outputs = engine.generate(REPETITIVE, GREEDY)
    assert [output.token_ids for output in outputs] == expected
    assert engine.stats.num_accepted_tokens > 0
    assert {writer for output in outputs for writer in output.drafters} == {None, "mag"}


def mag_by_the_rules(text, num, table, is_whole=False):
    """The longest end that stands before, its earliest place; twice; then bigrams."""
    drafts = []
    for _ in range(2):
        whole = text + drafts
        if len(drafts) >= num:
            break
        num_copied = num if is_whole else num - len(drafts)
        for size in range(len(whole) - 1, 0, -1):
            ends = [e for e in range(size, len(whole)) if whole[e - size : e] == whole[-size:]]
            if ends:
                drafts += whole[ends[0] :][:num_copied]
                break
    while len(drafts) < num and (text + drafts)[-1] < len(table):
        drafts.append(table[(text + drafts)[-1]])
    return drafts + [-1] * (num - len(drafts))


@pytest.mark.parametrize("num", [1, 3, 10])
def test_mag_follows_its_rules(num):
    generator = torch.Generator().manual_seed(5)
    table = torch.randint(9, (7,), generator=generator)
    drafter, without = MagDrafter(table.int()), MagDrafter()
    for _ in range(60):
        words = int(torch.randint(1, 10, (1,), generator=generator))
        sizes = torch.randint(1, 30, (3,), generator=generator).tolist()
        texts = [torch.randint(words, (n,), generator=generator).tolist() for n in sizes]
        batch = batch_of(*map(request_of, texts, "abc"), wanted=num)
        for mag, successors in ((drafter, table.tolist()), (without, [])):
            expected = [mag_by_the_rules(text, num, successors) for text in texts]
            assert mag.propose(batch).token_ids.tolist() == expected
            whole = mag.copy_whole(TextStore().update(batch), num)
            assert whole.shape[1] == 2 * num - 1
            for text, row in zip(texts, whole.tolist(), strict=True):
                drafts = mag_by_the_rules(text, num, successors, is_whole=True)
                assert row == drafts + [-1] * (len(row) - len(drafts))
            for request in batch.requests:
                mag.release(request)


def test_mag_follows_its_table_again_only_for_longer_drafts(monkeypatch):
    """That reads the whole table, and the levels of a cascade vary in what they ask for."""
    built, usual = [], mag_module._chains
    monkeypatch.setattr(mag_module, "_chains", lambda *args: built.append(args) or usual(*args))
    table = torch.tensor([1, 2, 3, 0])
    drafter = MagDrafter(table.int())
    for num in (3, 1, 2, 3, 4, 1):
        token_ids = drafter.propose(batch_of(request_of([1]), wanted=num)).token_ids
        assert token_ids.tolist() == [mag_by_the_rules([1], num, table.tolist())]
    assert len(built) == 2


def test_mag_does_not_draft_the_beginning_of_the_prompt():
    """The prompt is in the text once: its whole is not found in a second copy of it."""
    proposal = MagDrafter().propose(batch_of(request_of([4, 5, 6, 7])))
    assert proposal.token_ids.tolist() == [[-1] * 4]
    assert proposal.num_tokens == [0]


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("[1, 2", "not JSON"),
        ("{}", "not contain a list"),
        ("[]", "not contain a list"),
        ("[1, 6]", r"entry 1: expected an id in 0\.\.5, got 6"),
        ("[-1]", "entry 0"),
        ("[1.0]", "entry 0"),
        ("[true]", "entry 0"),
        ("[0, 0, 0, 0, 0, 0, 0]", "7 entries, the vocabulary only 6"),
    ],
)
def test_bigram_files_that_are_none(tmp_path, content, named):
    (tmp_path / "table.json").write_text(content)
    with pytest.raises(ValueError, match=f"^bigram_path: .*{named}"):
        load_bigram(tmp_path / "table.json", 6)
    with pytest.raises(ValueError, match=r"^bigram_path: no such file"):
        load_bigram(tmp_path / "none.json", 6)


def test_a_table_may_be_shorter_than_the_vocabulary(tmp_path):
    save_bigram([5, 0], tmp_path / "table.json")
    assert load_bigram(tmp_path / "table.json", 6).tolist() == [5, 0]
    assert [path.name for path in tmp_path.iterdir()] == ["table.json"]


def test_preempted_requests_are_looked_up_again():
    model = random_model("llama")
    config = EngineConfig(block_size=4, num_blocks=40)
    engine = Engine(model, spec=SpecConfig(prompt_lookup_num_tokens=4), config=config)
    assert engine.spec.method == "prompt_lookup"
    outputs = engine.generate(REPETITIVE, GREEDY)
    expected = [hugging_face_greedy(model, prompt, GREEDY.max_tokens) for prompt in REPETITIVE]
    assert [output.token_ids for output in outputs] == expected


@pytest.mark.parametrize("sampling", [PLAIN, FILTERED], ids=["plain", "filtered"])
@pytest.mark.parametrize("method", ["prompt_lookup", "mag"])
def test_sampled_output_has_the_targets_distribution(sampling, method, tmp_path):
    model = small_model()
    specs = {
        "prompt_lookup": SpecConfig("prompt_lookup", 2, prompt_lookup_max=1),
        "mag": SpecConfig("mag", 2, bigram_path=tmp_path / "table.json"),
    }
    spec = specs[method]
    save_bigram([3, 1, 4, 1, 5], tmp_path / "table.json")
    assert p_value((model, None), sampling, spec) > ALPHA


def test_without_a_match_the_step_is_plain():
    """The target reads one token a step, as in plain decoding."""
    engine = Engine(random_model("llama"), spec=SpecConfig("prompt_lookup", 5))
    passes = record_passes(engine)

    def last_counts():
        spans, _ = passes[-1]
        return [span.count for span in spans]

    for token in (11, 12, 13):
        engine.generate([[token, 200, token + 30]], SamplingParams(temperature=0, max_tokens=2))
    assert last_counts() == [1]
    engine.add_request([3, 4] * 8, GREEDY, "copies")
    engine.add_request([90, 91, 92], GREEDY, "does not")
    engine.step()
    assert last_counts() == [16 + 5, 3]  # with their prompts


def test_proposals():
    drafter = PromptLookupDrafter(2, 3)
    one, two = request_of([1, 2, 3, 4, 1, 2]), request_of([7, 7, 8, 9], "b")
    proposal = drafter.propose(batch_of(one, two))
    assert proposal.token_ids.tolist() == [[3, 4, 1, 2], [-1] * 4]
    assert proposal.num_tokens == [4, 0]
    assert proposal.draft_logits is None
    one.token_ids += [3, 9]
    two.token_ids += [7, 7]
    proposal = drafter.propose(batch_of(two, one, wanted=3, num=4))
    assert proposal.token_ids.tolist() == [[8, 9, 7, -1], [-1] * 4]
    assert proposal.num_tokens == [3, 0]


@pytest.mark.parametrize("period", [1, 2, 3, 9])
def test_loops_are_drafted_in_full(period):
    text = [token % period for token in range(20)]
    proposal = PromptLookupDrafter(2, 4).propose(batch_of(request_of(text), wanted=7))
    assert proposal.token_ids.tolist() == [[token % period for token in range(20, 27)]]


def test_texts_follow_their_requests():
    store, generator = TextStore(), torch.Generator().manual_seed(3)
    requests = []
    for step in range(60):
        if step % 3 == 0:
            size = int(torch.randint(1, 90, (1,), generator=generator))
            requests.append(request_of([step] * size, f"request {step}"))
        if step % 7 == 6:
            store.forget(requests.pop(step % len(requests)).request_id)
        for index, request in enumerate(requests):
            request.token_ids += range(step, step + (index + step) % 5)
        chosen = [request for index, request in enumerate(requests) if (index + step) % 4]
        if not chosen:
            continue
        texts = store.update(batch_of(*chosen))
        assert texts.lengths.tolist() == [len(request.token_ids) for request in chosen]
        for row, request in zip(texts.token_ids.tolist(), chosen, strict=True):
            assert row[: len(request.token_ids)] == request.token_ids
    store.forget("never seen")


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("prompt_lookup_max", {"prompt_lookup_min": 4, "prompt_lookup_max": 3}),
        ("prompt_lookup_min", {"prompt_lookup_min": 0}),
        ("prompt_lookup_max", {"prompt_lookup_max": 2.5}),
        ("num_speculative_tokens", {"num_speculative_tokens": 0}),
        ("prompt_lookup_num_tokens", {"prompt_lookup_num_tokens": 4, "num_speculative_tokens": 3}),
    ],
)
def test_wrong_options(field, options):
    with pytest.raises(ValueError, match=f"^{field}: "):
        SpecConfig("prompt_lookup", **options)


def test_options_of_other_methods():
    with pytest.raises(ValueError, match=r"^prompt_lookup_max: not for method 'draft_model'"):
        SpecConfig("draft_model", prompt_lookup_max=3)
    with pytest.raises(
        ValueError, match=r"^prompt_lookup_max: .* \(vLLM's is prompt_lookup here\)"
    ):
        SpecConfig("ngram", prompt_lookup_max=3)
    with pytest.raises(ValueError, match=r"^prompt_lookup_num_tokens: "):
        SpecConfig("draft_model", prompt_lookup_num_tokens=3)
    with pytest.raises(ValueError, match=r"^bigram_path: not for method"):
        SpecConfig("prompt_lookup", bigram_path="table.json")
    with pytest.raises(ValueError, match=r"^drafter: method 'prompt_lookup' does not take one"):
        Engine(random_model(), random_model(), spec=SpecConfig("prompt_lookup"))


def test_defaults():
    lengths = [SpecConfig("prompt_lookup", **lookup).lookup_lengths for lookup in LOOKUPS]
    assert lengths == [(5, 5), (3, 3), (1, 4)]
    assert SpecConfig("prompt_lookup", prompt_lookup_min=2).lookup_lengths == (2, 2)
