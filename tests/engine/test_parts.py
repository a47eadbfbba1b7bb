"""The small parts of the engine, each alone."""

import re
from pathlib import Path

import pytest

from fastspec import SamplingParams
from fastspec.engine.block_manager import BlockManager
from fastspec.engine.detokenizer import Detokenizer
from fastspec.engine.prefix_index import PrefixIndex
from fastspec.engine.stats import SpecStats

from ..models import EOS_ID, byte_tokenizer
from .probes import request_of

TEXT = "naïve → 日本語 🙂 end"


def pieces(text, stop=(), keeps_stop=False, skips_special=True):
    tokenizer = byte_tokenizer()
    detokenizer = Detokenizer(tokenizer, stop, keeps_stop, skips_special)
    taken = []
    for token_id in tokenizer(text)["input_ids"]:
        detokenizer.push(token_id)
        taken.append(detokenizer.take())
        if detokenizer.stopped:
            break
    detokenizer.finish()
    taken.append(detokenizer.take(final=True))
    return detokenizer, taken


def test_characters_of_several_tokens_come_whole():
    detokenizer, taken = pieces(TEXT)
    assert detokenizer.text == "".join(taken) == TEXT
    assert all("\ufffd" not in piece for piece in taken)


@pytest.mark.parametrize("stop", ["日本", "ï", "🙂", "→ 日"])
def test_stop_strings_of_several_tokens(stop):
    detokenizer, taken = pieces(TEXT, (stop, "never"))
    assert detokenizer.stopped
    assert detokenizer.text == "".join(taken) == TEXT[: TEXT.index(stop)]


@pytest.mark.parametrize("stop", ["日本", "ï", "🙂", "→ 日", " end"])
def test_the_stop_string_may_stay(stop):
    detokenizer, taken = pieces(TEXT, (stop, "never"), keeps_stop=True)
    end = TEXT.index(stop) + len(stop)
    assert detokenizer.text == "".join(taken) == TEXT[:end]
    assert all("\ufffd" not in piece for piece in taken)


def test_special_tokens_may_stay_and_stop():
    text = "🙂<|end|>日本<|end|>"
    detokenizer, taken = pieces(text)
    assert detokenizer.text == "".join(taken) == "🙂日本"
    detokenizer, taken = pieces(text, skips_special=False)
    assert detokenizer.text == "".join(taken) == text
    assert all("\ufffd" not in piece for piece in taken)
    for keeps_stop, expected in ((False, "🙂"), (True, "🙂<|end|>日")):
        detokenizer, taken = pieces(text, ("<|end|>日",), keeps_stop, skips_special=False)
        assert detokenizer.text == "".join(taken) == expected
    assert pieces(text, ("<|end|>",))[0].text == "🙂日本"


def test_of_stop_strings_that_begin_together_the_shorter_counts():
    assert pieces("abc", ("bc", "b"), keeps_stop=True)[0].text == "ab"


def test_the_first_of_several_stop_strings_counts():
    detokenizer, _ = pieces("one two three", ("three", "two"))
    assert detokenizer.text == "one "


def test_what_may_become_a_stop_string_is_held_back():
    detokenizer, taken = pieces("abcabx", ("abx",))
    assert detokenizer.text == "".join(taken) == "abc"
    _, taken = pieces("abcaby", ("abx",))
    assert "".join(taken) == "abcaby"


def test_an_incomplete_character_ends_the_text():
    tokenizer = byte_tokenizer()
    detokenizer = Detokenizer(tokenizer, ())
    for token_id in tokenizer("ab→")["input_ids"][:-1]:
        detokenizer.push(token_id)
    detokenizer.finish()
    assert detokenizer.text == "ab\ufffd"
    detokenizer.finish()
    assert detokenizer.text == "ab\ufffd"


class CountingTokenizer:
    """Counts the tokens that it decodes."""

    def __init__(self):
        self.tokenizer = byte_tokenizer()
        self.num_decoded = 0

    def decode(self, token_ids, **kwargs):
        self.num_decoded += len(token_ids)
        return self.tokenizer.decode(token_ids, **kwargs)


FACE = byte_tokenizer()("🙂")["input_ids"]
NEVER_WHOLE = {
    "first bytes": FACE[:1] * 400,
    "last bytes": FACE[-1:] * 400,
    "all but the last byte": FACE[:3] * 130,
    "no text": [EOS_ID] * 400,
    "characters between": (FACE[:1] * 9 + FACE) * 30,
    "words between": (FACE[:1] * 11 + [EOS_ID] * 9 + byte_tokenizer()(" a→")["input_ids"]) * 15,
}


@pytest.mark.parametrize("name", NEVER_WHOLE)
def test_tokens_without_characters_take_linear_time(name):
    tokenizer = CountingTokenizer()
    detokenizer = Detokenizer(tokenizer, ())
    for token_id in NEVER_WHOLE[name]:
        detokenizer.push(token_id)
    assert tokenizer.num_decoded < 25 * len(NEVER_WHOLE[name])
    detokenizer.finish()
    expected = tokenizer.decode(NEVER_WHOLE[name], skip_special_tokens=True)
    assert detokenizer.text == detokenizer.take(final=True) == expected


def test_a_stop_string_before_half_a_character_ends_the_text_there():
    detokenizer = Detokenizer(HalfCharacters(), ("END",))
    detokenizer.push(0)
    assert not detokenizer.stopped
    detokenizer.push(1)
    assert detokenizer.stopped
    assert detokenizer.take() == detokenizer.text == "the "


class HalfCharacters:
    """A vocabulary of two tokens."""

    def decode(self, token_ids, skip_special_tokens):
        return b"".join((b"the ", b"END\xf0")[i] for i in token_ids).decode(errors="replace")


def test_a_stop_string_that_only_the_end_completes():
    tokenizer = byte_tokenizer()
    first = tokenizer("→")["input_ids"][0]
    for max_len, reasons in ((4, [None, None, "stop"]), (5, [None, None, None])):
        params = SamplingParams(stop="b\ufffd")
        detokenizer = Detokenizer(tokenizer, params.stop)
        request = request_of([1], params=params, max_len=max_len, detokenizer=detokenizer)
        ids = [*tokenizer("ab")["input_ids"], first]
        assert [request.append(i, "target", None, None) for i in ids] == reasons
    output = request.output("abort")
    assert output.text == "a"
    assert len(output.token_ids) == 3


def test_block_manager():
    manager = BlockManager(num_blocks=5, block_size=4)
    first, second = request_of([1]), request_of([2])
    assert manager.reserve(first.block_table, 9)
    assert manager.reserve(second.block_table, 8)
    assert manager.num_free == 0
    assert set(first.block_table) | set(second.block_table) == set(range(5))
    assert not manager.reserve(second.block_table, 9)
    assert len(second.block_table) == 2
    assert manager.reserve(first.block_table, 12)
    before = [manager.tenancy(block_id) for block_id in range(5)]
    manager.release(first)
    assert first.block_table == []
    assert manager.num_free == 3
    assert manager.reserve(second.block_table, 20)
    assert [manager.tenancy(block_id) - before[block_id] for block_id in range(5)] == [
        0 if block_id in second.block_table[:2] else 1 for block_id in range(5)
    ]
    assert manager.fits(20)
    assert not manager.fits(21)


def test_prefix_index():
    index = PrefixIndex(block_size=2)
    text = [1, 2, 3, 4, 5]
    chain = []
    for number, block_id in enumerate((7, 3)):
        chain.append(index.add(index.key(chain, text, number), block_id))
    assert index.find(text).contents == chain
    assert index.find(text[:4]) == (chain[:1], None)
    assert index.find([1, 2, 3, 9, 9]) == (chain[:1], (chain[0], (3, 9)))
    assert index.find([3, 4, 5]) == ([], (None, (3, 4)))
    assert index.add(index.key([], text, 0), 5) is chain[0]
    index.drop(5)
    assert index.find(text).contents == chain, "the first block of a content stays the one"
    index.drop(7)
    assert index.find(text) == ([], (None, (1, 2)))
    assert index.add(index.key([], text, 0), 4) is chain[0]
    assert [content.block_id for content in index.find(text).contents] == [4, 3]


def test_statistics():
    stats = SpecStats()
    assert stats.acceptance_rate is None
    assert stats.mean_acceptance_length is None
    stats.record_step(proposed=3, accepted=3, emitted=4)
    stats.record_step(proposed=3, accepted=0, emitted=1)
    stats.record_step(proposed=2, accepted=1, emitted=2)
    assert stats.acceptance_rate == 0.5
    assert stats.mean_acceptance_length == pytest.approx(7 / 3)
    assert stats.num_accepted_tokens_per_pos == [2, 1, 1]
    assert stats.acceptance_histogram == [1, 1, 0, 1]
    assert stats.to_dict()["num_draft_tokens"] == 8
    stats.record_step(proposed=0, accepted=0, emitted=1)
    assert (stats.num_steps, stats.num_drafts) == (4, 3)
    assert repr(stats) == "SpecStats(8 tokens in 4 steps, 4 of 8 draft tokens accepted)"


def test_only_the_probes_look_inside_an_engine():
    """So that its insides can move without a change to what the tests say."""
    insides = re.compile(r"engine\._\w+|\._(?:runner|scheduler|speculation)\b")
    for path in Path(__file__).parent.glob("*.py"):
        if path.name != "probes.py":
            assert not insides.findall(path.read_text()), path.name
