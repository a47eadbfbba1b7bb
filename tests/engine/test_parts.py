"""The small parts of the engine, each alone."""

import pytest

from fastspec import SamplingParams
from fastspec.drafters.base import Request
from fastspec.engine.block_manager import BlockManager
from fastspec.engine.detokenizer import Detokenizer
from fastspec.engine.prefix_index import PrefixIndex
from fastspec.engine.stats import SpecStats

from ..models import byte_tokenizer

TEXT = "naïve → 日本語 🙂 end"


def pieces(text, stop=()):
    tokenizer = byte_tokenizer()
    detokenizer = Detokenizer(tokenizer, stop)
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


def request_of(token_ids):
    return Request("r", list(token_ids), SamplingParams(), 0, frozenset(), 99, None)


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
