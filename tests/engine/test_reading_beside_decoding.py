"""Long prompts are read in chunks, between which others decode, and nobody's text changes."""

import pytest

from fastspec import Engine, EngineConfig, SamplingParams, SpecConfig

from .helpers import finish
from .probes import (
    assert_blocks_came_back,
    record_reads,
    record_releases,
    running,
    target_runner,
    waiting,
)

CHUNK, SIZE = 8, 4
LONG = [(7 * place + place // 9) % 250 for place in range(101)]
SHORT = [5, 6, 7]


def params_of(seed=1, max_tokens=40, temperature=1.0):
    return SamplingParams(
        temperature=temperature, seed=seed, max_tokens=max_tokens, ignore_eos=True
    )


def engine_of(model, drafter=None, **config):
    config = {"block_size": SIZE, "prefill_chunk_size": CHUNK, **config}
    spec = SpecConfig(num_speculative_tokens=2)
    return Engine(model, drafter, spec=spec, config=EngineConfig(**config))


def alone(model, drafter, prompt, params):
    return Engine(model, drafter, spec=SpecConfig(num_speculative_tokens=2)).generate(
        [prompt], params
    )[0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("speculative", [False, True])
def test_a_request_decodes_in_every_round_while_a_long_prompt_is_read(
    model, drafter, speculative, temperature
):
    drafter = drafter if speculative else None
    params = params_of(max_tokens=60, temperature=temperature)
    engine = engine_of(model, drafter)
    counts = record_reads(target_runner(engine))
    short = engine.add_request(SHORT, params)
    engine.step()
    long = engine.add_request(LONG, params)
    num_rounds, outputs = 0, {}
    while len(running(engine)) < 2 or running(engine)[1].num_cached < len(LONG) - 1:
        counts.clear()
        events = engine.step()
        num_rounds += 1
        assert sum(counts) <= CHUNK
        assert {event.request_id for event in events if event.token_ids} >= {short}
        outputs |= {event.request_id: event.output for event in events if event.output}
    assert num_rounds == -(-(len(LONG) - 1) // CHUNK)
    outputs |= finish(engine)
    for name, prompt in ((short, SHORT), (long, LONG)):
        assert outputs[name].token_ids == alone(model, drafter, prompt, params).token_ids
    assert_blocks_came_back(engine)


def test_a_round_reads_one_chunk_of_all_prompts_together(model, drafter):
    engine = engine_of(model, drafter)
    prompts = [LONG[start:] for start in (0, 90, 60, 95)]
    counts = record_reads(target_runner(engine))
    ids = [engine.add_request(prompt, params_of(seed)) for seed, prompt in enumerate(prompts)]
    outputs = {}
    while engine.has_unfinished:
        counts.clear()
        outputs |= {event.request_id: event.output for event in engine.step() if event.output}
        assert sum(counts) <= CHUNK
    for seed, (name, prompt) in enumerate(zip(ids, prompts, strict=True)):
        expected = alone(model, drafter, prompt, params_of(seed))
        assert outputs[name].token_ids == expected.token_ids
        assert outputs[name].stats.num_prompt_tokens == len(prompt)


def test_who_shares_a_prefix_waits_for_all_of_its_chunks(model, drafter):
    engine = engine_of(model, drafter, prefix_caching=True)
    prompts = [[*LONG, 1, 2], [*LONG[:70], 3, 4, 5], [*LONG, 6]]
    counts = record_reads(target_runner(engine))
    outputs = engine.generate(prompts, [params_of(seed) for seed in range(3)])
    for seed, (output, prompt) in enumerate(zip(outputs, prompts, strict=True)):
        assert output.token_ids == alone(model, drafter, prompt, params_of(seed)).token_ids
    cached = [output.stats.num_cached_prompt_tokens for output in outputs]
    assert cached == [0, 68, 100]
    assert sum(counts) == sum(len(prompt) - 1 for prompt in prompts) - sum(cached)
    assert_blocks_came_back(engine)


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_a_half_read_request_is_preempted_and_aborted_like_any_other(
    model, drafter, prefix_caching
):
    config = {"num_blocks": 31, "prefix_caching": prefix_caching}
    engine = engine_of(model, drafter, **config)
    releases = record_releases(engine)
    first = engine.add_request(SHORT, params_of(max_tokens=50))
    while len(running(engine)[0].token_ids if running(engine) else []) < 12:
        engine.step()
    long = engine.add_request(LONG, params_of(2, max_tokens=6))
    while long not in releases:
        engine.step()
    (preempted,) = waiting(engine)
    assert len(preempted.token_ids) == len(LONG), "it was read to its end before"
    outputs = finish(engine)
    expected = alone(model, drafter, LONG, params_of(2, max_tokens=6))
    assert outputs[long].token_ids == expected.token_ids
    assert outputs[long].stats.num_prompt_tokens == len(LONG)
    assert (
        outputs[first].token_ids == alone(model, drafter, SHORT, params_of(max_tokens=50)).token_ids
    )
    again = engine.add_request(LONG[::-1], params_of(max_tokens=6))
    engine.step()
    assert 0 < running(engine)[0].num_cached < len(LONG) - 1
    output = engine.abort(again)
    assert output.finish_reason == "abort"
    assert output.token_ids == ()
    assert_blocks_came_back(engine)
