"""Log-probabilities in OpenAI's form, and prompts that are given back with theirs."""

import openai
import pytest

from fastspec import Engine, SamplingParams

from ..models import random_model, sentencepiece_tokenizer
from .helpers import MODEL, PROMPT, complete, converse, generated, new_engine, serving


def test_logprobs(client, engine):
    expected = generated(engine, logprobs=2)
    logprobs = complete(client, logprobs=2).choices[0].logprobs
    assert logprobs.token_logprobs == pytest.approx(expected.logprobs)
    assert all(
        token in top for token, top in zip(logprobs.tokens, logprobs.top_logprobs, strict=True)
    )
    for top in logprobs.top_logprobs:
        assert [*top.values()] == sorted(top.values(), reverse=True)
    streamed = [c.choices[0].logprobs for c in complete(client, logprobs=2, stream=True)]
    assert [each.tokens[0] for each in streamed] == logprobs.tokens
    assert [each.token_logprobs[0] for each in streamed] == pytest.approx(expected.logprobs)
    assert [each.text_offset[0] for each in streamed] == logprobs.text_offset
    content = converse(client, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert [len(each.top_logprobs) for each in content] == [2] * 24
    assert all(each.logprob <= each.top_logprobs[0].logprob + 1e-6 for each in content)


def test_tokens_that_are_no_whole_character_have_their_bytes(client, engine):
    """Each by its own name: the random pair writes any byte."""
    ids, bytes_of = engine.tokenizer("\u00e9\u00ef")["input_ids"], [0xC3, 0xA9, 0xC3, 0xAF]
    bias = {str(token_id): 100 for token_id in ids}
    logprobs = complete(client, logprobs=3, logit_bias=bias).choices[0].logprobs
    names = {f"bytes:\\x{byte:02x}" for byte in bytes_of}
    assert {*logprobs.tokens} <= names
    assert all({*top} == names for top in logprobs.top_logprobs)
    content = converse(client, logprobs=True, logit_bias=bias).choices[0].logprobs.content
    assert all(each.token == f"bytes:\\x{each.bytes[0]:02x}" for each in content)


def test_offsets_count_the_characters_that_stand_for_broken_bytes(client, engine):
    """Those before a token; the two halves of a character begin at the same place."""
    bytes_of = {"bytes:\\xc3": b"\xc3", "bytes:\\xa9": b"\xa9", "a": b"a"}
    bias = {str(token_id): 100 for token_id in engine.tokenizer("\u00e9a")["input_ids"]}
    sampled = {"temperature": 1.0, "seed": 5, "logit_bias": bias, "max_tokens": 40}
    logprobs = complete(client, logprobs=0, **sampled).choices[0].logprobs
    before, seen = b"", set()
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        seen.add((before[-1:], token))
        is_second_half = before.endswith(b"\xc3") and token == "bytes:\\xa9"
        whole = before[:-1] if is_second_half else before
        assert offset == len(whole.decode(errors="replace"))
        before += bytes_of[token]
    assert len(seen) > 6
    streamed = complete(client, logprobs=0, stream=True, **sampled)
    assert [c.choices[0].logprobs.text_offset[0] for c in streamed] == logprobs.text_offset


def test_an_echo_begins_with_the_prompt(client, engine):
    """As tools that rate given texts ask for them: text or ids, with log-probabilities."""
    ids = [3, 5, 7, 200, 11]
    expected = generated(engine, ids, logprobs=2, prompt_logprobs=2)
    (choice,) = complete(client, ids, echo=True, logprobs=2).choices
    prompt = "".join(engine.tokenizer.decode([each]) for each in ids)
    assert choice.text == prompt + expected.text
    logprobs = choice.logprobs
    assert len(logprobs.tokens) == len(logprobs.text_offset) == len(ids) + 24
    assert logprobs.token_logprobs[0] is logprobs.top_logprobs[0] is None
    known = [top[token] for token, top in zip(ids[1:], expected.prompt_logprobs[1:], strict=True)]
    assert logprobs.token_logprobs[1:] == pytest.approx([*known, *expected.logprobs])
    pairs = zip(logprobs.tokens[1:], logprobs.top_logprobs[1:], strict=True)
    assert all(token in top for token, top in pairs)
    plain = complete(client, ids, logprobs=2).choices[0].logprobs
    assert logprobs.tokens[len(ids) :] == plain.tokens
    assert logprobs.text_offset[len(ids) :] == [len(prompt) + each for each in plain.text_offset]


def test_echoes_of_several_texts_and_prompts(client, engine):
    prompts = [PROMPT, "a\u00e9"]
    choices = complete(client, prompts, n=2, echo=True, logprobs=0, max_tokens=2).choices
    answers = [generated(engine, prompt, max_tokens=2).text for prompt in prompts]
    wanted = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    assert [choice.text for choice in choices] == [wanted[0]] * 2 + [wanted[1]] * 2
    assert choices[0].logprobs == choices[1].logprobs
    assert choices[2].logprobs.tokens[:3] == ["a", "bytes:\\xc3", "bytes:\\xa9"]
    assert choices[2].logprobs.text_offset[:4] == [0, 1, 1, 2]
    (choice,) = complete(client, echo=True, max_tokens=2).choices
    assert (choice.text, choice.logprobs) == (wanted[0], None)


def test_an_echo_alone_is_the_prompt(client, engine):
    """As with vLLM: no token follows, and what the engine would write ends nothing."""
    ends = {"stop_token_ids": generated(engine, [3, 5, 7], max_tokens=1).token_ids}
    for count in (None, 0, 2):
        asked = {"echo": True, "logprobs": count, "temperature": 1.0, "seed": 3}
        longer = complete(client, [3, 5, 7], max_tokens=1, **asked).choices[0]
        answer = complete(client, [3, 5, 7], max_tokens=0, extra_body=ends, **asked)
        (choice,) = answer.choices
        assert choice.text == engine.tokenizer.decode([3, 5, 7])
        assert choice.finish_reason == "length"
        assert (answer.usage.completion_tokens, answer.usage.total_tokens) == (0, 3)
        if count is None:
            assert choice.logprobs is None
            continue
        for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
            whole = getattr(longer.logprobs, name)
            assert getattr(choice.logprobs, name) == (whole and whole[:-1])
    both = complete(client, [PROMPT, "x"], max_tokens=0, echo=True, n=2)
    assert [each.text for each in both.choices] == [PROMPT, PROMPT, "x", "x"]
    for number in (0, False):
        with pytest.raises(openai.BadRequestError, match="max_tokens: expected an int from"):
            complete(client, max_tokens=number, echo=number is False)


def test_the_evaluation_harness_rates_texts(client, engine):
    """Its request, and how it reads the answer: without the last token, which it did not give."""
    prompts = [[3, 5, 7, 200, 11], [7, 5, 3]]
    asked = {"max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0, "seed": 1234}
    answer = client.post(
        "/completions", body={"model": MODEL, "prompt": prompts, **asked}, cast_to=object
    )
    for ids, choice in zip(prompts, answer["choices"], strict=True):
        (output,) = engine.generate([ids], SamplingParams(max_tokens=1, prompt_logprobs=1))
        known = output.prompt_logprobs[1:]
        logprobs = choice["logprobs"]
        rated, tops = logprobs["token_logprobs"][1:-1], logprobs["top_logprobs"][1:-1]
        values = [top[token] for token, top in zip(ids[1:], known, strict=True)]
        assert rated == pytest.approx(values)
        greedy = [value == max(top.values()) for value, top in zip(rated, tops, strict=True)]
        assert greedy == [
            max(top, key=top.get) == token for token, top in zip(ids[1:], known, strict=True)
        ]


@pytest.fixture(scope="module")
def words_client():
    """Of a server whose tokenizer puts a special token and a space before a text."""
    tokenizer = sentencepiece_tokenizer()
    model = random_model("llama", num_hidden_layers=2, vocab_size=len(tokenizer))
    with (
        serving(Engine(model, tokenizer=tokenizer)) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


FIRST, WORDS = 0, range(258, 267)
WRITES_WORDS = {"ignore_eos": True, "allowed_token_ids": [*WORDS]}
SAMPLED = {"temperature": 1.0, "seed": 3, "logprobs": 0, "extra_body": WRITES_WORDS}


@pytest.mark.parametrize("prompt", ["a ab,   a", [FIRST, 263, 264], [FIRST], [263, 258], ""])
def test_offsets_are_places_in_the_text(words_client, prompt):
    """Of a new token, the space after the prompt is the first character if there is one."""
    whole = complete(words_client, prompt, **SAMPLED, echo=True).choices[0]
    plain = complete(words_client, prompt, **SAMPLED).choices[0]
    streamed = [c.choices[0] for c in complete(words_client, prompt, **SAMPLED, stream=True)]
    assert "".join(choice.text for choice in streamed) == plain.text
    assert whole.text.endswith(plain.text)
    offsets = plain.logprobs.text_offset
    assert [choice.logprobs.text_offset[0] for choice in streamed] == offsets
    length = len(whole.text) - len(plain.text)
    assert whole.logprobs.text_offset[-24:] == [length + offset for offset in offsets]
    if isinstance(prompt, str):
        assert whole.text == prompt + plain.text
        assert whole.logprobs.tokens[0] == "<s>"
        assert {*whole.logprobs.text_offset[:-24][:2]} == {0}
    for choice in whole, plain:
        pairs = [*zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True)]
        ends = [*(offset for _, offset in pairs[1:]), len(choice.text)]
        for (token, start), end in zip(pairs, ends, strict=True):
            shown = choice.text[start:end]
            assert shown == token or (start in (0, length) and token.endswith(shown))


def test_a_text_after_no_text_lacks_its_first_space(words_client):
    only = {**SAMPLED, "max_tokens": 3, "extra_body": {"allowed_token_ids": [263]}}
    for prompt, text, offsets in (([FIRST], "a a a", [0, 1, 3]), ([263], " a a a", [0, 2, 4])):
        (choice,) = complete(words_client, prompt, **only).choices
        assert (choice.text, choice.logprobs.text_offset) == (text, offsets)
        assert choice.logprobs.tokens == [" a"] * 3


def test_with_a_template_the_echo_is_what_the_model_reads():
    engine = new_engine(prompt_template="Q: {input_text}\nA:")
    with (
        serving(engine) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client,
    ):
        (choice,) = complete(client, "hi", echo=True, logprobs=0, max_tokens=2).choices
        assert choice.text.startswith("Q: hi\nA:")
        assert "".join(choice.logprobs.tokens[:8]) == "Q: hi\nA:"
        assert choice.logprobs.text_offset[:9] == [*range(9)]
        ids = engine.tokenizer("hi")["input_ids"]
        (choice,) = complete(client, ids, echo=True, logprobs=0, max_tokens=2).choices
        assert choice.text.startswith("hi")
        assert choice.logprobs.text_offset[:3] == [0, 1, 2]
