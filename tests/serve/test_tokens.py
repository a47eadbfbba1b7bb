"""vLLM's routes for tokens say what completions and chats read; the version."""

import httpx2
import pytest
from tokenizers.processors import TemplateProcessing

import fastspec

from ..models import random_model
from .helpers import MESSAGES, MODEL, PROMPT, new_engine, serving
from .test_border import COMPLETIONS, error_of

CHATS = "/v1/chat/completions"
FIRST = 256  # begins each text
TOOLS = [{"type": "function", "function": {"name": "add"}}]


def engine_with_first_token(**config):
    """As new_engine, with a tokenizer that adds a token of its own."""
    engine = new_engine(**config)
    first = TemplateProcessing(single="<|end|> $A", special_tokens=[("<|end|>", FIRST)])
    engine.tokenizer.backend_tokenizer.post_processor = first
    return engine


@pytest.fixture(scope="module")
def engine():
    return engine_with_first_token()


@pytest.fixture(scope="module")
def client(address):
    with httpx2.Client(base_url=address, timeout=30) as client:
        yield client


def tokenized(client, **body):
    answer = client.post("/tokenize", json=body)
    assert answer.status_code == 200, answer.text
    reply = answer.json()
    assert [*reply] == ["count", "max_model_len", "tokens", "token_strs"]
    assert reply["count"] == len(reply["tokens"])
    return reply


def detokenized(client, tokens):
    answer = client.post("/detokenize", json={"model": MODEL, "tokens": tokens})
    assert answer.status_code == 200, answer.text
    return answer.json()


def num_read(client, path, **body):
    """Tokens of a prompt, as the usage of its answer has them."""
    answer = client.post(path, json={**body, "max_tokens": 1})
    return answer.json()["usage"]["prompt_tokens"]


def test_a_text_has_the_tokens_that_a_completion_reads(client, engine):
    reply = tokenized(client, prompt=PROMPT)
    assert reply == tokenized(client, model=MODEL, prompt=PROMPT, add_special_tokens=True)
    assert reply["tokens"] == engine.tokenizer(PROMPT)["input_ids"]
    assert reply["max_model_len"] == engine.max_model_len
    assert reply["token_strs"] is None
    assert reply["count"] == num_read(client, COMPLETIONS, prompt=PROMPT) == len(PROMPT) + 1


def test_special_tokens_and_strings_of_tokens(client):
    ids = tokenized(client, prompt="a b")["tokens"]
    assert ids[0] == FIRST
    reply = tokenized(client, prompt="a b", return_token_strs=True)
    assert reply["token_strs"] == ["<|end|>", "a", "\u0120", "b"]
    plain = tokenized(client, prompt="a b", add_special_tokens=False, return_token_strs=True)
    assert (plain["tokens"], plain["token_strs"]) == (ids[1:], ["a", "\u0120", "b"])
    assert tokenized(client, prompt="", add_special_tokens=False)["tokens"] == []


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "[user]hi[assistant]"),
        ({"add_generation_prompt": False}, "[user]hi"),
        ({"continue_final_message": True}, "[user]hi"),
        ({"tools": TOOLS}, "(add)[user]hi[assistant]"),
        ({"chat_template_kwargs": {"unread": 1}, "tools": None}, "[user]hi[assistant]"),
    ],
)
def test_messages_have_the_tokens_that_a_chat_reads(client, fields, text):
    reply = tokenized(client, messages=MESSAGES, **fields)
    assert detokenized(client, reply["tokens"]) == {"prompt": text}
    assert reply["count"] == num_read(client, CHATS, messages=MESSAGES, **fields)
    more = tokenized(client, messages=MESSAGES, add_special_tokens=True, **fields)
    assert more["tokens"] == [FIRST, *reply["tokens"]]


def test_a_text_is_inserted_into_the_servers_template():
    engine = engine_with_first_token(prompt_template="Q: {input_text}")
    with serving(engine) as address, httpx2.Client(base_url=address) as client:
        reply = tokenized(client, prompt=PROMPT)
        assert detokenized(client, reply["tokens"][1:]) == {"prompt": f"Q: {PROMPT}"}
        assert reply["count"] == num_read(client, COMPLETIONS, prompt=PROMPT)
        chat = tokenized(client, messages=MESSAGES)
        assert detokenized(client, chat["tokens"]) == {"prompt": "[user]hi[assistant]"}


def test_a_prompt_may_be_longer_than_the_model_allows(client, engine):
    """So that a client learns by how much; no token has more characters than <|end|>."""
    length = 2 * engine.max_model_len
    assert tokenized(client, prompt="x" * length)["count"] == length + 1
    assert error_of(client.post(COMPLETIONS, json={"prompt": "x" * length}), 400)
    text = "x" * (7 * engine.max_model_len)
    for body in {"prompt": text}, {"messages": [{"role": "user", "content": text}]}:
        error = error_of(client.post("/tokenize", json=body), 400)
        assert "characters, more than fit in 511 tokens" in error["message"]
        assert [error["param"]] == [*body]


@pytest.mark.parametrize("text", ["", "import os\n", " \u00e9\U0001f600 <|end|>\n", "  a"])
def test_texts_come_back(client, text):
    ids = tokenized(client, prompt=text)["tokens"]
    assert detokenized(client, ids[1:]) == {"prompt": text}
    assert detokenized(client, ids) == {"prompt": f"<|end|>{text}"}


WRONG = [
    ({}, "prompt", "expected a string, or messages, got None"),
    ({"prompt": None}, "prompt", "expected a string"),
    ({"prompt": ["a", "b"]}, "prompt", "expected a string"),
    ({"prompt": [5, 6]}, "prompt", "expected a string"),
    ({"prompt": "a", "messages": MESSAGES}, "prompt", "not with messages"),
    ({"prompt": "a", "add_special_tokens": 1}, "add_special_tokens", "expected a bool, got 1"),
    ({"prompt": "a", "return_token_strs": "yes"}, "return_token_strs", "expected a bool"),
    ({"prompt": "a", "tools": TOOLS}, "tools", "only with messages"),
    ({"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt", "only with messages"),
    ({"prompt": "a", "chat_template_kwargs": {}}, "chat_template_kwargs", "only with messages"),
    ({"prompt": "a", "max_tokens": 1}, "max_tokens", "unknown field; known are add_generation_"),
    ({"messages": []}, "messages", "expected a non-empty list of messages"),
    ({"messages": [{"content": "x"}]}, "messages", "expected objects with a role"),
    ({"messages": [{"role": "broken", "content": "x"}]}, "messages", "the chat template failed"),
    ({"messages": MESSAGES, "tools": "all"}, "tools", "expected a list of objects"),
    ({"messages": MESSAGES, "add_generation_prompt": 0}, "add_generation_prompt", "expected a b"),
    (
        {"messages": MESSAGES, "add_generation_prompt": True, "continue_final_message": True},
        "continue_final_message",
        "not with add_generation_prompt",
    ),
    (
        {"messages": MESSAGES, "chat_template_kwargs": {"chat_template": "x"}},
        "chat_template_kwargs",
        "chat_template cannot be set by requests",
    ),
    ({"messages": MESSAGES, "chat_template": "x"}, "chat_template", "unknown field"),
]


@pytest.mark.parametrize(("body", "param", "told"), WRONG)
def test_what_cannot_be_tokenized_is_refused_by_name(client, body, param, told):
    error = error_of(client.post("/tokenize", json=body), 400)
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert f"{param}: {told}" in error["message"]


@pytest.mark.parametrize(
    ("body", "param", "told"),
    [
        ({}, "tokens", "expected a list of token ids, got None"),
        ({"tokens": "abc"}, "tokens", "expected a list of token ids, got 'abc'"),
        ({"tokens": 5}, "tokens", "expected a list of token ids"),
        ({"tokens": [5, 6.0]}, "tokens", "expected a list of token ids"),
        ({"tokens": [True]}, "tokens", "expected a list of token ids"),
        ({"tokens": [[5]]}, "tokens", "expected a list of token ids"),
        ({"tokens": [5, -1]}, "tokens", "token id -1 is not in 0.."),
        ({"tokens": [5, 10**30]}, "tokens", f"token id {10**30} is not in 0.."),
        ({"tokens": [5], "skip_special_tokens": True}, "skip_special_tokens", "unknown field"),
    ],
)
def test_what_cannot_be_detokenized_is_refused_by_name(client, body, param, told):
    error = error_of(client.post("/detokenize", json=body), 400)
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert f"{param}: {told}" in error["message"]


@pytest.mark.parametrize(
    ("path", "body"), [("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [5]})]
)
def test_another_model_is_not_found(client, path, body):
    error = error_of(client.post(path, json=body | {"model": "gpt-4"}), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert client.get(path).status_code == 405


def test_an_engine_without_a_tokenizer_has_neither_texts_nor_messages():
    engine = fastspec.Engine(random_model("llama", num_hidden_layers=1))
    with serving(engine) as address, httpx2.Client(base_url=address) as client:
        for path, body in (
            ("/tokenize", {"prompt": "a"}),
            ("/tokenize", {"messages": MESSAGES}),
            ("/detokenize", {"tokens": [5]}),
        ):
            error = error_of(client.post(path, json=body), 400)
            assert error["param"] in body
            assert "tokenizer" in error["message"]


def test_the_version(client):
    answer = client.get("/version")
    assert (answer.status_code, answer.json()) == (200, {"version": fastspec.__version__})
    assert error_of(client.post("/version", json={}), 405)


def test_keys_are_needed(monkeypatch):
    monkeypatch.setenv("SOME_KEYS", "one")
    with (
        serving(new_engine(), api_keys_variable="SOME_KEYS") as address,
        httpx2.Client(base_url=address) as client,
    ):
        for key, status in (("two", 401), ("one", 200)):
            headers = {"authorization": f"Bearer {key}"}
            ids = client.post("/tokenize", json={"prompt": "a"}, headers=headers)
            text = client.post("/detokenize", json={"tokens": [5]}, headers=headers)
            version = client.get("/version", headers=headers)
            assert [each.status_code for each in (ids, text, version)] == [status] * 3
