"""Ctrl-C at any place: no request hangs or says what was not written, and nothing leaks."""

import signal
from contextlib import suppress
from dataclasses import replace
from threading import Thread, current_thread, main_thread

import pytest

from fastspec import Engine, EngineConfig, SamplingParams
from fastspec.drafters import logit_rules
from fastspec.drafters.draft_model import DraftModelDrafter
from fastspec.engine.block_manager import BlockManager
from fastspec.engine.detokenizer import Detokenizer
from fastspec.engine.loop import Loop
from fastspec.engine.request import EngineRequest
from fastspec.engine.scheduler import Scheduler
from fastspec.engine.turn import Turn

from ..models import byte_tokenizer, perturbed
from .probes import assert_blocks_came_back

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = [[1, 2, 3], [4, 2, 3], [5, 2, 3]]
SMALL = EngineConfig(num_blocks=8, block_size=4, max_batch_size=4, max_model_len=32)


def interrupt_once(monkeypatch, kind, name, nth=1, after=False):
    """Let the nth call of a method or function end in Ctrl-C, before or after its work."""
    usual, calls = getattr(kind, name), [0]

    def interrupted(*args, **kwargs):
        if current_thread() is not main_thread():  # which signals never reach
            return usual(*args, **kwargs)
        calls[0] += 1
        if calls[0] == nth and not after:
            raise KeyboardInterrupt
        result = usual(*args, **kwargs)
        if calls[0] == nth:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(kind, name, interrupted)


def run_to_the_end(engine):
    """Step in spite of interrupts; return the outputs and the tokens of the events by request."""
    outputs, tokens, interrupts = {}, {}, 0
    for _ in range(300):
        if not engine.has_unfinished:
            return outputs, tokens, interrupts
        try:
            events = engine.step()
        except KeyboardInterrupt:
            interrupts += 1
            continue
        for event in events:
            tokens.setdefault(event.request_id, []).extend(event.token_ids)
            if event.output is not None:
                assert event.request_id not in outputs
                outputs[event.request_id] = event.output
    pytest.fail("requests that never end")


def check(engine, expected):
    request_ids = [engine.add_request(prompt, GREEDY) for prompt in PROMPTS]
    outputs, tokens, interrupts = run_to_the_end(engine)
    assert interrupts == 1
    assert sorted(outputs) == sorted(request_ids)
    for request_id, whole in zip(request_ids, expected, strict=True):
        output = outputs[request_id]
        length = len(output.token_ids)
        assert output.token_ids == whole.token_ids[:length]
        assert (output.error is None) == (output.finish_reason == "length")
        assert output.error is not None or length == 8
        assert abs(length - len(tokens.get(request_id, ()))) <= 1
    assert_blocks_came_back(engine)
    again = engine.generate(PROMPTS, GREEDY)
    assert [output.token_ids for output in again] == [output.token_ids for output in expected]


@pytest.mark.parametrize("has_draft", [False, True])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("nth", [1, 5, 22, 24])
def test_while_a_token_is_decoded(model, monkeypatch, nth, after, has_draft):
    draft = perturbed(model, 0.02) if has_draft else None
    engine = Engine(model, draft, byte_tokenizer())
    expected = engine.generate(PROMPTS, GREEDY)
    interrupt_once(monkeypatch, Detokenizer, "push", nth, after)
    check(engine, expected)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(
    ("kind", "name", "nth"),
    [
        (Scheduler, "_preempt", 1),
        (Scheduler, "remove", 2),
        (Scheduler, "admit", 1),
        (Scheduler, "schedule", 3),
        (BlockManager, "publish", 4),
        (BlockManager, "release", 1),
        (BlockManager, "_take", 4),
        (Detokenizer, "finish", 2),
        (Detokenizer, "take", 26),
    ],
)
def test_while_queues_and_blocks_change(model, monkeypatch, kind, name, nth, after):
    engine = Engine(model, None, byte_tokenizer(), config=SMALL)
    expected = engine.generate(PROMPTS, GREEDY)
    interrupt_once(monkeypatch, kind, name, nth, after)
    check(engine, expected)


@pytest.mark.parametrize("after", [False, True])
def test_while_a_preempted_request_is_released(model, monkeypatch, after):
    engine = Engine(model, perturbed(model, 0.02), byte_tokenizer(), config=SMALL)
    expected = engine.generate(PROMPTS, GREEDY)
    interrupt_once(monkeypatch, DraftModelDrafter, "release", after=after)
    check(engine, expected)


def test_while_penalised_tokens_are_counted(model, monkeypatch):
    """Of all places the one between two results that belong together."""
    params = replace(GREEDY, repetition_penalty=1.2, frequency_penalty=0.5)
    engine = Engine(model, None, byte_tokenizer())
    expected = engine.generate(PROMPTS, params)
    request_ids = [engine.add_request(prompt, params) for prompt in PROMPTS]
    interrupt_once(monkeypatch, logit_rules.np, "bincount", nth=8)
    outputs, _, interrupts = run_to_the_end(engine)
    assert interrupts == 1
    for request_id, whole in zip(request_ids, expected, strict=True):
        assert outputs[request_id].error is None
        assert outputs[request_id].token_ids == whole.token_ids


@pytest.mark.parametrize("after", [False, True])
def test_while_prompts_are_queued(model, monkeypatch, after):
    """Nobody would read the events of those that already are."""
    engine = Engine(model, None, byte_tokenizer())
    expected = engine.generate(PROMPTS, GREEDY)
    interrupt_once(monkeypatch, Loop, "add", nth=2, after=after)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS, GREEDY)
    assert not engine.has_unfinished
    engine.reset_prefix_cache()
    again = engine.generate(PROMPTS, GREEDY)
    assert [output.token_ids for output in again] == [output.token_ids for output in expected]


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(
    ("kind", "name", "reason"), [(Detokenizer, "finish", "error"), (Loop, "_remove", "abort")]
)
def test_while_a_waiting_request_is_aborted(model, monkeypatch, kind, name, reason, after):
    config = EngineConfig(max_batch_size=1)
    engine = Engine(model, None, byte_tokenizer(), config=config)
    first = engine.add_request(PROMPTS[0], GREEDY)
    second = engine.add_request(PROMPTS[1], GREEDY)
    engine.step()
    interrupt_once(monkeypatch, kind, name, after=after)
    with pytest.raises(KeyboardInterrupt):
        engine.abort(second)
    outputs, tokens, _ = run_to_the_end(engine)
    assert outputs[first].finish_reason == "length"
    assert not tokens[second]
    assert outputs[second].finish_reason == reason
    assert_blocks_came_back(engine)


def test_while_the_rest_of_an_interrupt_is_cleared_up(model, monkeypatch):
    engine = Engine(model, None, byte_tokenizer(), config=SMALL)
    request_ids = [engine.add_request(prompt, GREEDY) for prompt in PROMPTS]
    interrupt_once(monkeypatch, Scheduler, "schedule", nth=2)
    interrupt_once(monkeypatch, EngineRequest, "give_up_text", nth=2)
    outputs, _, interrupts = run_to_the_end(engine)
    assert interrupts == 2
    assert sorted(outputs) == sorted(request_ids)
    assert_blocks_came_back(engine)


def test_another_threads_requests_end(model, monkeypatch):
    """The interrupted thread's round may be the one that ends the other's requests."""
    engine = Engine(model, None, byte_tokenizer(), config=SMALL)
    ended = []
    other = Thread(target=lambda: ended.extend(engine.generate(PROMPTS, GREEDY)), daemon=True)
    interrupt_once(monkeypatch, Scheduler, "remove")
    other.start()
    with suppress(KeyboardInterrupt):
        engine.generate(PROMPTS, GREEDY)
    other.join(timeout=60)
    assert not other.is_alive()
    assert_blocks_came_back(engine)


def test_a_turn_is_given_back():
    """Under timers that interrupt at random places, every instruction of it among them."""
    turn, interrupts = Turn(), 0

    def interrupt(*_):
        raise KeyboardInterrupt

    usual = signal.signal(signal.SIGALRM, interrupt)
    try:
        for number in range(4000):
            try:
                signal.setitimer(signal.ITIMER_REAL, (1 + number % 40) * 1e-6)
                while True:
                    with turn:
                        sum(range(number % 30))
            except KeyboardInterrupt:
                interrupts += 1
            assert not turn.is_mine
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, usual)
    assert interrupts == 4000
