"""Whose shared blocks are when requests end, are aborted, preempted or fail, and space runs out."""

import random

import pytest
import torch

from fastspec.engine.prefix_index import ContentKey

from ..models import random_model
from .helpers import finish
from .prefix_sharing import (
    SIZE,
    TAILS,
    TEXT,
    Watcher,
    alone,
    engine_of,
    params_of,
)
from .probes import (
    assert_blocks_came_back,
    blocks,
    num_users,
    record_reads,
    record_releases,
    running,
    schedule,
    target_runner,
    waiting,
)


def test_a_request_shares_with_one_that_runs_and_outlives_it(model, drafter):
    engine = engine_of(model, drafter)
    first = engine.add_request(TEXT, params_of(max_tokens=30))
    for _ in range(3):
        engine.step()
    prompts = [TEXT + tail for tail in TAILS]
    ids = [engine.add_request(prompt, params_of(seed=9)) for prompt in prompts]
    engine.step()
    assert num_users(engine, running(engine)[0].block_table[:3]) == [3] * 3
    text = engine.abort(first)
    outputs = finish(engine)
    for request_id, prompt in zip(ids, prompts, strict=True):
        expected = alone(model, drafter, prompt, params_of(seed=9))
        assert outputs[request_id].token_ids == expected.token_ids
        assert outputs[request_id].stats.num_cached_prompt_tokens == 12
    assert_blocks_came_back(engine)
    longer = TEXT + list(text.token_ids) + [1]
    found = engine.generate([longer], params_of())[0].stats.num_cached_prompt_tokens
    assert found == (len(longer) - 2) // SIZE * SIZE


def test_eviction_takes_the_least_recently_used_text_from_its_end(model):
    engine = engine_of(model, num_blocks=8)
    texts = [[start] * 13 for start in (1, 2, 3)]

    def found(index):
        return engine.generate([texts[index]], params_of(max_tokens=1))[0].stats

    assert [found(i).num_cached_prompt_tokens for i in (0, 1, 0, 1)] == [0, 0, 12, 12]
    assert found(0).num_cached_prompt_tokens == 12  # now text 1 is the oldest
    assert found(2).num_cached_prompt_tokens == 0
    assert found(0).num_cached_prompt_tokens == 12
    assert found(1).num_cached_prompt_tokens == 4
    assert_blocks_came_back(engine)


def test_preemption_resumes_through_the_cache(model, drafter):
    prompts = [[1, 2, 3], list(range(5, 22)), [40, 7] * 10, [99], [60, 61, 62, 63]]
    params = [params_of(seed=seed, max_tokens=24) for seed in range(len(prompts))]
    expected = engine_of(model, drafter, prefix_caching=False).generate(prompts, params)
    num_read = {}
    for prefix_caching in (False, True):
        engine = engine_of(model, drafter, prefix_caching, num_blocks=13)
        counts, releases = record_reads(target_runner(engine)), record_releases(engine)
        outputs = engine.generate(prompts, params)
        assert len(releases) > len(prompts), "nothing was preempted"
        assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
        assert [o.stats.num_steps for o in outputs] == [o.stats.num_steps for o in expected]
        assert engine.stats.num_prompt_tokens == sum(map(len, prompts))
        num_read[prefix_caching] = sum(counts)
        assert_blocks_came_back(engine)
    assert num_read[True] < num_read[False]


def test_a_preempted_request_finds_what_it_wrote(model, drafter):
    engine = engine_of(model, drafter, num_blocks=13)
    requests = [TEXT[:3], TEXT[3:6]]
    expected = [alone(model, drafter, r, params_of(max_tokens=30)).token_ids for r in requests]
    first, second = (engine.add_request(r, params_of(max_tokens=30)) for r in requests)
    while len(running(engine)) != 1:
        engine.step()
    (preempted,) = waiting(engine)
    assert preempted.block_table == []
    engine.abort(first)
    schedule(engine)
    assert preempted.num_cached == (len(preempted.token_ids) - 1) // SIZE * SIZE
    assert len(preempted.contents) >= (preempted.num_cached // SIZE) - 1 > len(requests[1]) // SIZE
    assert finish(engine)[second].token_ids == expected[1]
    assert_blocks_came_back(engine)


def test_colliding_hashes_share_nothing_wrong(model, drafter, monkeypatch):
    monkeypatch.setattr(ContentKey, "__hash__", lambda self: 0)
    engine = engine_of(model, drafter)
    prompts = [[a, b, 9, 9, *TEXT] for a in (1, 2) for b in (1, 2)]  # alike after the first block
    for found in (0, 16):
        for prompt in prompts:
            output = engine.generate([prompt], params_of())[0]
            assert output.stats.num_cached_prompt_tokens == found
            assert output.token_ids == alone(model, drafter, prompt, params_of()).token_ids


def test_what_a_failed_request_read_is_not_found():
    model = random_model("llama")
    expected = engine_of(model).generate([TEXT], params_of(0))[0]
    engine = engine_of(model)
    norm = model.model.norm.weight
    kept = norm.detach().clone()
    with torch.no_grad():
        norm.fill_(float("nan"))
    assert engine.generate([TEXT], params_of(0))[0].finish_reason == "error"
    with torch.no_grad():
        norm.copy_(kept)
    output = engine.generate([TEXT], params_of(0))[0]
    assert output.stats.num_cached_prompt_tokens == 0
    assert output.token_ids == expected.token_ids
    assert_blocks_came_back(engine)


def test_an_interrupted_prefill_leaves_nothing_to_be_found(model, monkeypatch):
    engine = engine_of(model)
    runner = target_runner(engine)
    monkeypatch.setattr(runner, "forward", lambda *args, **options: 1 / 0)
    request_id = engine.add_request(TEXT, params_of())
    with pytest.raises(ZeroDivisionError):
        engine.step()
    monkeypatch.undo()
    engine.abort(request_id)
    output = engine.generate([TEXT], params_of())[0]
    assert output.stats.num_cached_prompt_tokens == 0
    assert output.token_ids == alone(model, None, TEXT, params_of()).token_ids


@pytest.mark.parametrize("seed", range(4))
def test_random_traffic(model, drafter, seed):
    """Requests of one family come, run, are preempted, aborted and evicted; ids stay the same."""
    rng = random.Random(seed)
    engine = engine_of(model, drafter, num_blocks=rng.choice((14, 24)), max_batch_size=4)
    watcher = Watcher(engine)
    prompts, outputs, aborted = {}, {}, {}
    while len(prompts) < 24 or engine.has_unfinished:
        if len(prompts) < 24 and rng.random() < 0.6:
            prompt = TEXT[: rng.randrange(1, 14)] + [
                rng.randrange(3) for _ in range(rng.choice((0, 3, 6)))
            ]
            params = params_of(seed=rng.randrange(3), max_tokens=rng.randrange(1, 14))
            prompts[engine.add_request(prompt, params)] = (prompt, params)
        if prompts and rng.random() < 0.05:
            request_id = rng.choice(list(prompts))
            aborted[request_id] = engine.abort(request_id)
        outputs |= {e.request_id: e.output for e in engine.step() if e.output}
        watcher.look()
    expected = {name: alone(model, drafter, *pair).token_ids for name, pair in prompts.items()}
    for name, output in outputs.items():
        assert output.token_ids == expected[name]
    for name, output in aborted.items():
        if output is not None:
            assert output.token_ids == expected[name][: len(output.token_ids)]
    assert engine.stats.num_cached_prompt_tokens > 0
    assert_blocks_came_back(engine)


def test_the_cache_takes_all_memory_it_may(model):
    sizes = {"kv_cache_memory": 2**22, "max_batch_size": 1, "max_model_len": 64}
    per_block = SIZE * target_runner(engine_of(model)).paged_model.bytes_per_token()
    num_blocks = [
        blocks(engine_of(model, prefix_caching=on, **sizes)).num_blocks for on in (False, True)
    ]
    assert num_blocks == [64 // SIZE, 2**22 // per_block]
