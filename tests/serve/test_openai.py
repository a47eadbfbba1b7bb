"""The real OpenAI client drives the server: what it gets is what the engine says."""

import json
from types import SimpleNamespace

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from fastspec import Engine, SpecConfig
from fastspec.engine.outputs import RequestOutput, StreamEvent
from fastspec.engine.request import EngineRequest
from fastspec.serve.metrics import HISTOGRAMS, RequestTimes
from fastspec.serve.replies import token_text

from ..models import byte_tokenizer, random_model
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


def test_greedy_completions_are_those_of_the_engine(client, engine):
    answer = complete(client)
    expected = generated(engine)
    assert answer.choices[0].text == expected.text
    assert answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(PROMPT), 24)
    assert answer.usage.total_tokens == len(PROMPT) + 24


def test_prompts_as_ids_and_several_at_once(client, engine):
    prompts = [[3, 5, 7], [11, 13]]
    answer = complete(client, prompts, n=2)
    expected = [generated(engine, prompt).text for prompt in prompts for _ in range(2)]
    assert [choice.text for choice in answer.choices] == expected
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage.prompt_tokens == 5


def test_a_chat_is_wrapped_in_the_template(client, engine):
    tools = [{"type": "function", "function": {"name": "add"}}]
    parts = [
        {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}
    ]
    call = {"function": {"name": "add", "arguments": '{"a": 1}'}}
    history = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call]}]
    for options, prompt in (
        ({}, "[user]hi[assistant]"),
        ({"messages": history}, "[user]hi[assistant]None{'a': 1}[assistant]"),
        ({"messages": parts, "tools": tools}, "(add)[user]hi[assistant]"),
        ({"tools": tools, "tool_choice": "none"}, "[user]hi[assistant]"),
    ):
        message = converse(client, **options).choices[0].message
        assert (message.role, message.content) == ("assistant", generated(engine, prompt).text)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 5, "n": 2}])
def test_streams_have_the_same_text_in_one_chunk_a_token(client, sampling):
    whole = complete(client, **sampling)
    streamed = [*complete(client, stream=True, stream_options={"include_usage": True}, **sampling)]
    assert streamed[-1].usage == whole.usage
    for choice in whole.choices:
        mine = [c.choices[0] for c in streamed[:-1] if c.choices[0].index == choice.index]
        assert "".join(each.text for each in mine) == choice.text
        assert len(mine) == 24
        assert [each.finish_reason for each in mine] == [None] * 23 + ["length"]
    whole = converse(client, **sampling)
    texts = dict.fromkeys(range(sampling.get("n", 1)), "")
    for chunk in converse(client, stream=True, **sampling):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content
    assert [*texts.values()] == [choice.message.content for choice in whole.choices]


@pytest.mark.parametrize("kind", [complete, converse])
def test_running_usage(client, kind):
    """As guidellm and vLLM's benchmark client ask for it."""
    both = {"include_usage": True, "continuous_usage_stats": True}
    whole = kind(client, n=2).usage
    *chunks, last = kind(client, n=2, stream=True, stream_options=both)
    assert last.usage == whole
    for index in (0, 1):
        mine = [each.usage for each in chunks if each.choices[0].index == index]
        assert [usage.completion_tokens for usage in mine] == [*range(1, 25)]
        assert {usage.total_tokens - usage.completion_tokens for usage in mine} == {
            whole.prompt_tokens
        }
    alone = [*kind(client, stream=True, stream_options={"include_usage": True})]
    assert [each.usage is None for each in alone] == [True] * 24 + [False]
    assert all("usage" in each.model_fields_set for each in alone)  # as null, for other clients
    assert not any("usage" in each.model_fields_set for each in kind(client, stream=True))


def test_fields_that_ask_for_nothing(client):
    fields = {"store": False, "metadata": {"a": "b"}, "user": "u", "safety_identifier": "s"}
    fields |= {"prompt_cache_key": "k", "response_format": {"type": "text", "json_schema": None}}
    for tier in ("auto", "default"):
        asked = {"extra_body": {"ignore_eos": True, **fields, "service_tier": tier}}
        assert complete(client, **asked).choices == complete(client).choices
        given = {**fields, "service_tier": tier, "tools": [], "parallel_tool_calls": False}
        assert converse(client, **given).choices == converse(client).choices


def test_seeds(client):
    texts = [complete(client, temperature=1.0, seed=seed, n=2).choices for seed in (0, 0, 1)]
    first, again, other = ([choice.text for choice in choices] for choices in texts)
    assert first == again != other
    assert first[0] != first[1]


def test_a_stop_string_ends_the_text_before_it(client, engine):
    text = generated(engine).text
    stop = text[6:8]
    answer = complete(client, stop=[stop])
    assert answer.choices[0].text == text[: text.index(stop)]
    (choice,) = answer.choices
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
    *first, last = complete(client, stop=[stop], stream=True)
    assert "".join(c.choices[0].text for c in [*first, last]) == answer.choices[0].text
    assert {each.choices[0].stop_reason for each in first} == {None}
    assert last.choices[0].stop_reason == stop


def test_tokens_of_a_stop_string_are_there_though_its_text_is_not(client, engine):
    stop = generated(engine).text[6:8]
    sources = {"ignore_eos": True, "speculation": {"sources": True}}
    answer = complete(client, stop=[stop], logprobs=0, extra_body=sources)
    (choice,) = answer.choices
    num_tokens = answer.usage.completion_tokens
    assert len(choice.token_ids) == len(choice.logprobs.tokens) == num_tokens
    assert engine.tokenizer.decode(choice.token_ids).startswith(choice.text + stop)


@pytest.mark.parametrize(
    "form",
    [
        {"response_format": {"type": "json_object"}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {
                    "name": "n",
                    "description": "d",
                    "schema": {"type": "object"},
                    "strict": False,
                },
            }
        },
    ],
)
def test_response_formats(client, form):
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    schema["additionalProperties"] = False
    if "json_schema" in form["response_format"]:
        form["response_format"]["json_schema"]["schema"] = schema
    answer = converse(client, max_tokens=60, extra_body={}, temperature=1.0, seed=1, **form)
    text = answer.choices[0].message.content
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(text), dict)
    else:
        assert text.startswith("{")
    guided = complete(client, extra_body={"guided_choice": ["yes", "no"]})
    assert guided.choices[0].text in ("yes", "no")


def test_speculation_is_chosen_by_request_and_reported(client, engine):
    text = generated(engine).text
    for method, most in (("none", 0), ("draft_model", 4), ("prompt_lookup", 6)):
        speculation = {"method": method, "metrics": True, "sources": True}
        answer = complete(client, extra_body={"ignore_eos": True, "speculation": speculation})
        choice, metrics = answer.choices[0], answer.metrics["speculative_decoding"]
        assert choice.text == text
        assert metrics["num_spec_tokens"] == most
        assert len(choice.sources) == len(choice.token_ids) == 24
        assert {*choice.drafters} <= {None, method}
        drafts = choice.sources.count("draft")
        assert metrics["num_accepted_draft_tokens"] == drafts
        assert (metrics["num_spec_steps"] > 0) == (most > 0)
        assert sum(metrics["acceptance_histogram"]) == metrics["num_spec_steps"]
        if drafts:
            mean = 1 + drafts / metrics["num_spec_steps"]
            assert metrics["mean_acceptance_length"] == pytest.approx(mean)
    off = {"ignore_eos": True, "speculation": {"num_speculative_tokens": 0, "sources": True}}
    assert {*complete(client, extra_body=off).choices[0].sources} == {"target"}
    streamed = [*complete(client, stream=True, extra_body={**off, "speculation": speculation})]
    assert [c.choices[0].sources[0] for c in streamed[:-1]] == choice.sources
    assert streamed[-1].metrics == answer.metrics


def test_predicted_outputs(client, engine):
    """In OpenAI's form, as a text and as parts; as ids, which say the tokens exactly."""
    lookup = {"ignore_eos": True, "speculation": {"method": "prompt_lookup", "metrics": True}}
    plain = converse(client, extra_body=lookup)
    text = plain.choices[0].message.content
    parts = [{"type": "text", "text": text[:5]}, {"type": "text", "text": text[5:]}]
    for content in text, parts:
        prediction = {"type": "content", "content": content}
        answer = converse(client, prediction=prediction, extra_body=lookup)
        assert answer.choices[0].message.content == text
    ids = generated(engine).token_ids
    answer = complete(client, extra_body={**lookup, "prediction": ids})
    assert answer.choices[0].text == generated(engine).text
    metrics = answer.metrics["speculative_decoding"]
    assert metrics["num_spec_steps"] <= 5
    details = answer.usage.completion_tokens_details
    assert details.accepted_prediction_tokens == metrics["num_accepted_draft_tokens"] > 16
    rejected = metrics["num_draft_tokens"] - metrics["num_accepted_draft_tokens"]
    assert details.rejected_prediction_tokens == rejected
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *_, last = complete(client, extra_body={**lookup, "prediction": ids}, **options)
    assert last.usage == answer.usage
    assert plain.usage.completion_tokens_details is None


def test_copies_are_not_counted_where_a_draft_model_drafts_too():
    model = random_model("llama", num_hidden_layers=1)
    engine = Engine(model, model, byte_tokenizer(), SpecConfig(suffix_tokens=4))
    with (
        serving(engine) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client,
    ):
        answer = complete(client, extra_body={"prediction": [5, 6], "ignore_eos": True})
    assert answer.usage.completion_tokens_details is None


def test_models(client):
    (card,) = client.models.list().data
    assert card.id == MODEL == client.models.retrieve(MODEL).id
    assert card.speculation["methods"] == {"none": 0, "draft_model": 4, "prompt_lookup": 6}
    with pytest.raises(openai.NotFoundError, match="gpt"):
        client.models.retrieve("gpt-4")


def test_metrics_parse_and_count(client, address):
    import httpx2

    def read():
        text = httpx2.get(f"{address}/metrics").text
        samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
        return {(s.name, s.labels.get("finished_reason")): s.value for s in samples}

    before = read()
    complete(client)
    after = read()
    assert after["fastspec:generation_tokens_total", None] == (
        before["fastspec:generation_tokens_total", None] + 24
    )
    ended = "fastspec:request_success_total", "length"
    assert after[ended] == before[ended] + 1
    assert after["fastspec:time_to_first_token_seconds_count", None] > 0
    for name in ("inter_token_latency", "request_time_per_output_token", "e2e_request_latency"):
        name = f"fastspec:{name}_seconds"
        counts, sums = (
            [each[f"{name}_{part}", None] for each in (before, after)] for part in PARTS
        )
        seen = counts[1] - counts[0]
        assert 1 < seen < 24 if "inter" in name else seen == 1
        assert sums[1] > sums[0]
    assert after["fastspec:num_requests_running", None] == 0


PARTS = "count", "sum"


def test_times_of_texts():
    """Two texts of one request, whose steps bring one token or two."""
    histograms = {name: [] for name in HISTOGRAMS}
    noted = {name: SimpleNamespace(observe=seen.append) for name, seen in histograms.items()}
    times = RequestTimes(noted, 1.0)
    times.note(1.5, [])
    times.note(2.0, [event(0), event(0), event(1)])
    times.note(4.0, [event(0), event(0)])
    times.note(5.0, [event(0), event(0, ended=5), event(1), event(1, ended=2)])
    times.end(6.0)
    assert {name.removesuffix("_seconds"): sorted(seen) for name, seen in histograms.items()} == {
        "time_to_first_token": [1.0],
        "inter_token_latency": [1.0, 2.0, 3.0],
        "request_time_per_output_token": [0.75, 3.0],
        "e2e_request_latency": [5.0],
    }


def event(index, ended=0):
    output = RequestOutput("r", token_ids=(7,) * ended, index=index) if ended else None
    return StreamEvent("r", "", () if ended else (7,), output=output, index=index)


def schema_format(schema, **more):
    return {"type": "json_schema", "json_schema": {"schema": schema, **more}}


DEAD_END = {"allowed_token_ids": [65], "bad_words": [[65, 65]]}
BAD = [
    ({"temperature": -1}, "temperature"),
    ({"max_tokens": 10**6}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"n": 100}, "n"),
    ({"n": "two"}, "n"),
    ({"prompt": [PROMPT] * 100}, "prompt"),
    ({"n": 3, "prompt": [PROMPT] * 100}, "n"),
    ({"logprobs": True}, "logprobs"),
    ({"stop": ["x"] * 100}, "stop"),
    ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 1, "05": 1}}, "logit_bias"),
    ({"prompt": "x" * 600}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [10**9]}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"echo": True, "stream": True}, "echo"),
    ({"echo": 0}, "echo"),
    ({"prediction": "x"}, "prediction"),  # the engine's drafter does not copy
    ({"prediction": {"type": "text", "content": "x"}}, "prediction"),
    ({"prediction": {"type": "content", "content": [{"type": "image"}]}}, "prediction"),
    ({"prediction": {"type": "content", "text": "x"}}, "prediction"),
    ({"best_of": True}, "best_of"),
    ({"beams": 3}, "beams"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream_options": {"usage": True}, "stream": True}, "stream_options"),
    ({"stream_options": {"continuous_usage_stats": 1}, "stream": True}, "stream_options"),
    ({"store": True}, "store"),
    ({"store": 0}, "store"),
    ({"store": True, "metadata": {}}, "store"),
    ({"metadata": "x"}, "metadata"),
    ({"service_tier": "priority"}, "service_tier"),
    ({"service_tier": ["auto"]}, "service_tier"),
    ({"parallel_tool_calls": True}, "parallel_tool_calls"),
    ({"speculation": {"method": "magic"}}, "speculation"),
    ({"speculation": {"num_speculative_tokens": 99}}, "speculation"),
    ({"speculation": {"k": 1}}, "speculation"),
    ({"speculation": {"metrics": 1}}, "speculation"),
    ({"guided_regex": "["}, "guided_regex"),
    ({"guided_regex": "[", "response_format": {"type": "text"}}, "guided_regex"),
    ({"structured_outputs": {"regex": "["}}, "structured_outputs"),
    ({"response_format": schema_format({"type": "nothing"})}, "response_format"),
    ({"top-p": 1}, "top-p"),
    ({"messages": MESSAGES}, "messages"),
    (
        {"allowed_token_ids": [7], "stop_token_ids": [7], "min_tokens": 2, "max_tokens": 4},
        "allowed_token_ids",
    ),
    ({"guided_regex": "ab", "allowed_token_ids": [5]}, "guided_regex"),
    ({"guided_choice": ["a"], "bad_words": ["a"]}, "guided_choice"),
    # Only known once there are some tokens.
    (DEAD_END, "allowed_token_ids"),
    ({"guided_regex": "(?:a{1000}){1000}"}, "guided_regex"),
    ({"guided_regex": "ab", "allowed_token_ids": [64]}, "guided_regex"),
]


@pytest.mark.parametrize(("fields", "param"), BAD)
def test_what_cannot_be_served_is_refused_by_name(client, fields, param):
    with pytest.raises(openai.BadRequestError) as caught:
        client.post("/completions", body={"prompt": PROMPT, **fields}, cast_to=object)
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        ("/chat/completions", {"prompt": PROMPT}, "prompt: use messages, or /v1/completions"),
        ("/completions", {"messages": MESSAGES}, "messages: use prompt, or /v1/chat/completions"),
        ("/completions", {"prompt": [PROMPT, ""]}, r"prompt: is empty \(prompt\[1\]\)"),
        ("/completions", {"prompt": [PROMPT, "x" * 600]}, r"prompt: has .* \(prompt\[1\]\)"),
        ("/completions", {"prompt": PROMPT, "n": 100}, "n: expected at most .* for 1 prompt,"),
    ],
)
def test_refusals_say_what_to_send(client, path, fields, message):
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        client.post(path, body=fields, cast_to=object)
    assert caught.value.param == message.partition(":")[0]


@pytest.mark.parametrize(
    ("form", "place"),
    [
        ({"type": "json_object", "schema": {"type": "object"}}, "schema: unknown field"),
        ({"type": "json_object", "json_schema": {}}, "json_schema: not with type json_object"),
        ({"type": "text", "json_schema": {"schema": {}}}, "json_schema: not with type text"),
        (schema_format({}) | {"strict": True}, "strict: unknown field"),
        (schema_format({}, strictly=True), "json_schema.strictly: unknown field"),
        (schema_format({}, strict="yes"), "json_schema.strict: expected a bool"),
        (schema_format({}, name=3), "json_schema.name: expected a str"),
    ],
)
def test_no_part_of_a_response_format_is_passed_over(client, form, place):
    with pytest.raises(openai.BadRequestError, match=rf"response_format\.{place}") as caught:
        complete(client, extra_body={"response_format": form})
    assert caught.value.param == "response_format"


@pytest.mark.parametrize("logprobs", [-1, 21])
def test_log_probabilities_have_one_range(client, logprobs):
    with pytest.raises(openai.BadRequestError, match="logprobs: expected 0 to 20"):
        complete(client, logprobs=logprobs)


def test_options_that_contradict_each_other_end_a_stream_as_the_clients_error(client):
    with pytest.raises(openai.APIError, match="no token is left") as caught:
        for _ in complete(client, stream=True, extra_body=DEAD_END):
            pass
    assert (caught.value.param, caught.value.type) == ("allowed_token_ids", "invalid_request_error")


def test_a_failure_of_the_model_is_the_servers_however_it_is_worded(client, monkeypatch):
    usual = EngineRequest.output

    def output(self, *_):
        return usual(self, "error", "seed: a text that begins with a parameter's name")

    monkeypatch.setattr(EngineRequest, "output", output)
    with pytest.raises(openai.InternalServerError):
        complete(client)


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": []},
        {"messages": [{"content": "x"}]},
        {"messages": [{"role": "user", "content": 5}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "text": "x"}]}]},
        {"messages": [{"role": "user", "content": [{"text": "x", "image_url": "i"}]}]},
        {"messages": [{"role": "broken", "content": "x"}]},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "assistant", "tool_calls": "all"}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}]},
        {
            "messages": [
                {"role": "assistant", "tool_calls": [{"function": {"arguments": "[" * 9999}}]}
            ]
        },
        {"messages": [{"role": "user", "content": "x" * 600}]},
        {"messages": MESSAGES, "top_logprobs": 2},
        {"messages": MESSAGES, "tools": "all"},
        {"messages": MESSAGES, "tool_choice": "required"},
        {"messages": MESSAGES, "parallel_tool_calls": "yes"},
        {"messages": MESSAGES, "max_tokens": 3, "max_completion_tokens": 3},
        {"messages": MESSAGES, "chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
        {"messages": MESSAGES, "chat_template_kwargs": {"tokenize": True}},
        {"messages": MESSAGES, "chat_template_kwargs": {"tools": [{}]}},
        {"messages": MESSAGES, "chat_template_kwargs": {"add_generation_prompt": False}},
        {"messages": MESSAGES, "chat_template_kwargs": {"max_length": 3}},
        {"messages": MESSAGES, "logprobs": True, "top_logprobs": -1},
        {"messages": MESSAGES, "chat_template": "x"},
    ],
)
def test_chats_that_cannot_be_served(client, fields):
    with pytest.raises(openai.BadRequestError) as caught:
        client.post("/chat/completions", body=fields, cast_to=object)
    assert caught.value.param in fields


def test_a_chat_without_a_number_of_tokens_takes_what_the_cache_holds():
    engine = new_engine(num_blocks=3, block_size=16)
    ask = {"model": MODEL, "messages": MESSAGES, "extra_body": {"ignore_eos": True}}
    with (
        serving(engine) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client,
    ):
        usage = client.chat.completions.create(**ask).usage
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(**ask, max_tokens=48)
    assert usage.total_tokens == engine.num_cache_tokens == 48
    assert "num_blocks" in str(caught.value)
    assert caught.value.param is None  # nor the prompt or max_tokens, which need room together


def test_another_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="gpt-4", prompt="x")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    assert caught.value.type == "invalid_request_error"


def test_text_of_a_lone_token_keeps_its_space():
    """As SentencePiece's decoders drop it at the start of what they decode."""
    pieces = {5: "\u2581the", 6: "the", 7: "\u2581\u2581\u2581the"}
    tokenizer = SimpleNamespace(
        decode=lambda ids: "the", convert_ids_to_tokens=lambda token_id: pieces[token_id]
    )
    assert token_text(tokenizer, 5) == (" the", b" the")
    assert token_text(tokenizer, 6) == ("the", b"the")
    assert token_text(tokenizer, 7) == ("   the", b"   the")
