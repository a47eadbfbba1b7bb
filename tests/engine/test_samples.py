"""n > 1: several texts of one prompt, which is read once; each is a request like any other."""

import pytest

from fastspec import Engine, EngineConfig, SamplingParams, SpecConfig
from fastspec.engine.request_factory import sample_seed

from ..models import byte_tokenizer, random_model, random_t5
from .probes import assert_blocks_came_back, record_reads, record_releases, target_runner

SIZE, N = 4, 4
PROMPT = [(11 * place + 3) % 250 for place in range(22)]


def params_of(n=N, **fields):
    given = {"temperature": 1.0, "seed": 5, "max_tokens": 14, "ignore_eos": True, **fields}
    return SamplingParams(n=n, **given)


def engine_of(model, drafter=None, **config):
    config = EngineConfig(block_size=SIZE, **config)
    spec = SpecConfig(num_speculative_tokens=3)
    return Engine(model, drafter, tokenizer=byte_tokenizer(), spec=spec, config=config)


@pytest.fixture(scope="module")
def alone(model, drafter):
    """The text of each sample as a request of its own, with its seed."""
    engine = engine_of(model, drafter)
    seeds = [sample_seed(5, index) for index in range(N)]
    return [engine.generate([PROMPT], params_of(1, seed=seed))[0] for seed in seeds]


def test_seeds_of_samples():
    assert sample_seed(0, 0) == 0
    # Number 1 to 3 of splitmix64 from 0, as published with xoshiro.
    numbers = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [sample_seed(0, index) for index in (1, 2, 3)] == [number >> 1 for number in numbers]
    seeds = {sample_seed(seed, index) for seed in range(40) for index in range(1, 40)}
    assert len(seeds) == 40 * 39
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize(
    "config",
    [{}, {"max_batch_size": 1}, {"num_blocks": 16}, {"prefill_chunk_size": 5}],
    ids=str,
)
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_each_sample_is_the_text_of_its_seed(model, drafter, alone, prefix_caching, config):
    engine = engine_of(model, drafter, prefix_caching=prefix_caching, **config)
    releases = record_releases(engine)
    output, other = engine.generate([PROMPT, PROMPT[:3]], [params_of(), params_of(2, seed=1)])
    assert output.outputs[0] is output
    assert [one.index for one in output.outputs] == [*range(N)]
    assert {one.request_id for one in output.outputs} == {output.request_id}
    assert [one.token_ids for one in output.outputs] == [one.token_ids for one in alone]
    assert [one.text for one in output.outputs] == [one.text for one in alone]
    assert len({one.token_ids for one in output.outputs}) == N
    assert len(other.outputs) == 2
    assert (len(releases) > N + 2) == ("num_blocks" in config), "preempted or not"
    assert_blocks_came_back(engine)


@pytest.mark.parametrize("logprobs", [None, 1])
@pytest.mark.parametrize("config", [{}, {"max_batch_size": 1}, {"prefill_chunk_size": 7}], ids=str)
def test_full_blocks_of_the_prompt_are_read_once(model, config, logprobs):
    engine = engine_of(model, **config)
    counts = record_reads(target_runner(engine))
    for _ in range(2):  # and nobody else finds them
        counts.clear()
        (output,) = engine.generate([PROMPT], params_of(prompt_logprobs=logprobs))
        read = len(PROMPT) - 1
        shared = read // SIZE * SIZE
        by_first = 0 if logprobs else read  # with logits, its tokens are read elsewhere
        assert sum(counts) == by_first + (N - 1) * (read - shared)
        found = [one.stats.num_cached_prompt_tokens for one in output.outputs]
        assert found == [0] + [shared] * (N - 1)


def test_greedy_samples_are_equal(model, drafter):
    (output,) = engine_of(model, drafter).generate([PROMPT], params_of(3, temperature=0.0))
    assert len({one.token_ids for one in output.outputs}) == 1


@pytest.mark.parametrize("kind", ["t5", "mamba2"])
def test_models_that_share_no_blocks(kind):
    model = random_t5() if kind == "t5" else random_model(kind)
    engine = Engine(model, config=EngineConfig(block_size=SIZE))
    prompt = [token_id % 90 for token_id in PROMPT]
    (output,) = engine.generate([prompt], params_of(3))
    for index, one in enumerate(output.outputs):
        params = params_of(1, seed=sample_seed(5, index))
        assert one.token_ids == engine.generate([prompt], params)[0].token_ids


def test_events_tell_the_sample(model, drafter, alone):
    engine = engine_of(model, drafter)
    streamed = [*engine.stream(PROMPT, params_of())]
    name = engine.add_request(PROMPT, params_of(), "mine")
    stepped = []
    while engine.has_unfinished:
        stepped += engine.step()
    assert {event.request_id for event in stepped} == {name} == {"mine"}
    for events in (streamed, stepped):
        for index, expected in enumerate(alone):
            of_one = [event for event in events if event.index == index]
            ids = tuple(token_id for event in of_one for token_id in event.token_ids)
            assert ids == expected.token_ids == of_one[-1].output.token_ids
            assert [event.output is None for event in of_one] == [True] * len(ids) + [False]
            assert "".join(event.text for event in of_one) == expected.text


def test_abort_ends_all_samples(model, drafter, alone):
    engine = engine_of(model, drafter, max_batch_size=3)
    name = engine.add_request(PROMPT, params_of())
    with pytest.raises(ValueError, match="already running"):
        engine.add_request(PROMPT, params_of(), name)
    engine.step()
    output = engine.abort(name)
    assert [one.finish_reason for one in output.outputs] == ["abort"] * N
    assert all(
        one.token_ids == expected.token_ids[: len(one.token_ids)]
        for one, expected in zip(output.outputs, alone, strict=True)
    )
    assert not engine.has_unfinished
    assert engine.abort(name) is None
    stream = engine.stream(PROMPT, params_of())
    next(stream)
    stream.close()
    assert not engine.has_unfinished
    assert_blocks_came_back(engine)


def test_what_is_refused(model):
    for n in (0, -1, 1.5, True, None, 2**20):
        with pytest.raises(ValueError, match=r"^n: expected an int from 1"):
            SamplingParams(n=n)
    with pytest.raises(ValueError, match=r"^request_id"):
        engine_of(model).add_request(PROMPT, params_of(), "a\0001")
