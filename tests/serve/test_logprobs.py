"""Log-probabilities in OpenAI's form, and prompts that are given back with theirs."""

from types import SimpleNamespace

import pytest

from fastspec.serve.replies import ReplyBuilder

from .helpers import PROMPT, complete, converse, generated

pytestmark = pytest.mark.usefixtures("one_thread")


def test_logprobs(client, engine):
    expected = generated(engine, logprobs=2)
    logprobs = complete(client, logprobs=2).choices[0].logprobs
    assert logprobs.token_logprobs == pytest.approx(expected.logprobs)
    assert all(
        token in top for token, top in zip(logprobs.tokens, logprobs.top_logprobs, strict=True)
    )
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


@pytest.mark.parametrize(
    ("first", "text", "gap"), [(" a", "a b", " "), (" a", " a", ""), ("a", "a", "")]
)
def test_a_decoder_that_drops_the_first_space_leaves_a_gap_after_an_echo(first, text, gap):
    """As those of SentencePiece's tokenizers do, which see only the output."""
    answer = SimpleNamespace(_decode=lambda token_id: (first, first.encode()))
    prompt, output = SimpleNamespace(text="x"), SimpleNamespace(token_ids=(1, 2), text=text)
    assert ReplyBuilder._gap(answer, prompt, output) == gap  # pyright: ignore
    assert ReplyBuilder._gap(answer, SimpleNamespace(text=""), output) == ""  # pyright: ignore
