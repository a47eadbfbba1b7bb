"""Replies of a tokenizer with a response template: tool calls and reasoning in OpenAI's form."""

import json

import openai
import pytest

from fastspec.models.chat import reply_message

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
    (alone,) = reply_message(calling_tokenizer(), '<call>{"name": "f"}</call>', PROMPT)[
        "tool_calls"
    ]
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
    assert reply_message(calling_tokenizer(), f"a {text}", PROMPT) == {"content": f"a {text}"}


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


def test_streams_and_cut_calls_are_text(client):
    (choice,) = converse(
        client, tools=TOOLS, max_tokens=9, extra_body={"guided_choice": [CALL]}
    ).choices
    assert (choice.finish_reason, choice.message.content) == ("length", CALL[:9])
    chunks = [*written(client, CALL, stream=True)]
    assert "".join(each.choices[0].delta.content for each in chunks) == CALL
    assert chunks[-1].choices[0].finish_reason == "stop"


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
    assert "".join(each.choices[0].delta.content for each in chunks) == ""


def test_without_a_response_template_calls_are_text():
    engine = new_engine()
    with (
        serving(engine) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client,
    ):
        (choice,) = written(client, CALL).choices
    assert (choice.finish_reason, choice.message.content) == ("stop", CALL)
    assert choice.message.tool_calls is None
