"""Requests that are odd but legal, as libraries write them for OpenAI's or vLLM's servers."""

import openai
import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from .helpers import (
    MESSAGES,
    MODEL,
    PROMPT,
    complete,
    converse,
    generated,
    new_engine,
    serving,
)


def test_a_prompt_that_is_too_long_has_openais_code(client):
    """By which agents know that they must shorten a conversation."""
    for ask in (
        lambda: complete(client, [5] * 600),
        lambda: complete(client, ["a", "x" * 600]),
        lambda: converse(client, [{"role": "user", "content": "x" * 600}]),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            ask()
        assert caught.value.code == "context_length_exceeded"


PARTS = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
BEGUN = [*MESSAGES, {"role": "assistant", "content": "so "}]
LAST = {"role": "user", "content": "hi"}


def test_any_field_may_be_null(client):
    """Also those of OpenAI's that this server does not have."""
    for path, kind, own, plain in (
        ("/completions", completion_create_params, {"prompt": PROMPT}, complete),
        ("/chat/completions", chat_create_params, {"messages": MESSAGES}, converse),
    ):
        fields = kind.CompletionCreateParamsBase.__annotations__ | {
            "stream": bool,
            "guided_json": str,
        }
        asked = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
        body = dict.fromkeys(fields) | own | asked | {"model": MODEL}
        answer = client.post(path, body=body, cast_to=object)
        whole = plain(client).model_dump(exclude_unset=True)
        assert [answer["choices"], answer["usage"]] == [whole["choices"], whole["usage"]]


@pytest.mark.parametrize(
    "fields",
    [
        {"stop": []},
        {"stop": None},
        {"logit_bias": {}},
        {"modalities": ["text"]},
        {"logprobs": False, "top_logprobs": 0},
        {"prompt_cache_retention": "24h"},
        {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True},
        {"response_format": {"type": "text"}},
        {"speculation": {"method": None, "drafter": None, "num_speculative_tokens": None}},
        {"messages": [{"role": "user", "content": PARTS, "name": None}]},
        {"continue_final_message": False, "add_generation_prompt": True},
    ],
)
def test_what_asks_for_nothing(client, fields):
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 24, "ignore_eos": True, **fields}
    answer = client.post("/chat/completions", body=body, cast_to=object)
    assert answer["choices"][0]["message"]["content"] == converse(client).choices[0].message.content


def test_streams_are_not_padded(client):
    options = {"include_usage": False, "include_obfuscation": False}
    chunks = [*converse(client, stream=True, stream_options=options)]
    assert len(chunks) == 24
    with pytest.raises(openai.BadRequestError, match="include_obfuscation: chunks are") as caught:
        converse(client, stream=True, stream_options={"include_obfuscation": True})
    assert caught.value.param == "stream_options"


@pytest.mark.parametrize(
    ("messages", "fields", "prompt"),
    [
        ([{"role": "developer", "content": "be"}, LAST], {}, "[developer]be[user]hi[assistant]"),
        ([{"role": "system", "content": ""}, LAST], {}, "[system][user]hi[assistant]"),
        (BEGUN, {}, "[user]hi[assistant]so [assistant]"),
        (BEGUN, {"add_generation_prompt": False}, "[user]hi[assistant]so "),
        (BEGUN, {"continue_final_message": True}, "[user]hi[assistant]so "),
        (
            BEGUN,
            {"continue_final_message": True, "add_generation_prompt": False},
            "[user]hi[assistant]so ",
        ),
    ],
)
def test_roles_and_messages_that_are_continued(client, engine, messages, fields, prompt):
    answer = converse(client, messages, extra_body={"ignore_eos": True, **fields})
    assert answer.choices[0].message.content == generated(engine, prompt).text


def test_a_template_may_end_messages():
    """The text after a message is left out where the message is continued."""
    engine = new_engine()
    engine.tokenizer.chat_template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    with (
        serving(engine) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client,
    ):
        continued = {"continue_final_message": True, "ignore_eos": True}
        answer = converse(client, BEGUN, extra_body=continued)
        assert answer.choices[0].message.content == generated(engine, "[hi][so ").text
        for content in (None, ""):
            empty = [*MESSAGES, {"role": "assistant", "content": content}]
            with pytest.raises(openai.BadRequestError, match="the last message has no content"):
                converse(client, empty, extra_body=continued)


@pytest.mark.parametrize(
    "fields",
    [
        {"modalities": ["text", "audio"]},
        {"modalities": []},
        {"top_logprobs": False},
        {"top_logprobs": 1},
        {"continue_final_message": True, "add_generation_prompt": True},
        {"continue_final_message": 1},
        {"chat_template_kwargs": {"continue_final_message": True}},
    ],
)
def test_what_would_be_ignored_is_refused(client, fields):
    with pytest.raises(openai.BadRequestError) as caught:
        client.post("/chat/completions", body={"messages": MESSAGES, **fields}, cast_to=object)
    assert caught.value.param == next(iter(fields))
