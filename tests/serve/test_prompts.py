"""Prompts become ids beside the engine's steps; those that are too long for sure never do."""

import asyncio
import random
import threading
import unicodedata
from contextlib import contextmanager

import httpx2
import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fastspec import SamplingParams
from fastspec.models.loading import load_tokenizer
from fastspec.serve.engine_thread import EngineFailure, EngineThread, PromptThread
from fastspec.serve.prompts import longest_token

from ..models import byte_tokenizer
from .helpers import assert_idle, serving, wait_for
from .test_border import COMPLETIONS, LONG, SHORT, asking, error_of

SLOW = "slow"  # is in a prompt that waits at the tokenizer
# Requests that need the tokenizer, but for their prompt.
READERS = pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, SHORT), ("/tokenize", {})])


class SlowTokenizer:
    """Holds slow prompts at the tokenizer, and notes which prompts come there."""

    def __init__(self, monkeypatch):
        self.seen, self._open = [], threading.Event()
        tokenize = PreTrainedTokenizerFast.__call__

        def held(tokenizer, text, *args, **options):
            self.seen.append(text)
            if SLOW in text:
                assert self._open.wait(60)
            return tokenize(tokenizer, text, *args, **options)

        monkeypatch.setattr(PreTrainedTokenizerFast, "__call__", held)

    def open(self):
        self._open.set()


@pytest.fixture
def slow(monkeypatch):
    tokenizer = SlowTokenizer(monkeypatch)
    yield tokenizer
    tokenizer.open()


@contextmanager
def clients(engine, **config):
    with (
        serving(engine, **config) as address,
        httpx2.Client(base_url=address, timeout=30) as client,
    ):
        yield client
    assert_idle(engine)


@READERS
def test_a_running_stream_is_not_stalled(engine, slow, path, body):
    with clients(engine) as client:
        with client.stream("POST", COMPLETIONS, json=LONG | {"stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            with asking(client, body | {"prompt": SLOW}, path):
                wait_for(lambda: SLOW in slow.seen)
                assert [line for line in lines if line][-1] == "data: [DONE]"
        slow.open()


@READERS
def test_who_leaves_while_its_prompt_waits_is_dropped(engine, slow, monkeypatch, path, body):
    ask, asked = PromptThread.ask, []

    def noted(thread, make_ids):
        asked.append(ask(thread, make_ids))
        return asked[-1]

    monkeypatch.setattr(PromptThread, "ask", noted)
    with clients(engine) as client, asking(client, SHORT | {"prompt": SLOW}) as waiting:
        wait_for(lambda: SLOW in slow.seen)
        with asking(client, body | {"prompt": "gone"}, path):
            wait_for(lambda: len(asked) == 2)
        wait_for(lambda: asked[1].cancelled())
        slow.open()
        assert b"200 OK" in waiting.recv(1000)
        assert client.post(COMPLETIONS, json=SHORT).status_code == 200
    assert "gone" not in slow.seen


@READERS
def test_a_prompt_that_waits_counts_as_a_text(engine, slow, path, body):
    with clients(engine, max_requests=2) as client:
        with asking(client, body | {"prompt": SLOW}, path):
            wait_for(lambda: SLOW in slow.seen)
            error = error_of(client.post(COMPLETIONS, json=SHORT | {"n": 2}), 429)
            assert error["code"] == "server_busy"
        slow.open()
        wait_for(lambda: client.post(COMPLETIONS, json=SHORT | {"n": 2}).status_code == 200)


def test_a_full_server_converts_nothing(engine, slow):
    with clients(engine, max_requests=1) as client:
        with asking(client, {"prompt": SLOW}, "/tokenize"):
            wait_for(lambda: SLOW in slow.seen)
            for path, body in ("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [5]}):
                error = error_of(client.post(path, json=body), 429)
                assert error["code"] == "server_busy"
        slow.open()
        wait_for(lambda: client.post(path, json=body).status_code == 200)


@pytest.mark.parametrize("ends", ["alone", "while prompts wait"])
def test_prompts_keep_their_order_and_end_with_the_server(engine, ends):
    made, door = [], threading.Event()

    def maker(number):
        def ids():
            made.append(number)
            assert door.wait(60)
            return [number + 1]

        return ids

    async def ask():
        thread = EngineThread(engine)
        thread.start()
        params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
        asked = [asyncio.ensure_future(thread.open([maker(n)], params)) for n in range(3)]
        while not made:
            await asyncio.sleep(0.01)
        if ends == "alone":
            door.set()
            opened = await asyncio.gather(*asked)
        else:
            threading.Timer(0.2, door.set).start()
        await asyncio.wait_for(thread.stop(), 30)
        assert not thread.is_alive
        if ends == "alone":
            return [int(name.rpartition("-")[2]) for each in opened for name in each.places]
        with pytest.raises(EngineFailure, match="the server is shutting down"):
            await asked[1]
        asked[0].cancel()

    numbers = asyncio.run(ask())
    assert made == ([0, 1, 2] if ends == "alone" else [0])
    assert numbers == (sorted(numbers) if ends == "alone" else None)
    assert_idle(engine)


def test_a_text_that_is_too_long_for_sure_is_refused_at_once(engine, slow):
    """No token has more characters than <|end|>."""
    with clients(engine, max_prompt_tokens=40) as client:
        for length, told in ((40 * 7 + 1, "281 characters"), (40 * 7, "280 tokens")):
            body = SHORT | {"prompt": "x" * length}
            error = error_of(client.post(COMPLETIONS, json=body), 400)
            assert error["param"] == "prompt"
            assert told in error["message"]
        chat = {"messages": [{"role": "user", "content": "x" * 300}]}
        told = error_of(client.post("/v1/chat/completions", json=chat), 400)["message"]
        assert "characters" in told
    assert [len(text) for text in slow.seen] == [280]


def bpe(prepare=None, **fields):
    tokenizer = byte_tokenizer()
    backend = tokenizer.backend_tokenizer
    if fields:
        vocab = backend.get_vocab(with_added_tokens=False)
        vocab |= {fields["unk_token"]: 300} if "unk_token" in fields else {}
        for symbol in fields.pop("without", ()):
            del vocab[symbol]
        backend.model = models.BPE(vocab=vocab, merges=[], **fields)
    if prepare is not None:
        prepare(backend)
    return tokenizer


def normalized(normalizer):
    return lambda backend: setattr(backend, "normalizer", normalizer)


def split(*splitters):
    whole = pre_tokenizers.Sequence([*splitters, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    return lambda backend: setattr(backend, "pre_tokenizer", whole)


NFC = bpe(normalized(normalizers.NFC()))
SPLIT = bpe(split(pre_tokenizers.Split(" ", "isolated"), pre_tokenizers.Digits(True)))


@pytest.mark.parametrize("tokenizer", [bpe(), NFC, SPLIT, load_tokenizer("target", "tiny")])
def test_texts_have_at_least_as_many_tokens_as_their_length_says(tokenizer):
    most, rng = longest_token(tokenizer), random.Random(0)
    assert most is not None
    longest = max(tokenizer.get_vocab(), key=len)
    pieces = [" ", "  ", "\n", "\t", "e\u0301", "\u03b1\u0313\u0300\u0345", "\u00e9", "\U0001f600"]
    pieces += ["a", "1", "\u1112\u1161\u11ab", "\0", "\ufeff", "\u200d", "<|end|>", longest]
    texts = ["".join(rng.choices(pieces, k=rng.randrange(1, 60))) for _ in range(300)]
    for text in [*texts, *(piece * 50 for piece in pieces)]:
        assert len(tokenizer(text, add_special_tokens=False)["input_ids"]) * most >= len(text)


def test_nothing_composes_more_characters_than_we_say():
    sizes = (len(unicodedata.normalize("NFD", chr(code))) for code in range(0x110000))
    assert longest_token(NFC) == 7 * max(sizes)


def of(model):
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model))


@pytest.mark.parametrize(
    "tokenizer",
    [
        None,
        of(models.Unigram([("a", 0.0)], unk_id=0)),
        of(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]")),
        of(models.WordLevel({"a": 0}, unk_token="a")),
        of(models.BPE({"a": 0}, [], unk_token="a", fuse_unk=True)),
        bpe(without="a"),
        bpe(end_of_word_suffix="</w>"),
        bpe(split(pre_tokenizers.WhitespaceSplit())),
        bpe(split(pre_tokenizers.Split(" ", "removed"))),
        bpe(normalized(normalizers.Strip())),
        bpe(normalized(normalizers.Sequence([normalizers.NFC(), normalizers.Replace("a", "")]))),
        bpe(lambda backend: backend.add_tokens([AddedToken("<pad>", lstrip=True)])),
    ],
    ids=lambda each: None,
)
def test_where_characters_may_vanish_no_length_says_anything(tokenizer):
    assert longest_token(tokenizer) is None
