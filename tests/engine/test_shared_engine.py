"""One engine, several consumers: threads, generate() beside stream() beside step(), interrupts,
forked processes."""

import gc
import os
import signal
import sys
import threading

import pytest
import torch
from transformers import GenerationConfig

from fastspec import Engine, EngineConfig, SamplingParams, SpecConfig
from fastspec.drafters.base import NoDrafter
from fastspec.engine import turn
from fastspec.engine.prompt_reader import PromptReader
from fastspec.engine.turn import Turn

from ..models import byte_tokenizer
from .probes import assert_blocks_came_back, before_passes, is_turn_of_caller

GREEDY = SamplingParams(temperature=0, max_tokens=12)
PROMPTS = [[3, 5, 7, 11 + i] for i in range(6)]
SPEC = SpecConfig(num_speculative_tokens=3)


@pytest.fixture
def engine(model, drafter):
    return Engine(model, drafter, tokenizer=byte_tokenizer(), spec=SPEC)


@pytest.fixture(scope="module")
def expected(model):
    return [output.token_ids for output in Engine(model).generate(PROMPTS, GREEDY)]


def assert_idle(engine):
    assert not engine.has_unfinished
    assert engine.step() == []
    assert_blocks_came_back(engine)


def steps(engine):
    """Ids and outputs of all requests that step() speaks of, to their end."""
    ids, outputs = {}, {}
    while engine.has_unfinished:
        for event in engine.step():
            ids.setdefault(event.request_id, []).extend(event.token_ids)
            if event.output is not None:
                outputs[event.request_id] = event.output
    assert {name: tuple(of_one) for name, of_one in ids.items()} == {
        name: output.token_ids for name, output in outputs.items()
    }
    return outputs


def test_no_prompt_is_read_beside_a_step(engine, monkeypatch):
    """Tokenizers are not made for two threads, and a step decodes with the same one."""
    seen = []
    for name in ("ids", "plain_ids"):
        usual = getattr(PromptReader, name)

        def read(self, *args, usual=usual, name=name):
            seen.append((name, is_turn_of_caller(engine)))
            return usual(self, *args)

        monkeypatch.setattr(PromptReader, name, read)

    def template(*args, **kwargs):
        seen.append(("chat", is_turn_of_caller(engine)))
        return [3, 5]

    monkeypatch.setattr("fastspec.engine.engine.chat_prompt_ids", template)
    config = GenerationConfig(max_new_tokens=2, eos_token_id=None)
    engine.generate("a b", generation_config=config)
    engine.chat([{"role": "user", "content": "a"}], GREEDY)
    engine.add_drafter("copies", SpecConfig("suffix", 3))
    engine.add_corpus("a b")
    assert {name for name, _ in seen} == {"ids", "chat", "plain_ids"}
    assert all(is_mine for _, is_mine in seen)


def test_threads_that_share_an_engine_get_their_own_outputs(engine, expected):
    results = {}

    def call(index):
        outputs = engine.generate([PROMPTS[index], PROMPTS[-1 - index]], GREEDY)
        results[index] = [output.token_ids for output in outputs]

    threads = [threading.Thread(target=call, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == {i: [expected[i], expected[-1 - i]] for i in range(4)}
    assert_idle(engine)


def test_a_thread_is_let_in_while_another_generates(engine):
    """abort() and add_request() of one thread do not wait for the generate() of another."""
    started, done = threading.Event(), []
    before_passes(engine, started.set)
    long = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
    thread = threading.Thread(target=lambda: done.append(engine.generate([PROMPTS[0]], long)))
    thread.start()
    assert started.wait(60)
    request_id = engine.add_request(PROMPTS[1], long)  # a short one may end before its abort
    assert not done
    assert engine.abort(request_id).finish_reason == "abort"
    thread.join(60)
    assert len(done[0][0].token_ids) == 400


def test_generate_stream_and_step_mix_at_will(engine, expected):
    added = [engine.add_request(prompt, GREEDY) for prompt in PROMPTS[:2]]
    stream = engine.stream(PROMPTS[2], GREEDY)
    streamed = [next(stream)]
    early = engine.step()
    (generated,) = engine.generate([PROMPTS[3]], GREEDY)
    ids = {name: [t for e in early if e.request_id == name for t in e.token_ids] for name in added}
    outputs = {}
    while engine.has_unfinished:
        for event in engine.step():
            ids[event.request_id] += event.token_ids
            if event.output:
                outputs[event.request_id] = event.output
    streamed += list(stream)
    assert generated.token_ids == expected[3]
    assert [outputs[name].token_ids for name in added] == expected[:2]
    assert [tuple(ids[name]) for name in added] == expected[:2]
    assert tuple(t for event in streamed for t in event.token_ids) == expected[2]
    assert streamed[-1].output.token_ids == expected[2]
    assert_idle(engine)


def test_a_stream_whose_steps_others_ran_ends(engine, expected):
    stream = engine.stream(PROMPTS[0], GREEDY)
    first = next(stream)
    while engine.has_unfinished:
        assert engine.step() == []
    events = [first, *stream]
    assert events[-1].output.token_ids == expected[0]
    assert_idle(engine)


def test_abort_ends_the_stream_that_waits(engine, expected):
    stream = engine.stream(PROMPTS[0], GREEDY)
    first = next(stream)
    output = engine.abort(first.request_id)
    events = [first, *stream]
    assert events[-1].output is output
    assert output.finish_reason == "abort"
    assert output.token_ids == expected[0][: len(output.token_ids)]
    assert "".join(event.text for event in events) == output.text
    assert_idle(engine)


def test_an_aborted_request_is_not_heard_of_again(engine):
    kept, gone = (engine.add_request(prompt, GREEDY) for prompt in PROMPTS[:2])
    stream = engine.stream(PROMPTS[2], GREEDY)
    next(stream)  # its step has events of both, which step() has not returned yet
    assert engine.abort(gone) is not None
    assert engine.abort(gone) is None
    stream.close()
    assert steps(engine).keys() == {kept}


@pytest.mark.parametrize("call", ["generate", "stream"])
def test_an_interrupt_leaves_nothing_running(engine, expected, call):
    calls = []

    def interrupt():
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt

    other = engine.add_request(PROMPTS[4], GREEDY)
    before_passes(engine, interrupt)
    with pytest.raises(KeyboardInterrupt):
        _ = (
            engine.generate(PROMPTS[:3], GREEDY)
            if call == "generate"
            else [*engine.stream(PROMPTS[0], GREEDY)]
        )
    outputs = steps(engine)
    assert {name: output.token_ids for name, output in outputs.items()} == {other: expected[4]}
    assert [o.token_ids for o in engine.generate(PROMPTS, GREEDY)] == expected
    assert_idle(engine)


def test_a_refused_prompt_starts_none_of_its_call(engine):
    with pytest.raises(ValueError, match="prompt"):
        engine.generate([PROMPTS[0], [999999]], GREEDY)
    assert_idle(engine)


def test_a_stream_dropped_during_a_step_is_aborted(engine):
    """The garbage collector may close a generator in the middle of a step of the same thread."""
    streams = [engine.stream(PROMPTS[0], GREEDY)]
    next(streams[0])

    def drop():
        streams.clear()
        gc.collect()

    before_passes(engine, drop)
    other = engine.add_request(PROMPTS[1], GREEDY)
    assert steps(engine).keys() == {other}
    assert_idle(engine)


def test_a_stream_dropped_as_a_turn_begins_or_ends_is_aborted(engine):
    """The garbage collector may close a generator between any two lines."""
    streams = [engine.stream(PROMPTS[0], GREEDY) for _ in range(30)]
    for stream in streams:
        next(stream)

    def drop(frame, event, _):
        if event == "line" and streams:
            del streams[-1]
        return drop

    def trace(frame, *_):
        return drop if frame.f_code.co_filename == turn.__file__ else None

    def call():
        sys.settrace(trace)
        while streams:
            engine.step()
        sys.settrace(None)

    del stream
    thread = threading.Thread(target=call, daemon=True)  # which might wait for itself
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    steps(engine)
    assert_idle(engine)


def test_a_part_of_a_step_cannot_call_the_engine(model, drafter):
    class Meddling(NoDrafter):
        name = "meddling"

        def propose(self, batch):
            engine.add_request([1], GREEDY)

    engine = Engine(model, Meddling())
    with pytest.raises(RuntimeError, match="within its own step"):
        engine.generate([PROMPTS[0]], GREEDY)
    assert_idle(engine)


def test_preempted_neighbours_of_threads_keep_their_text(model, drafter, expected):
    tight = EngineConfig(block_size=4, num_blocks=9)
    engine = Engine(model, drafter, spec=SPEC, config=tight)
    results = {}
    threads = [
        threading.Thread(
            target=lambda i=i: results.update({i: engine.generate([PROMPTS[i]], GREEDY)[0]})
        )
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [results[i].token_ids for i in range(4)] == expected[:4]
    assert_idle(engine)


def test_an_id_is_not_free_before_its_call_has_its_output(engine, expected):
    """Events of a second request of that name would go to the first one's call."""
    stream = engine.stream(PROMPTS[0], GREEDY)
    first = next(stream)
    while engine.has_unfinished:
        engine.step()
    with pytest.raises(ValueError, match="request_id"):
        engine.add_request(PROMPTS[1], GREEDY, first.request_id)
    assert [*stream][-1].output.token_ids == expected[0]
    engine.add_request(PROMPTS[1], GREEDY, first.request_id)
    assert steps(engine)[first.request_id].token_ids == expected[1]


def told_by_a_fork(call):
    """What a call returns in a forked process, or the error that it raises there, as text."""
    reader, writer = os.pipe()
    if not (process := os.fork()):
        signal.alarm(30)  # ends it if it waits for ever
        try:
            told = call()
        except BaseException as error:
            told = error
        os.write(writer, f"{told}".encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(process, 0)
    with open(reader) as pipe:
        return pipe.read()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of fork with threads, in Python 3.12
def test_a_forked_process_does_not_wait_for_threads_that_it_lacks(engine, expected):
    stream = engine.stream(PROMPTS[0], GREEDY)
    next(stream)

    def in_threads():
        torch.set_num_threads(2)
        engine.generate(PROMPTS, GREEDY)

    def in_one():
        torch.set_num_threads(1)
        stream.close()  # waits for its turn, so it ends with the next round
        return [output.token_ids for output in engine.generate(PROMPTS, GREEDY)]

    assert "engine: made before a fork, which torch's threads" in told_by_a_fork(in_threads)
    assert told_by_a_fork(in_one) == str(expected)
    assert [*stream][-1].output.token_ids == expected[0]
    assert_idle(engine)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_turn_that_another_thread_had_at_a_fork_is_refused():
    turn, is_held, may_end = Turn(), threading.Event(), threading.Event()

    def hold():
        with turn:
            is_held.set()
            may_end.wait()

    def take():
        torch.set_num_threads(1)
        with turn:
            return "taken"

    thread = threading.Thread(target=hold)
    thread.start()
    is_held.wait()
    told = told_by_a_fork(take)
    may_end.set()
    thread.join()
    assert told.startswith("engine: forked during a call of another thread")
    assert told_by_a_fork(take) == "taken"
