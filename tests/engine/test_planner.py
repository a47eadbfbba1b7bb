"""The planner's arithmetic on measurements by hand, its runs on tiny models, and its file."""

from dataclasses import replace

import pytest

from fastspec import Engine, SamplingParams, SpecConfig
from fastspec.config import EngineConfig
from fastspec.tools import tune
from fastspec.tools.formulas import expected_tokens, speed_up
from fastspec.tools.tune import Measurement, Plan, Planner, k_matrices_to_try
from fastspec.tools.tuned import TunedConfig, load_tuned, save_tuned, spec_fields

from ..models import perturbed
from .eagle3_models import write_folder

PROMPTS = [[1, 2, 3], list(range(5, 22))]
SAMPLES = ((0.0, 1.0, False), (3.0, 3.0, True), (9.0, 9.0, False))


@pytest.fixture(scope="module")
def planner(model):
    return Planner(model, None, PROMPTS, max_tokens=60, config=EngineConfig(max_batch_size=8))


def measurement_of(method, draft_seconds, rate, num=3):
    return Measurement(
        SpecConfig(method, num),
        {length: draft_seconds * length for length in range(num + 1)},
        dict.fromkeys(range(num + 1), 0.01),
        {length: expected_tokens(rate, length) for length in range(num + 1)},
        (0.02, 0.03),
    )


def test_predictions_by_hand():
    measured = measurement_of("draft_model", 0.001, 0.5)
    assert measured.lengths == [0, 1, 2, 3]
    assert measured.tokens_per_second(2) == pytest.approx(1.75 / 0.012)
    assert measured.speed_up(0, 60) == 1.0
    expected = (0.02 + 60 * 0.01) / (0.03 + 60 * 0.012 / 1.75)
    assert measured.speed_up(2, 60) == pytest.approx(expected)


def test_the_rate_that_pays():
    """That of the formula, where drafts cost what it takes them to and prompts nothing."""
    measured = replace(measurement_of("draft_model", 0.002, 0.0), start_seconds=(0.0, 0.0))
    assert measured.draft_cost() == pytest.approx(0.2)
    for gain in (1.0, 1.3, 2.0):
        rate, length = measured.rate_for(gain, 60)
        most = max(range(1, 4), key=lambda num: speed_up(rate, num, 0.2))
        assert speed_up(rate, most, 0.2) == pytest.approx(gain, abs=1e-4)
        assert speed_up(rate, length, 0.2) == pytest.approx(gain, abs=1e-4)
    assert measured.rate_for(1.0, 60)[1] == 1
    assert measured.rate_for(4.0, 60) is None
    reading = replace(measured, start_seconds=(0.02, 0.03))
    assert reading.rate_for(1.3, 60)[0] > measured.rate_for(1.3, 60)[0]


def test_costs_are_measured_alone(model, planner):
    measured, _ = planner.measure_costs(SpecConfig("draft_model", 2), model)
    assert measured.lengths == [0, 1, 2]
    assert measured.tokens_per_pass == {}
    assert measured.draft_cost() > 0


def test_plain_steps_are_those_of_plain_decoding(model, planner, monkeypatch):
    """Not the pauses of a drafter; and the target's reading of a prompt is that without one."""
    run = Planner._run

    def noted(self, engine, prompt):
        laps, output = run(self, engine, prompt)
        seconds = 3.0 if engine is self._plain else 5.0
        return [dict.fromkeys(lap, seconds) for lap in laps], output

    monkeypatch.setattr(Planner, "_run", noted)
    measured, _ = planner.measure_costs(SpecConfig("draft_model", 2), model)
    assert measured.step_seconds(0) == 9.0
    assert measured.step_seconds(1) == measured.step_seconds(2) == 15.0
    assert measured.start_seconds == (3.0, 5.0)


def test_few_steps_with_drafts_are_not_taken_for_disturbances():
    cheap, dear, disturbed = (tune._Sample(*each) for each in SAMPLES)
    assert tune._typical([cheap] * 9 + [dear]) == pytest.approx((0.3, 1.2))
    assert tune._typical([cheap] * 9 + [disturbed]) == pytest.approx((0.0, 1.0))


def test_the_best_drafter_and_length_are_chosen(planner):
    slow = measurement_of("draft_model", 0.004, 0.9)
    good = measurement_of("mag", 0.0001, 0.8)
    plan = planner.choose([slow, good])
    assert (plan.spec.method, plan.spec.num_speculative_tokens) == ("mag", 3)
    assert plan.predicted == good.speed_up(3, 60)
    short = planner.choose([measurement_of("draft_model", 0.004, 0.6)])
    assert short.spec.num_speculative_tokens == 1


def test_k_matrices_fit_the_levels():
    assert k_matrices_to_try(1) == [
        *(((1, 10), (0, 0)), ((1, 14), (0, 0)), ((2, 10), (0, 0)), ((3, 4), (0, 0))),
        ((6, 8), (0, 8)),
    ]
    assert k_matrices_to_try(2)[0] == ((1, 1, 10), (0, 0, 0), (0, 0, 0))
    assert k_matrices_to_try(2)[-1] == ((6, 0, 8), (0, 3, 8), (0, 0, 8))
    for num_models in (1, 2, 3, 4):
        for rows in k_matrices_to_try(num_models):
            assert SpecConfig("cascade", k_matrix=rows).k_matrix == rows
            assert len(rows) == num_models + 1


def test_the_best_k_matrix_is_chosen(planner):
    tokens = {((1, 10), (0, 0)): 4.0, ((2, 10), (0, 0)): 6.0, ((3, 4), (0, 0)): 5.0}
    measured = [
        Measurement(spec, {0: 0.0, k: 0.004}, {0: 0.01, k: 0.012}, {0: 1.0, k: tokens[rows]})
        for rows in tokens
        for spec in [SpecConfig("cascade", k_matrix=rows)]
        for k in [spec.num_draft_tokens()]
    ]
    mag = measurement_of("mag", 0.0001, 0.6)
    plan = planner.choose([*measured, mag])
    assert plan.spec == SpecConfig("cascade", k_matrix=[[2, 10], [0, 0]])
    assert plan.predicted == pytest.approx(6 * 0.01 / 0.016)


def test_plain_decoding_is_chosen_where_nothing_helps(planner):
    assert planner.choose([measurement_of("draft_model", 0.004, 0.1)]) == Plan(
        SpecConfig("none"), 1.0
    )


@pytest.mark.parametrize("method", ["draft_model", "prompt_lookup", "mag"])
def test_a_sweep_measures_every_length(model, method):
    drafter = perturbed(model, 0.03) if method == "draft_model" else None
    heard = []
    planner = Planner(model, None, PROMPTS, 60, advance=lambda: heard.append(None))
    measured = planner.measure(SpecConfig(method, 3), drafter)
    assert measured.lengths == [0, 1, 2, 3]
    assert all(measured.step_seconds(length) > 0 for length in measured.lengths)
    assert len(heard) == 2
    assert measured.tokens_per_pass[0] == 1.0
    for length in (1, 2, 3):
        engine = Engine(model, drafter, spec=SpecConfig(method, length))
        engine.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
        assert measured.tokens_per_pass[length] == engine.stats.mean_acceptance_length
    assert planner.choose([measured]).predicted >= 1.0


@pytest.mark.parametrize("method", ["eagle3", "early_exit"])
def test_what_reads_the_target_is_measured(tmp_path, model, planner, method):
    """Its chains, with each number of tokens, beside the target that it reads."""
    write_folder(tmp_path, model)
    drafter, options = (tmp_path, {}) if method == "eagle3" else (None, {"exit_layer": 1})
    spec = SpecConfig(method, 2, **options)
    measured = planner.measure(spec, drafter)
    assert measured.lengths == [0, 1, 2]
    for length in (1, 2):
        engine = Engine(model, drafter, spec=SpecConfig(method, length, **options))
        engine.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
        assert measured.tokens_per_pass[length] == engine.stats.mean_acceptance_length


def test_cascades_are_measured(model, planner):
    drafts = [perturbed(model, 0.03), perturbed(model, 0.1)]
    horizontal, *_, vertical = k_matrices_to_try(2)
    for rows in (horizontal, vertical):
        spec = SpecConfig("cascade", k_matrix=rows)
        measured = planner.measure(spec, drafts)
        assert measured.lengths == [0, spec.num_draft_tokens()]
        assert measured.tokens_per_pass[spec.num_draft_tokens()] > 1


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("tree", {"tree_nodes": 4}),
        ("draft_model", {"suffix_tokens": 4}),
        ("tree", {"tree_nodes": 3, "suffix_tokens": 4}),
    ],
    ids=str,
)
def test_whole_texts_are_measured(model, planner, method, options):
    drafter, spec = perturbed(model, 0.03), SpecConfig(method, 2, **options)
    measured = planner.measure(spec, drafter)
    assert measured.lengths == [0, 2]
    assert min(measured.verify_seconds.values()) > 0
    assert measured.draft_seconds[2] > measured.draft_seconds[0]
    engine = Engine(model, drafter, spec=spec.for_repeated_prompts())
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    for prompt in PROMPTS:
        engine.generate([prompt], params)
    assert measured.tokens_per_pass == {0: 1.0, 2: engine.stats.mean_acceptance_length}
    assert planner.choose([measured]).spec in (spec, SpecConfig("none"))


def test_sampled_texts_are_decoded_again(model):
    planner = Planner(model, None, PROMPTS, max_tokens=40, temperature=1.0)
    measured = planner.measure(SpecConfig("draft_model", 1), model)
    assert measured.tokens_per_pass == {0: 1.0, 1: 2.0}


def test_a_plan_is_measured(model):
    heard = []
    planner = Planner(model, None, PROMPTS, 60, advance=lambda: heard.append(None))
    plan = Plan(SpecConfig("draft_model", 3), 1.0)
    gain = planner.confirm(plan, model, 2)
    assert gain > 0
    assert len(heard) == 4


def test_no_prompt_is_taken_from_a_cache(model, monkeypatch):
    """Each of its runs reads the prompt again, also if the config caches prefixes."""
    engines, make = [], Planner._engine
    monkeypatch.setattr(
        Planner, "_engine", lambda *given: engines.append(made := make(*given)) or made
    )
    config = EngineConfig(prefix_caching=True, block_size=4)
    planner = Planner(model, None, [list(range(5, 40))], 24, config=config)
    spec = SpecConfig("prompt_lookup", 1)
    planner.measure(spec, None)
    planner.confirm(Plan(spec, 1.0), None, 2)
    assert len(engines) == 3
    assert [engine.stats.num_cached_prompt_tokens for engine in engines] == [0, 0, 0]


def test_too_few_tokens(model):
    planner = Planner(model, None, PROMPTS, max_tokens=6)
    with pytest.raises(ValueError, match="max_tokens: 6 is too few"):
        planner.measure(SpecConfig("draft_model", 5), model)


@pytest.mark.parametrize(
    "spec",
    [
        SpecConfig("none"),
        SpecConfig("draft_model", 7),
        SpecConfig("prompt_lookup", 3, prompt_lookup_min=2, prompt_lookup_max=4),
        SpecConfig("cascade"),
        SpecConfig("cascade", k_matrix=[[3, 2], [0, 2]]),
    ],
    ids=str,
)
def test_the_file(tmp_path, spec):
    file = tmp_path / "tuned.json"
    save_tuned(TunedConfig("tiny", "tiny-draft", spec_fields(spec)), file)
    loaded = load_tuned(file)
    assert spec_fields(loaded.spec_config()) == spec_fields(spec)
    assert (loaded.target, loaded.draft) == ("tiny", "tiny-draft")
    assert [path.name for path in tmp_path.iterdir()] == ["tuned.json"]


def test_the_file_keeps_the_default_k_matrix():
    spec = SpecConfig("cascade")
    assert spec_fields(spec) == {"method": "cascade", "k_matrix": spec.cascade_matrix}


def test_costs_in_the_file_make_an_adaptive_engine(tmp_path, model):
    file = tmp_path / "tuned.json"
    fields = spec_fields(SpecConfig("draft_model", 2))
    save_tuned(TunedConfig("a", "b", fields, [1.0, 1.1, 1.2]), file)
    loaded = load_tuned(file)
    spec = loaded.spec_config(schedule="adaptive", step_costs=loaded.step_costs)
    params = SamplingParams(temperature=0, max_tokens=20)
    (output,) = Engine(model, model, spec=spec).generate([[1, 2]], params)
    assert output.stats.num_accepted_tokens > 0


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('{"fastspec_config": 1, "target"', "cut off"),
        ("[1]", "not written by fastspec tune"),
        ('{"fastspec_config": 2}', "not written by fastspec tune"),
        ('{"fastspec_config": 1, "target": "a", "draft": 3, "spec": {}}', "must contain"),
        ('{"fastspec_config": 1, "target": "a", "draft": null, "spec": {"k": 3}}', "must contain"),
        ('{"fastspec_config": 1, "target": "a", "spec": {"method": "x"}}', "method"),
        ('{"fastspec_config": 1, "target": "a", "spec": {}, "step_costs": [1]}', "step_costs"),
    ],
)
def test_files_that_are_none(tmp_path, text, named):
    file = tmp_path / "tuned.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=named):
        load_tuned(file)


def test_a_file_that_is_missing(tmp_path):
    with pytest.raises(ValueError, match="no such file"):
        load_tuned(tmp_path / "missing.json")
