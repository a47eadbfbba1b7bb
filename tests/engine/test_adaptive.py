"""The adaptive schedule: what it decides by counts alone, and that no text depends on it."""

import gc
import random
import weakref
from itertools import pairwise

import pytest

from fastspec import Engine, EngineConfig, SamplingParams, SpecConfig
from fastspec.engine.pacing import fitted_line
from fastspec.engine.schedule import AdaptiveSchedule, Schedule, Step, SweepSchedule
from fastspec.tools.formulas import best_num_speculative_tokens, expected_tokens

from ..models import perturbed, random_model
from .probes import assert_blocks_came_back, request_of

PROMPTS = [[1, 2, 3], list(range(5, 22)), [40, 7] * 10, [99]]
COSTS = [1.0, 1.2, 1.35, 1.5, 1.65, 1.8]
GREEDY = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)


def run(schedule, rate_of, num_tokens, seed=0):
    """Tokens and cost of a request whose drafts are accepted at a rate that depends on the place.

    Costs are those of COSTS; the lengths that were drafted come with them.
    """
    generator = random.Random(seed)
    request, tokens, cost, lengths = request_of([1]), 0, 0.0, []
    while tokens < num_tokens:
        length = schedule.num_draft_tokens(request)
        accepted = 0
        while accepted < length and generator.random() < rate_of(tokens):
            accepted += 1
        schedule.record(request, Step(length, length, accepted))
        tokens += accepted + 1
        cost += COSTS[length]
        lengths.append(length)
    return tokens, cost, lengths


@pytest.mark.parametrize("num_tokens", [128, 256, 1024])
@pytest.mark.parametrize("rate", [0.0, 0.02])
def test_drafts_that_fail_cost_less_than_three_percent(num_tokens, rate):
    runs = [run(AdaptiveSchedule(COSTS), lambda _: rate, num_tokens, seed) for seed in range(50)]
    speed = sum(tokens for tokens, _, _ in runs) / sum(cost for _, cost, _ in runs)
    assert speed >= 0.97


@pytest.mark.parametrize("rate", [0.5, 0.7, 0.9, 1.0])
def test_it_comes_near_the_best_length(rate):
    best = max(expected_tokens(rate, length) / COSTS[length] for length in range(6))
    runs = [run(AdaptiveSchedule(COSTS), lambda _: rate, 512, seed) for seed in range(20)]
    speed = sum(tokens for tokens, _, _ in runs) / sum(cost for _, cost, _ in runs)
    assert speed >= 0.93 * best


def test_it_stops_and_resumes():
    _, _, lengths = run(AdaptiveSchedule(COSTS), lambda place: float(place >= 100), 400)
    assert 0 in lengths[:6]
    assert lengths[-20:] == [5] * 20


def test_plain_steps_between_trials_double():
    _, _, lengths = run(AdaptiveSchedule(COSTS), lambda _: 0.0, 500)
    first = lengths.index(0)
    trials = [place for place, length in enumerate(lengths) if length and place > first]
    pauses = [end - start - 1 for start, end in pairwise(trials)]
    assert pauses[:4] == [64, 128, 128, 128]
    assert {lengths[place] for place in trials} == {1}


def test_steps_without_drafts_for_other_reasons_are_no_pause():
    lengths = []
    for num_others in (0, 40):
        schedule, request = AdaptiveSchedule(COSTS), request_of([1], GREEDY)
        for _ in range(num_others):
            schedule.record(request, Step(0, 0, 0))
        wanted = []
        for _ in range(60):
            wanted.append(schedule.num_draft_tokens(request))
            schedule.record(request, Step(wanted[-1], wanted[-1], 0))
        lengths.append(wanted)
    assert lengths[0] == lengths[1]


def test_a_small_gain_changes_nothing():
    schedule = AdaptiveSchedule([1.0, 1.0001, 1.0002])
    request = request_of([1])
    lengths = set()
    for place in range(40):
        lengths.add(schedule.num_draft_tokens(request))
        schedule.record(request, Step(2, 2, 2 if place % 2 else 1))
    assert lengths == {2}


def test_proposals_that_lack_tell_nothing():
    schedule = AdaptiveSchedule(COSTS)
    request = request_of([1])
    first = schedule.num_draft_tokens(request)
    for _ in range(50):
        schedule.record(request, Step(5, 0, 0))
    assert schedule.num_draft_tokens(request) == first > 0


def test_sampled_requests_use_costs_that_no_clock_gave():
    dear = AdaptiveSchedule([1.0, 50.0, 99.0])
    greedy, sampled = (
        request_of([1]),
        request_of([1], params=SamplingParams(temperature=1.0, seed=1)),
    )
    for request in (greedy, sampled):
        dear.num_draft_tokens(request)
        dear.record(request, Step(2, 2, 2))
    assert dear.num_draft_tokens(greedy) == 0
    assert dear.num_draft_tokens(sampled) == 2


def test_a_request_begins_anew_with_the_schedule_of_another_drafter():
    request, long = request_of([1]), AdaptiveSchedule(COSTS)
    assert AdaptiveSchedule(COSTS[:2]).num_draft_tokens(request) == 1
    assert long.num_draft_tokens(request) == long.num_draft_tokens(request_of([1])) > 1


def test_the_sweep_takes_every_length_in_turn():
    schedule, request = SweepSchedule(range(3)), request_of([1])
    lengths = []
    for _ in range(7):
        lengths.append(schedule.num_draft_tokens(request))
        schedule.record(request, Step(lengths[-1], lengths[-1], 0))
    assert lengths == [0, 1, 2, 0, 1, 2, 0]
    assert isinstance(schedule, Schedule)


@pytest.mark.parametrize("quality", ["often right", "wrong", "prompt_lookup", "mag"])
@pytest.mark.parametrize("schedule", ["adaptive", "sweep"])
def test_greedy_ids_are_those_of_plain_decoding(model, drafter, quality, schedule):
    expected = [o.token_ids for o in Engine(model).generate(PROMPTS, GREEDY)]
    copies = quality in ("prompt_lookup", "mag")
    spec = SpecConfig(
        quality if copies else "auto",
        num_speculative_tokens=4,
        schedule=SweepSchedule(range(5)) if schedule == "sweep" else "adaptive",
    )
    given = {"often right": drafter, "wrong": random_model("llama", seed=7)}.get(quality)
    engine = Engine(model, given, spec=spec, config=EngineConfig(max_batch_size=3))
    assert [o.token_ids for o in engine.generate(PROMPTS, GREEDY)] == expected
    assert_blocks_came_back(engine)


def test_wrong_drafts_are_given_up(model):
    spec = SpecConfig(schedule="adaptive", step_costs=COSTS)
    wrong = random_model("llama", seed=7)
    adaptive = Engine(model, wrong, spec=spec)
    adaptive.generate(PROMPTS, GREEDY)
    constant = Engine(model, wrong)
    constant.generate(PROMPTS, GREEDY)
    assert adaptive.stats.num_draft_tokens < constant.stats.num_draft_tokens / 4


def sampled_ids(model, drafter, prompts, seeds, **config):
    params = [SamplingParams(seed=s, max_tokens=30, ignore_eos=True, temperature=1) for s in seeds]
    engine = Engine(
        model, drafter, spec=SpecConfig(schedule="adaptive"), config=EngineConfig(**config)
    )
    return [output.token_ids for output in engine.generate(prompts, params)]


def test_sampled_ids_depend_on_the_seed_alone(model):
    """Not on the batch, a preemption, or how long anything took."""
    drafter = perturbed(model, 0.1)
    together = sampled_ids(model, drafter, PROMPTS, range(4))
    alone = [sampled_ids(model, drafter, [p], [s])[0] for s, p in enumerate(PROMPTS)]
    tight = sampled_ids(model, drafter, PROMPTS, range(4), block_size=4, num_blocks=20)
    assert together == alone == tight


def test_switching_on_and_off(model, drafter):
    expected = [o.token_ids for o in Engine(model).generate(PROMPTS, GREEDY)]
    engine = Engine(model, drafter, spec=SpecConfig(schedule="adaptive"))
    engine.disable_spec_dec()
    assert [o.token_ids for o in engine.generate(PROMPTS, GREEDY)] == expected
    assert engine.stats.num_draft_tokens == 0
    engine.enable_spec_dec(n_spec_tokens=2)
    assert [o.token_ids for o in engine.generate(PROMPTS, GREEDY)] == expected
    assert 0 < len(engine.stats.num_accepted_tokens_per_pos) <= 2


def test_the_best_of_the_model_is_the_best_of_the_formula():
    costs = [1 + 0.1 * length for length in range(9)]
    for rate in (0.1, 0.4, 0.6, 0.8, 0.95):
        speeds = [expected_tokens(rate, length) / costs[length] for length in range(9)]
        assert speeds.index(max(speeds)) == best_num_speculative_tokens(rate, 0.1, 8)


def test_costs_are_a_line_whatever_disturbed_some():
    line = [1.0 + 0.2 * length for length in range(6)]
    assert fitted_line(line) == pytest.approx(line)
    disturbed = [*line[:1], 9.0, *line[2:4], 7.0, *line[5:]]
    assert fitted_line(disturbed) == pytest.approx(line, rel=0.25)
    fast = [1.0, 0.5, 1.4, 1.6, 1.8, 2.0]
    assert fitted_line(fast) == pytest.approx(line, rel=0.1)
    flat = fitted_line([1.0, 0.99, 1.0, 0.98])
    assert flat == sorted(flat)
    assert flat[-1] > flat[0] > 0


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"schedule": "dynamic"}, "schedule"),
        ({"schedule": 3}, "schedule"),
        ({"step_costs": COSTS}, "step_costs"),
        ({"schedule": "adaptive", "step_costs": COSTS[:3]}, "step_costs"),
        ({"schedule": "adaptive", "step_costs": [1, 2, 3, 4, 5, 0]}, "step_costs"),
        ({"schedule": "adaptive", "step_costs": [1, 2, 3, 4, 5, float("nan")]}, "step_costs"),
        ({"schedule": "adaptive", "step_costs": "cheap!"}, "step_costs"),
    ],
)
def test_bad_configurations(fields, named):
    with pytest.raises(ValueError, match=named):
        SpecConfig(**fields)


def test_no_costs_for_another_length(model, drafter):
    engine = Engine(model, drafter, spec=SpecConfig(schedule="adaptive", step_costs=COSTS))
    with pytest.raises(ValueError, match="step_costs"):
        engine.enable_spec_dec(n_spec_tokens=7)
    with pytest.raises(ValueError, match="step_costs"):
        AdaptiveSchedule([1.0])


def test_no_room_to_measure(model, drafter):
    config = EngineConfig(block_size=4, num_blocks=1)
    with pytest.raises(ValueError, match="pass step_costs"):
        Engine(model, drafter, spec=SpecConfig(schedule="adaptive"), config=config)
    with pytest.raises(ValueError, match=r"^schedule: .*max_model_len.*pass step_costs"):
        Engine(model, drafter, spec=SpecConfig(schedule="adaptive"), config={"max_model_len": 2})


@pytest.mark.parametrize(("rate", "longest"), [(0.0, 0), (0.9, 5)])
def test_greedy_requests_of_a_batch_draft_equally_much(rate, longest):
    """What together they lose or gain decides; drafts that fail are tried again now and then."""
    generator = random.Random(1)
    schedule = AdaptiveSchedule(COSTS, None, (8, [3.0, 3.5, 3.9, 4.2, 4.6, 4.9]))
    requests = [request_of([1]) for _ in range(8)]
    lengths = []
    for _ in range(60):
        common = schedule.common_length(requests)
        assert schedule.common_length(requests[:1]) is None
        lengths.append(common)
        for request in requests:
            accepted = 0
            while accepted < common and generator.random() < rate:
                accepted += 1
            schedule.record(request, Step(common, common, accepted))
    assert set(lengths[:8]) == {2}
    assert lengths[-1] == longest
    assert lengths[10:].count(0) == (0 if longest else 49)


def test_without_costs_of_a_batch_each_request_decides_for_itself():
    requests = [request_of([1]), request_of([2])]
    assert AdaptiveSchedule(COSTS, COSTS).common_length(requests) is None


@pytest.mark.parametrize("method", ["standard", "coupled"])
def test_a_crowd_drafts_nothing_for_greedy_requests(model, drafter, method):
    """What samples goes on as ever, unless no draft can change its text."""
    spec = SpecConfig(disable_by_batch_size=2, rejection_sample_method=method)
    engine = Engine(model, drafter, spec=spec)
    seen, propose = [], engine.drafter.propose

    def spy(batch):
        seen.append([(r.params.temperature, n) for r, n in wanted_of(batch)])
        return propose(batch)

    def wanted_of(batch):
        return zip(batch.requests, batch.num_draft_tokens, strict=True)

    engine.drafter.propose = spy
    params = [
        SamplingParams(temperature=temperature, seed=3, max_tokens=length, ignore_eos=True)
        for temperature, length in ((0, 8), (1, 16), (0, 40))
    ]
    together = engine.generate(PROMPTS[:3], params)
    alone = [
        Engine(model, drafter, spec=spec).generate(prompt, each)[0]
        for prompt, each in zip(PROMPTS, params, strict=False)
    ]
    assert [output.token_ids for output in together] == [output.token_ids for output in alone]
    crowds = [pairs for pairs in seen if len(pairs) > 2]
    sampled = [count for pairs in crowds for temperature, count in pairs if temperature]
    assert all(count == 0 for pairs in crowds for temperature, count in pairs if not temperature)
    assert bool(crowds) == (method == "standard") == any(sampled)
    assert any(count for pairs in seen for temperature, count in pairs if not temperature)


def test_a_crowd_is_of_one_or_more():
    for size in (0, -1, 1.5, "many"):
        with pytest.raises(ValueError, match="disable_by_batch_size"):
            SpecConfig(disable_by_batch_size=size)
    with pytest.raises(ValueError, match="disable_by_batch_size"):
        SpecConfig("none", disable_by_batch_size=4)


def test_a_drafter_whose_costs_were_measured_can_go(model, drafter):
    spec = SpecConfig(num_speculative_tokens=2, schedule="adaptive")
    engine = Engine(model, spec=spec)
    engine.enable_spec_dec(perturbed(model, 0.02, seed=1))
    drafter = weakref.ref(engine.drafter)
    engine.clear_spec_dec()
    gc.collect()
    assert drafter() is None
