"""First come, first served: nobody overtakes, nobody starves, and who was preempted goes first."""

from fastspec import Engine, EngineConfig, SamplingParams

from .probes import assert_blocks_came_back, record_releases, running, waiting

SIZE, NUM_BLOCKS = 4, 24
BIG = [(3 * place) % 250 for place in range(60)]  # with its 20 new tokens 20 of the 24 blocks


def params_of(max_tokens):
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def engine_of(model, drafter=None, **config):
    config = {"block_size": SIZE, "num_blocks": NUM_BLOCKS, "prefill_chunk_size": 16, **config}
    return Engine(model, drafter, config=EngineConfig(**config))


def test_a_big_request_gets_in_between_a_stream_of_small_ones(model, drafter):
    (alone,) = Engine(model).generate([BIG], params_of(20))
    engine = engine_of(model, drafter, max_batch_size=4)
    small = [[place, 9, place % 7] for place in range(200)]
    order, outputs, num_rounds, first_round = [], {}, 0, None
    for prompt in small[:6]:
        engine.add_request(prompt, params_of(10))
    big = engine.add_request(BIG, params_of(20))
    for prompt in small[6:]:  # one more with each round, so that there are always some
        engine.add_request(prompt, params_of(10))
        events = engine.step()
        num_rounds += 1
        order += [event.request_id for event in events if event.output]
        outputs |= {event.request_id: event.output for event in events if event.output}
        if first_round is None and big in {event.request_id for event in events}:
            first_round = num_rounds
        if big in outputs:
            break
    assert outputs[big].token_ids == alone.token_ids
    # Six small ones of 10 steps at most, two batches of them, before the four chunks of its prompt.
    assert first_round <= 2 * 10 + 4
    assert num_rounds <= first_round + 20
    assert {f"request-{number}" for number in range(1, 7)} <= set(order[: order.index(big)])
    assert waiting(engine), "the small ones had run out"


def test_who_was_preempted_comes_back_in_order_and_before_all_others(model, drafter):
    engine = engine_of(model, drafter, num_blocks=14)
    releases = record_releases(engine)
    ids = [engine.add_request([seed, 7, 7, seed], params_of(30)) for seed in range(4)]
    late = engine.add_request([1, 2], params_of(2))
    first_seen, num_preempted, outputs = [], 0, {}
    while engine.has_unfinished:
        num_ended = len(releases)
        for event in engine.step():
            if event.output:
                outputs[event.request_id] = event.output
        num_preempted += len(set(releases[num_ended:]) - set(outputs))
        first_seen += [r.request_id for r in running(engine) if r.request_id not in first_seen]
        queue = [r.request_id for r in running(engine)] + [r.request_id for r in waiting(engine)]
        assert queue == [name for name in [*ids, late] if name in queue]
    assert num_preempted > 0
    assert first_seen[: len(ids)] == ids
    assert_blocks_came_back(engine)
