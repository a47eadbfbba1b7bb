"""`fastspec chat`, its input through a pipe."""

import re
from io import StringIO

import pytest
from rich.console import Console

from fastspec.cli.display import SourceWriter
from fastspec.engine.engine import Engine

LENGTH = ["--max-tokens", "12", "-k", "3"]


@pytest.fixture
def talk(invoke, chat_pair):
    """What the program prints for these lines."""

    def say(*lines, options=()):
        result = invoke("chat", *chat_pair, *LENGTH, *options, stdin="\n".join(lines) + "\n")
        assert result.exit_code == 0, result.stderr
        return result.stdout

    return say


def plain(text):
    """A run's text without the marks of who wrote it."""
    return re.sub(r"<(draft|recovered|bonus|target)>", "", text)


def answers(shown):
    """Texts by the way they were made; an end-of-sequence token has none."""
    found = re.findall(r"^\[(\w+)\]\n(.*?)\n\d+ tokens, ", shown, flags=re.M | re.S)
    return [(name, plain(text)) for name, text in found]


def test_answers_are_compared_with_the_target(talk):
    shown = talk("hello", "", "/quit", "never read")
    (first, text), (second, same) = answers(shown)
    assert (first, second) == ("speculative", "target")
    assert text == same
    assert re.search(r"acceptance rate \d\.\d\d, \d\.\d\d tokens per step", shown)
    assert re.search(r"speculative: \d+\.\d\dx the target's speed", shown)
    assert "<draft>" in shown
    assert len(answers(shown)) == 2


def test_what_a_model_writes_controls_no_terminal():
    stream = StringIO()
    SourceWriter(Console(file=stream)).write("a\x1b[2J\r\x9b1m\n", "target")
    assert stream.getvalue() == "<target>a\u241b[2J\u240d\ufffd1m\n"


def test_input_that_is_no_text(invoke, chat_pair):
    result = invoke("chat", *chat_pair, *LENGTH, stdin=b"caf\xe9\n")
    assert result.exit_code == 0, result.stderr
    assert "tokens/s" in result.stdout


def test_all_ways_to_answer(talk):
    shown = talk("/ngram", "/drafter", "/speculative", "/gamma 2", "hello hello hello")
    ways = dict(answers(shown))
    assert [*ways] == ["ngram", "drafter", "target"]
    assert "<draft>" in shown.partition("[drafter]")[2].partition("[target]")[0]
    assert ways["ngram"] == ways["target"]
    assert shown.count("x the target's speed") == 2


@pytest.mark.parametrize("options", [[], ["--max-n-spec-tokens", "5"]])
def test_a_gamma_that_is_refused_changes_nothing(talk, options):
    shown = talk(
        "/speculative", "/ngram", "/gamma 2000", "hello", "/gamma 3", "hi", options=options
    )
    told = "/gamma: expected at most --max-n-spec-tokens (5)" if options else "int from 1 to 1024"
    assert shown.count(told) == 1
    assert "3 draft tokens in each step" in shown
    assert [name for name, _ in answers(shown)] == ["ngram", "target"] * 2


def test_the_conversation_is_remembered_until_it_is_cleared(talk):
    shown = talk("/speculative", "one", "two", "/clear", "two", "/chat", "[user]two")
    one, then_two, two, raw = (text for _, text in answers(shown))
    assert one != then_two != two
    assert raw == two  # what the template would have made of it
    assert "the conversation is empty" in shown


def test_settings(talk):
    shown = talk("/length 3", "/processor nucleus 0.8 0.9", "/debug", "hello", "/cache", "/help")
    assert "at most 3 new tokens" in shown
    assert "tokens are chosen by nucleus 0.8 0.9" in shown
    assert "step 1: " in shown
    assert "/processor NAME" in shown
    assert "--prefix-caching" in shown
    assert {int(count) for count in re.findall(r"^(\d+) tokens, ", shown, flags=re.M)} <= {1, 2, 3}


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("/what", "unknown command /what"),
        ("/gamma", "/gamma: expected one number"),
        ("/gamma 0", "/gamma: expected a whole number"),
        ("/gamma many", "/gamma: expected a whole number"),
        ("/length 1 2", "/length: expected one number"),
        ("/target now", "/target: expected nothing after it"),
        ("/processor", "one of greedy"),
        ("/processor beam", "/processor: expected one of greedy"),
        ("/processor topk 1", "/processor: expected topk temperature top_k"),
        ("/processor multinomial hot", "temperature: expected a number"),
        ("/processor nucleus 1 7", "top_p: expected"),
        ("x" * 300, "prompt: has"),
    ],
)
def test_what_cannot_be_done_is_said_and_the_talk_goes_on(talk, line, told):
    shown = talk(line, "/debug")
    assert told in shown
    assert "debugging is on" in shown


def test_commands_that_need_what_is_not_there(invoke, model_folders):
    lines = "/chat\n/drafter\n/speculative\n/target\nhello\n"
    result = invoke("chat", "--target", model_folders["target"], *LENGTH, stdin=lines)
    for told in ("no chat template", "no draft model", "no drafter", "no way to answer"):
        assert told in result.stdout


def test_an_interrupt_after_the_last_token_loses_nothing(talk, monkeypatch):
    write, engines = SourceWriter.write, []
    step = Engine.step

    def noted(engine):
        engines.append(engine)
        return step(engine)

    def interrupted(self, text, source):
        write(self, text, source)
        if len(engines) < 1000 and not engines[-1].has_unfinished:
            engines.extend([engines[-1]] * 1000)  # once
            raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "step", noted)
    monkeypatch.setattr(SourceWriter, "write", interrupted)
    shown = talk("hello", "again")
    assert re.search(r"^[1-9]\d* tokens", shown, flags=re.M)
    assert len(answers(shown)) >= 3


def test_an_interrupt_stops_the_answer_and_not_the_program(talk, monkeypatch):
    step, calls = Engine.step, []

    def interrupted(engine):
        calls.append(engine)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return step(engine)

    monkeypatch.setattr(Engine, "step", interrupted)
    shown = talk("hello", "again")
    assert len(answers(shown)) == 3  # the first question was stopped before the target's turn
    assert re.search(r"^[1-9]\d* tokens, .*, stopped$", shown, flags=re.M)
    assert not calls[0].has_unfinished


def test_an_answer_that_fails_leaves_nothing_for_the_next(talk, monkeypatch):
    step, calls = Engine.step, []

    def failing(engine):
        calls.append(engine)
        if len(calls) == 2:
            raise ValueError("propose: no proposal")
        return step(engine)

    usual = answers(talk("again", options=["--seed", "7"]))
    monkeypatch.setattr(Engine, "step", failing)
    shown = talk("hello", "/clear", "again", options=["--seed", "7"])
    _, after = shown.split("propose: no proposal")
    assert answers(after) == usual
    assert not calls[0].has_unfinished
