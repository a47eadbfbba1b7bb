"""Copies where the text repeats itself, a draft model elsewhere: same output, same distribution."""

import pytest

from fastspec import Engine, EngineConfig, SamplingParams, SpecConfig, drafters
from fastspec.drafters.base import NoDrafter
from fastspec.drafters.ngram import NgramDrafter
from fastspec.engine.schedule import SweepSchedule

from ..models import perturbed, random_model
from .eagle3_models import write_folder
from .helpers import (
    ALPHA,
    FILTERED,
    GREEDY,
    PLAIN,
    PROMPTS,
    VOCAB_SIZE,
    drafter_for,
    finish,
    hugging_face_greedy,
    p_value,
    small_model,
)

REPEATED = [*[3, 5, 2, 1] * 4, 4]  # in small vocabularies: the next token has a match only at times
COPIES = {"suffix_tokens": 6, "suffix_max_spec_factor": 3.0}
TREE = {"tree_nodes": 6, "tree_width": 2}


@pytest.mark.parametrize("blocks", [{}, {"block_size": 4, "num_blocks": 40}])
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("draft_model", {}),
        ("draft_model", {"cape": True, "cape_bins": [[1, 2]]}),
        ("draft_model", {"confidence_threshold": 0.05}),
        ("tree", TREE),
        ("tree", {**TREE, "tree_prompt_lookup": True, "draft_sample_method": "greedy"}),
        ("early_exit", {"exit_layer": 1}),
        ("eagle3", {}),
        ("eagle3", TREE),
    ],
    ids=str,
)
def test_greedy_output_is_that_of_plain_decoding(tmp_path, method, options, blocks):
    target = random_model("llama", num_hidden_layers=6)
    drafter = drafter_for(method, target, tmp_path)
    spec = SpecConfig(method, 2, **COPIES, **options)
    config = EngineConfig(max_batch_size=3, prefill_chunk_size=7, **blocks)
    engine = Engine(target, drafter, spec=spec, config=config)
    outputs = engine.generate(PROMPTS, GREEDY)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output.token_ids == hugging_face_greedy(target, prompt)
    written = {name for output in outputs for name in output.drafters}
    assert "suffix" in written
    if method != "eagle3":  # one of random weights, which the target never agrees with
        assert len(written - {None, "suffix"}) == 1


@pytest.mark.parametrize(
    ("method", "options", "sampling", "num_known"),
    [
        ("draft_model", {}, FILTERED, None),
        ("tree", TREE, FILTERED, None),
        ("eagle3", {}, PLAIN, None),
        ("eagle3", {}, FILTERED, 3),
        ("eagle3", TREE, PLAIN, 3),
    ],
    ids=str,
)
def test_exact_distribution(tmp_path, method, options, sampling, num_known):
    """With few known tokens, too, of which the copies hold others."""
    target = small_model()
    drafter = drafter_for(method, target, tmp_path, num_known)
    spec = SpecConfig(method, 2, **COPIES, **options)
    assert p_value((target, drafter), sampling, spec, prompt=REPEATED, num_more=3) > ALPHA


def test_exact_distribution_beside_a_draft_model_that_lacks_tokens():
    """Copies hold tokens that the draft model has no logits of."""
    target = small_model()
    draft = random_model("llama", seed=5, vocab_size=VOCAB_SIZE - 2, bos_token_id=0, eos_token_id=0)
    spec = SpecConfig("draft_model", 2, **COPIES)
    assert p_value((target, draft), PLAIN, spec, prompt=REPEATED, num_more=3) > ALPHA


def test_a_copy_of_all_tokens_has_no_more_columns_than_they():
    target = random_model("llama", vocab_size=12, bos_token_id=0, eos_token_id=0)
    spec = SpecConfig("draft_model", 2, suffix_tokens=12, suffix_max_spec_factor=3.0)
    engine = Engine(target, perturbed(target, 0.2), spec=spec)
    params = SamplingParams(temperature=1, seed=3, max_tokens=40, ignore_eos=True)
    (output,) = engine.generate([[*range(12)] * 6], params)
    assert len(output.token_ids) == 40
    assert output.stats.num_draft_tokens > 2 * output.stats.num_steps  # that is, copies


def test_rows_are_whole_vectors_whether_or_not_something_is_copied():
    """The order of a row's sum, and so its bits, must not depend on other requests' copies."""
    target = random_model("llama", vocab_size=64, bos_token_id=0, eos_token_id=0)
    draft = random_model("llama", seed=5, vocab_size=57, bos_token_id=0, eos_token_id=0)
    engine = Engine(target, draft, spec=SpecConfig("draft_model", 2, **COPIES))
    propose, widths = engine.drafter.propose, {True: set(), False: set()}

    def measured(batch):
        proposal = propose(batch)
        has_copies = any("suffix" in names for names in proposal.writers)
        widths[has_copies].add(proposal.draft_logits.shape[2])
        return proposal

    engine.drafter.propose = measured
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=8, ignore_eos=True)
    engine.generate([[1, 2, 3], [*[7, 61, 9] * 4, 7]], params)
    engine.generate([[1, 2, 3]], params)
    assert widths == {True: {64}, False: {64}}


def test_no_model_runs_where_all_is_copied():
    target = random_model("llama")
    engine = Engine(target, perturbed(target, 0.2), spec=SpecConfig("draft_model", 2, **COPIES))
    drafter = engine.drafter
    assert drafter is not None
    passes, propose = [], drafter.propose

    def counted(batch):
        proposal = propose(batch)
        passes.append((proposal.writers, proposal.passes))
        return proposal

    drafter.propose = counted
    engine.generate([[5, 6, 7, 8] * 9], SamplingParams(temperature=0, max_tokens=2))
    (writers, drafted), *_ = passes
    assert writers == [["suffix"] * len(writers[0])]
    assert drafted is None


@pytest.mark.parametrize("num_known", [None, 90])
@pytest.mark.parametrize(
    "options",
    [
        {},
        TREE,
        {"draft_sample_method": "greedy"},
        {"rejection_sample_method": "block"},
        {"rejection_sample_method": "coupled"},
    ],
    ids=str,
)
def test_a_seeded_text_does_not_depend_on_the_batch(tmp_path, options, num_known):
    target = random_model("llama", num_hidden_layers=6)
    write_folder(tmp_path, target, num_known=num_known)
    params = [
        SamplingParams(
            temperature=0.2, seed=seed, max_tokens=40, ignore_eos=True, presence_penalty=seed % 2
        )
        for seed in range(len(PROMPTS))
    ]
    spec = SpecConfig("eagle3", 2, **COPIES, **options)
    engine = Engine(target, tmp_path, spec=spec)
    together = [output.token_ids for output in engine.generate(PROMPTS, params)]
    alone = [
        Engine(target, tmp_path, spec=spec).generate([prompt], each)[0].token_ids
        for prompt, each in zip(PROMPTS, params, strict=True)
    ]
    assert together == alone


def test_a_corpus_is_copied_from():
    target = random_model("llama")
    engine = Engine(target, perturbed(target, 0.2), spec=SpecConfig("draft_model", 2, **COPIES))
    expected = hugging_face_greedy(target, PROMPTS[1])
    engine.add_corpus([[*PROMPTS[1], *expected]])
    request_id = engine.add_request(PROMPTS[1], GREEDY)
    output = finish(engine)[request_id]
    assert output.token_ids == expected
    assert set(output.drafters) == {None, "suffix"}


SCHEDULES = ("adaptive", "heuristic", SweepSchedule(range(4)))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=("adaptive", "heuristic", "sweep"))
@pytest.mark.parametrize("method", ["draft_model", "early_exit"])
def test_a_schedule_changes_no_greedy_text(tmp_path, method, schedule):
    target = random_model("llama", num_hidden_layers=6)
    drafter = drafter_for(method, target, tmp_path)
    options = {"exit_layer": 1} if method == "early_exit" else {}
    spec = SpecConfig(method, 3, schedule=schedule, **COPIES, **options)
    engine = Engine(target, drafter, spec=spec, config=EngineConfig(max_batch_size=3))
    outputs = engine.generate(PROMPTS, GREEDY)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output.token_ids == hugging_face_greedy(target, prompt)
    assert "suffix" in {name for output in outputs for name in output.drafters}


@pytest.mark.parametrize("num_known", [None, 3])
def test_exact_distribution_with_a_schedule(tmp_path, num_known):
    target = small_model()
    drafter = drafter_for("eagle3", target, tmp_path, num_known)
    spec = SpecConfig("eagle3", 2, schedule="adaptive", **COPIES)
    assert p_value((target, drafter), PLAIN, spec, prompt=REPEATED, num_more=3) > ALPHA


def test_a_schedule_is_for_the_model_alone():
    """Its wrong drafts are given up; copies go on, and no schedule hears of them."""
    target, wrong = random_model("llama"), random_model("llama", seed=7)
    costs = [1.0, 1.1, 1.2, 1.3]
    spec = SpecConfig("draft_model", 3, schedule="adaptive", step_costs=costs, **COPIES)
    constant = SpecConfig("draft_model", 3, **COPIES)
    engines = [Engine(target, wrong, spec=each) for each in (constant, spec)]
    params = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
    texts = [engine.generate(PROMPTS, params) for engine in engines]
    passes = [engine.stats.num_draft_passes for engine in engines]
    assert sum(passes[1].values()) < sum(passes[0].values()) / 3
    for outputs in texts:
        assert "suffix" in {name for output in outputs for name in output.drafters}

    heard = []

    class Three:
        def num_draft_tokens(self, request):
            return 3

        def record(self, request, step):
            heard.append(step)

    spec = SpecConfig("draft_model", 3, schedule=Three(), **COPIES)
    (output,) = Engine(target, wrong, spec=spec).generate([[5, 6, 7, 8] * 9], params)
    assert 0 < len(heard) < output.stats.num_steps
    assert {step.wanted for step in heard[:-3]} == {3}


def test_sampled_texts_depend_on_the_seed_alone_with_a_schedule(tmp_path):
    target = small_model()
    drafter = drafter_for("draft_model", target, tmp_path)
    spec = SpecConfig("draft_model", 3, schedule="adaptive", **COPIES)
    prompts = [REPEATED[place:] for place in range(4)]
    params = [
        SamplingParams(temperature=1, seed=seed, max_tokens=40, ignore_eos=True)
        for seed in range(len(prompts))
    ]
    together = Engine(target, drafter, spec=spec).generate(prompts, params)
    for prompt, each, output in zip(prompts, params, together, strict=True):
        (alone,) = Engine(target, drafter, spec=spec).generate([prompt], [each])
        assert alone.token_ids == output.token_ids
    assert "suffix" in {name for output in together for name in output.drafters}


def test_options():
    assert SpecConfig("eagle3", 2, suffix_tokens=8).num_draft_tokens() == 8
    assert SpecConfig("eagle3", 9, suffix_tokens=8).num_draft_tokens() == 9
    assert SpecConfig("draft_model", suffix_tokens=3).num_draft_tokens() == 5
    repeated = SpecConfig("glide", suffix_tokens=3).for_repeated_prompts()
    assert repeated.suffix_max_cached_tokens == 2
    refused = [
        ({"method": "draft_model", "suffix_min_token_prob": 0.5}, "suffix_min_token_prob"),
        ({"method": "prompt_lookup", "suffix_tokens": 4}, "suffix_tokens"),
        ({"method": "suffix", "suffix_tokens": 4}, "suffix_tokens"),
        ({"method": "tree", "suffix_tokens": 4, "schedule": "adaptive"}, "schedule"),
        (
            {"method": "eagle3", "suffix_tokens": 8, "schedule": "adaptive", "step_costs": [1] * 9},
            "step_costs",
        ),
        ({"method": "eagle3", "suffix_tokens": 0}, "suffix_tokens"),
        ({"method": "tree", "suffix_tokens": 128}, "suffix_tokens"),
        (
            {"method": "tree", "tree_paths": [[0], [0, 0]], "num_speculative_tokens": 1},
            "tree_paths",
        ),
    ]
    SpecConfig("draft_model", 2, cape=True, suffix_tokens=24)
    paths = {"tree_paths": [[0], [0, 0]], "num_speculative_tokens": 1, "suffix_tokens": 8}
    with pytest.raises(ValueError, match="tree_paths"):
        SpecConfig("tree", **paths)
    for options, name in refused:
        with pytest.raises(ValueError, match=name):
            SpecConfig(**options)


def test_what_it_needs_is_said():
    target = random_model("llama")
    with pytest.raises(ValueError, match="method 'suffix' copies without one"):
        Engine(target, spec=SpecConfig(suffix_tokens=8))
    with pytest.raises(ValueError, match="suffix_tokens: needs a draft model, got drafter 'ngram'"):
        Engine(target, NgramDrafter(4, 3), spec=SpecConfig(suffix_tokens=8))
    config = EngineConfig(max_n_spec_tokens=5)
    spec = SpecConfig("draft_model", 2, suffix_tokens=8)
    with pytest.raises(ValueError, match="suffix_tokens: expected at most max_n_spec_tokens, 5"):
        Engine(target, perturbed(target, 0.2), spec=spec, config=config)


def test_a_methods_own_use_of_the_options_of_suffix():
    """A registered method reads them without copying first."""
    fields = ["suffix_max_cached_tokens"]
    drafters.register("mine", lambda context: NoDrafter(), fields=fields)
    try:
        assert SpecConfig("mine", suffix_max_cached_tokens=100).suffix_limits[2] == 100
    finally:
        drafters.unregister("mine")


def test_more_draft_tokens_than_the_draft_model_drafts_are_refused():
    target = random_model("llama")
    for spec in (
        SpecConfig("draft_model", 2, suffix_tokens=4),
        SpecConfig("tree", 2, tree_suffix=4),
    ):
        engine = Engine(target, perturbed(target, 0.2), spec=spec)
        engine.enable_spec_dec(n_spec_tokens=4)
        with pytest.raises(ValueError, match="n_spec_tokens: expected at most 4 with copies"):
            engine.enable_spec_dec(n_spec_tokens=9)


def test_copies_are_no_longer_than_asked_for():
    target = random_model("llama")
    spec = SpecConfig("draft_model", 9, suffix_tokens=3, suffix_max_spec_factor=9.0)
    engine = Engine(target, perturbed(target, 0.2), spec=spec)
    longest, drafter = [], engine.drafter
    assert drafter is not None
    propose = drafter.propose

    def counted(batch):
        proposal = propose(batch)
        longest.append(max(row.count("suffix") for row in proposal.writers or [[]]))
        return proposal

    drafter.propose = counted
    engine.generate([[5, 6, 7, 8] * 9], GREEDY)
    assert max(longest) == 3
