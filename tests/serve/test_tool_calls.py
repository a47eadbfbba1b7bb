"""Replies of a tokenizer with a response template: tool calls and reasoning in OpenAI's form."""

import json

import openai
import pytest

from fastspec.models.chat import ReplyReader, chat_text, reply_message

from ..models import byte_tokenizer
from .helpers import converse, new_engine, serving

# As transformers documents them, in the format of the test's chat template.
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "[assistant]",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open": "<call>",
            "close": "</call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"content": "text"},
    },
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}]
CALL = '<call>{"name": "add", "arguments": {"a": "7"}}</call>'
PROMPT = "[user]hi[assistant]"


def calling_tokenizer():
    tokenizer = byte_tokenizer()
    tokenizer.response_template = RESPONSE_TEMPLATE
    return tokenizer


@pytest.mark.parametrize(
    ("prompt", "text", "message"),
    [
        (PROMPT, " a text ", {"content": " a text "}),
        (PROMPT, "", {"content": ""}),
        (PROMPT, "<think>so</think>\n\na", {"content": "a", "reasoning_content": "so"}),
        (f"{PROMPT}<think>\n", "so</think>a", {"content": "a", "reasoning_content": "so"}),
        (f"{PROMPT}<think>\n", "so", {"content": None, "reasoning_content": "so"}),
        (f"{PROMPT}<think></think>\n\n", "a", {"content": "a"}),
        (f"{PROMPT}begun", " and ended", {"content": " and ended"}),
        ("not of the template", "a", {"content": "a"}),
    ],
)
def test_texts_and_reasoning(prompt, text, message):
    assert reply_message(calling_tokenizer(), text, prompt) == message


def test_calls_in_openais_form():
    read = reply_message(calling_tokenizer(), f"so: {CALL}\n{CALL} done", PROMPT, TOOLS)
    assert read["content"].split() == ["so:", "done"]
    first, second = read["tool_calls"]
    assert first["id"] != second["id"]
    assert first["type"] == "function"
    assert first["function"] == {"name": "add", "arguments": '{"a": 7}'}  # as the schema says
    empty = '<call>{"name": "f"}</call>'
    (alone,) = reply_message(calling_tokenizer(), empty, PROMPT, TOOLS)["tool_calls"]
    assert alone["function"] == {"name": "f", "arguments": "{}"}


@pytest.mark.parametrize(
    "text",
    [
        CALL[:-9],
        "<call>" + "[" * 9999,
        "<call>[1]</call>",
        '<call>{"name": 1, "arguments": {}}</call>',
        '<call>{"name": "\\ud800", "arguments": {}}</call>',
        '<call>{"name": "f", "arguments": {"a": NaN}}</call>',
    ],
)
def test_what_cannot_be_read_stays_a_text(text):
    message = reply_message(calling_tokenizer(), f"a {text}", PROMPT, TOOLS)
    assert message == {"content": f"a {text}"}


@pytest.mark.parametrize("tools", [None, []])
def test_a_call_without_tools_is_text(tools):
    text = f"a {CALL} b"
    assert reply_message(calling_tokenizer(), text, PROMPT, tools) == {"content": text}
    reader = ReplyReader(calling_tokenizer(), PROMPT, tools)
    parts = [*map(reader.feed, text), reader.end()]
    assert "".join(part.get("content", "") for part in parts) == text
    assert not any(part.get("tool_calls") for part in parts)


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_without_tools_or_whose_choice_is_none_has_no_calls(client, stream):
    pytest.importorskip("llguidance")
    forced = {"guided_choice": [CALL]}
    for options in ({"tools": TOOLS, "tool_choice": "none"}, {}):
        answer = converse(client, max_tokens=99, stream=stream, extra_body=forced, **options)
        if stream:
            chunks = [*answer]
            assert streamed(chunks) == (CALL, "", [])
            assert chunks[-1].choices[0].finish_reason == "stop"
        else:
            (choice,) = answer.choices
            assert (choice.finish_reason, choice.message.content) == ("stop", CALL)
            assert choice.message.tool_calls is None


def test_reasoning_without_anything_after_it_leaves_an_empty_content():
    for text in ("<think></think>", "<think>"):
        assert reply_message(calling_tokenizer(), text, PROMPT) == {"content": ""}
        reader = ReplyReader(calling_tokenizer(), PROMPT)
        parts = [*map(reader.feed, text), reader.end()]
        assert not any(part.get("content") for part in parts)


@pytest.mark.parametrize(
    "field", [{"function_call": {"name": "f"}}, {"refusal": "no"}, {"audio": {"id": "x"}}]
)
def test_parts_of_answers_that_templates_do_not_read_are_refused(field):
    history = [{"role": "assistant", "content": None} | field, {"role": "user", "content": "hi"}]
    with pytest.raises(ValueError, match=f"^messages: {next(iter(field))} is not supported"):
        chat_text(calling_tokenizer(), history, chat_template="{{ messages }}")
    nothing = {"role": "assistant", "content": "a"} | dict.fromkeys(field)
    assert chat_text(calling_tokenizer(), [nothing], chat_template="{{ messages }}")


@pytest.fixture(scope="module")
def engine():
    engine = new_engine()
    engine.tokenizer.response_template = RESPONSE_TEMPLATE
    return engine


def written(client, text, **options):
    pytest.importorskip("llguidance")
    forced = {"guided_choice": [text]}
    return converse(client, tools=TOOLS, max_tokens=99, extra_body=forced, **options)


def test_a_chat_calls_tools(client):
    answer = written(client, f"<think>so</think>{CALL}", n=2)
    for choice in answer.choices:
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        assert choice.message.reasoning_content == "so"
        (call,) = choice.message.tool_calls
        assert json.loads(call.function.arguments) == {"a": 7}
    history = [answer.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "8"}]
    again = converse(client, [{"role": "user", "content": "hi"}, *history], tools=TOOLS)
    assert again.choices[0].message.tool_calls is None


def test_streams_of_several_answers_with_logprobs_and_stop_strings(client):
    options = {"n": 2, "stop": ["!"], "stream": True, "logprobs": True}
    chunks = [*written(client, f"a{CALL}b!c", **options)]
    for index in range(2):
        own = [each.choices[0] for each in chunks if each.choices[0].index == index]
        assert "".join(each.delta.content or "" for each in own) == "ab"
        assert sum(len(each.delta.tool_calls or ()) for each in own) == 1
        assert all(each.logprobs is not None for each in own)
        assert own[-1].finish_reason == "tool_calls"


def test_a_cut_call_is_text(client):
    (choice,) = converse(
        client, tools=TOOLS, max_tokens=9, extra_body={"guided_choice": [CALL]}
    ).choices
    assert (choice.finish_reason, choice.message.content) == ("length", CALL[:9])


def streamed(chunks):
    """The deltas of a stream put together."""
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert [delta.role for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    return (
        "".join(delta.content or "" for delta in deltas),
        "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas),
        [call for delta in deltas for call in delta.tool_calls or []],
    )


def test_a_stream_calls_tools(client):
    other = '<call>{"name": "f"}</call>'
    chunks = [*written(client, f"<think>so</think>a{CALL}{other}", stream=True)]
    content, reasoning, calls = streamed(chunks)
    assert (content, reasoning) == ("a", "so")
    assert [call.index for call in calls] == [0, 1]
    assert [call.function.name for call in calls] == ["add", "f"]
    assert [json.loads(call.function.arguments) for call in calls] == [{"a": 7}, {}]
    assert {call.type for call in calls} == {"function"}
    assert len({call.id for call in calls}) == 2
    assert [each.choices[0].finish_reason for each in chunks[-2:]] == [None, "tool_calls"]


@pytest.mark.parametrize("end", [5, 9, len(CALL) - 1])
def test_a_stream_of_a_cut_call_is_text(client, end):
    forced = {"guided_choice": [f"<think>so</think>{CALL}"]}
    num = len("<think>so</think>") + end
    options = {"tools": TOOLS, "max_tokens": num, "stream": True, "extra_body": forced}
    chunks = [*converse(client, **options)]
    assert streamed(chunks) == (CALL[:end], "so", [])
    assert chunks[-1].choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a",
        "<think>",
        "<think></think>",
        "<think>so",
        "a <b> c",
        "<call",
        "</call>",
        "<<",
        "<<x",
    ],
)
@pytest.mark.parametrize("size", [1, 3, 99])
def test_a_reader_returns_what_a_whole_reply_has(text, size):
    """In whatever pieces it is fed; only white space around a content is kept."""
    for reply in (text, f"{text}{CALL}", f"{CALL} {text}{CALL}b"):
        reader, parts = ReplyReader(calling_tokenizer(), PROMPT, TOOLS), []
        for place in range(0, len(reply), size):
            parts.append(reader.feed(reply[place : place + size]))
        parts.append(reader.end())
        whole = reply_message(calling_tokenizer(), reply, PROMPT, TOOLS)
        content = "".join(part.get("content", "") for part in parts)
        assert content.strip() == (whole["content"] or "").strip()
        reasoning = "".join(part.get("reasoning_content", "") for part in parts)
        assert reasoning.strip() == whole.get("reasoning_content", "")
        calls = [call["function"] for part in parts for call in part.get("tool_calls", ())]
        assert calls == [call["function"] for call in whole.get("tool_calls", ())]


@pytest.mark.parametrize(
    "text",
    [
        CALL[:-9],
        "<call>[1]</call>",
        "<<call>[1]</call>",
        "<<x<call>[1]</call>",
        '<call>{"name": 1, "arguments": {}}</call>',
        '<call>{"name": "f", "arguments": {"a": NaN}}</call>',
        '<call>{"name": "f", "arguments": {"a": "1<<x',
        '<call>[{"name": "f", "arguments": {}}, {"name": 1, "arguments": {}}]</call>',
    ],
)
@pytest.mark.parametrize("before", ["a ", "", "<", "<think>so</think>"])
def test_a_reader_goes_on_with_text_where_it_cannot_read(text, before):
    reader = ReplyReader(calling_tokenizer(), PROMPT, TOOLS)
    parts = [reader.feed(f"{CALL}{before}{text}"), reader.feed(" and on"), reader.end()]
    assert len(parts[0]["tool_calls"]) == 1
    content = "".join(part.get("content", "") for part in parts)
    assert content == before.removeprefix("<think>so</think>") + f"{text} and on"


def test_a_response_template_sees_special_tokens():
    engine = new_engine()
    engine.tokenizer.add_special_tokens({"additional_special_tokens": ["<call>"]})
    engine.tokenizer.response_template = RESPONSE_TEMPLATE
    options = {"max_tokens": 2, "logit_bias": {str(len(engine.tokenizer) - 1): 100}}
    with (
        serving(engine) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client,
    ):
        assert converse(client, **options).choices[0].message.content == "<call><call>"
        chunks = [*converse(client, stream=True, **options)]
    assert "".join(each.choices[0].delta.content for each in chunks) == "<call><call>"


def test_without_a_response_template_calls_are_text():
    engine = new_engine()
    with (
        serving(engine) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client,
    ):
        (choice,) = written(client, CALL).choices
    assert (choice.finish_reason, choice.message.content) == ("stop", CALL)
    assert choice.message.tool_calls is None
