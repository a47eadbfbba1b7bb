"""The text of a request follows its prompt's, with the space between the two."""

import random

import pytest
from tokenizers import decoders

from fastspec import Engine, EngineConfig, SamplingParams
from fastspec.engine.detokenizer import Detokenizer

from ..models import (
    EOS_ID,
    byte_tokenizer,
    perturbed,
    random_model,
    random_t5,
    sentencepiece_tokenizer,
)

TOKENIZER, BYTES = sentencepiece_tokenizer(), byte_tokenizer()
BEGIN, END = 0, 1
FACE = [TOKENIZER.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in "🙂".encode()]
WORDS = [*range(258, len(TOKENIZER))]
SPACE, A, COMMA, SPACE_A = (
    TOKENIZER.convert_tokens_to_ids(each) for each in ("\u2581", "a", ",", "\u2581a")
)
CHOSEN = {"temperature": 1.0, "seed": 4, "max_tokens": 12, "ignore_eos": True}
CHOSEN |= {"allowed_token_ids": [END, *WORDS]}


def text_after(tokenizer, prompt_ids, token_ids, **options):
    """The text, which is also that of the pieces that are shown on the way."""
    detokenizer, pieces = Detokenizer(tokenizer, **options, prompt_ids=prompt_ids), []
    for token_id in token_ids:
        detokenizer.push(token_id)
        pieces.append(detokenizer.take())
        if detokenizer.stopped:
            break
    detokenizer.finish()
    assert "".join(pieces) + detokenizer.take(final=True) == detokenizer.text
    return detokenizer.text


def t5_like():
    tokenizer = sentencepiece_tokenizer()
    tokenizer.backend_tokenizer.decoder = decoders.Metaspace()
    return tokenizer


@pytest.mark.parametrize(("tokenizer", "has_bytes"), [(TOKENIZER, True), (t5_like(), False)])
def test_a_prompt_and_its_text_are_the_text_of_all_tokens(tokenizer, has_bytes):
    rng = random.Random(1)

    def some(most, least=0):
        kinds = [WORDS, WORDS, WORDS, [BEGIN, END], [FACE] if has_bytes else WORDS]
        chosen = [rng.choice(rng.choice(kinds)) for _ in range(rng.randint(least, most))]
        return [i for each in chosen for i in (each if isinstance(each, list) else [each])]

    spaces = 0
    for _ in range(2000):
        prompt_ids, token_ids, skips = some(8), some(8, 1), rng.random() < 0.6
        whole = tokenizer.decode(prompt_ids + token_ids, skip_special_tokens=skips)
        text = text_after(tokenizer, prompt_ids, token_ids, skips_special=skips)
        assert tokenizer.decode(prompt_ids, skip_special_tokens=skips) + text == whole
        spaces += text != tokenizer.decode(token_ids, skip_special_tokens=skips)
    assert spaces > 500, "the tokenizer drops no spaces"


def test_prompts_change_no_text_of_bytes():
    """Whatever they end in: special tokens, half a character, what is none."""
    rng = random.Random(2)
    kinds = [range(256), BYTES("🙂 日")["input_ids"], [EOS_ID]]
    for _ in range(2000):
        prompt_ids, token_ids = (
            [rng.choice(rng.choice(kinds)) for _ in range(rng.randint(1, 16))] for _ in range(2)
        )
        stop = tuple(rng.sample([" ", "日", "\ufffd", "🙂 ", "<|end|>"], rng.randint(0, 2)))
        options = {"stop": stop, "skips_special": rng.random() < 0.6}
        expected = text_after(BYTES, (), token_ids, **options)
        assert text_after(BYTES, prompt_ids, token_ids, **options) == expected


@pytest.mark.parametrize(
    ("prompt_ids", "token_ids", "text"),
    [
        ([], [SPACE_A, SPACE_A], "a a"),
        ([BEGIN], [SPACE_A, SPACE_A], "a a"),
        ([SPACE_A, *[END] * 7], [SPACE_A], " a"),
        ([SPACE_A], [*FACE, SPACE_A], "🙂 a"),
        ([SPACE_A, *FACE * 3], [SPACE_A], " a"),
        ([SPACE_A, *FACE[:2]], [SPACE_A], " a"),
        ([SPACE_A, *FACE[:2]], [*FACE[2:], SPACE_A], "\ufffd\ufffd a"),
        ([SPACE_A, *FACE], [*FACE[2:], SPACE_A], "\ufffd\ufffd a"),
        ([*FACE[1:] * 4], [SPACE_A], "a"),
    ],
)
def test_prompts_of_special_tokens_and_broken_characters(prompt_ids, token_ids, text):
    """Bytes that a decoder reads together with the prompt's show on their own."""
    assert text_after(TOKENIZER, prompt_ids, token_ids) == text


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"stop": (" a",)}, ""),
        ({"stop": (" a",), "keeps_stop": True}, " a"),
        ({"stop": (" a",), "min_tokens": 2}, " a,"),
        ({"stop": ("a a", ", a")}, " a"),
        ({"stop": (",",)}, " a"),
    ],
)
def test_stop_strings_are_found_in_the_new_text_alone(options, text):
    """They may begin with its first space; the prompt's text is never searched."""
    prompt_ids, token_ids = [SPACE_A, COMMA, SPACE_A], [SPACE_A, COMMA] * 2
    assert text_after(TOKENIZER, prompt_ids, token_ids, **options) == text


def test_a_text_that_is_given_up_has_nothing_of_the_prompt():
    detokenizer = Detokenizer(TOKENIZER, prompt_ids=[BEGIN, SPACE_A])
    detokenizer.stopped = True
    detokenizer.finish()
    assert detokenizer.text == detokenizer.take(final=True) == ""


@pytest.fixture(scope="module")
def model():
    return random_model("llama", num_hidden_layers=2, vocab_size=len(TOKENIZER))


@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("blocks", [{}, {"block_size": 4, "num_blocks": 7}])
def test_outputs_follow_their_prompts(model, blocks, skips):
    """Several of one prompt, in streams, and when requests lose their blocks on the way."""
    engine = Engine(model, perturbed(model, 0.02), TOKENIZER, config=EngineConfig(**blocks))
    params = SamplingParams(**CHOSEN, n=2, skip_special_tokens=skips)
    prompts = ["a ab", "ab,  a", "a\n", [SPACE_A, END]]
    outputs = engine.generate(prompts, params)
    texts = {}
    for event in engine.stream(prompts, params):
        place = event.prompt_index, event.index
        texts[place] = texts.get(place, "") + event.text
    for place, output in enumerate(outputs):
        before = TOKENIZER.decode(output.prompt_token_ids, skip_special_tokens=skips)
        for sample in output.outputs:
            ids = [*sample.prompt_token_ids, *sample.token_ids]
            assert before + sample.text == TOKENIZER.decode(ids, skip_special_tokens=skips)
            assert texts[place, sample.index] == sample.text
    assert any(sample.text.startswith(" ") for each in outputs for sample in each.outputs)
    assert bool(engine.stats.num_preemptions) == bool(blocks)


def test_a_stop_string_that_begins_with_the_space_ends_the_text_there(model):
    engine = Engine(model, None, TOKENIZER)
    params = SamplingParams(max_tokens=5, stop=" a", allowed_token_ids=[SPACE_A])
    (output,) = engine.generate(["a"], params)
    assert (output.text, output.token_ids) == ("", (SPACE_A,))
    (other,) = engine.generate([[BEGIN]], params)
    assert (other.text, other.token_ids) == ("a", (SPACE_A, SPACE_A))


def test_the_text_of_an_encoder_decoder_follows_what_its_decoder_reads():
    """The start token alone has no text before it."""
    engine = Engine(random_t5(vocab_size=len(TOKENIZER)), tokenizer=TOKENIZER)
    params = SamplingParams(max_tokens=2, allowed_token_ids=[SPACE_A], ignore_eos=True)
    (output,) = engine.generate([[SPACE_A, END]], params)
    assert output.text == "a a"
    engine.add_request([SPACE_A, END], params, decoder_input_ids=[BEGIN, A])
    events = [event for _ in range(3) if engine.has_unfinished for event in engine.step()]
    assert "".join(event.text for event in events) == events[-1].output.text == " a a"
