"""The engine's outputs in the form of OpenAI's responses."""

import codecs
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple
from uuid import uuid4

from transformers import PreTrainedTokenizerBase

from fastspec.engine.outputs import RequestOutput, StreamEvent
from fastspec.engine.stats import SpecStats
from fastspec.models.chat import ReplyReader
from fastspec.models.shared_vocabulary import BYTE_OF
from fastspec.serve.engine_thread import Generation
from fastspec.serve.requests import ParsedRequest

_LEAST_LOGPROB = -9999.0  # JSON has no infinity
_KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_INCOMPLETE = "\ufffd"
_UTF8 = codecs.getincrementaldecoder("utf-8")
_SPACE = "\u2581"  # how SentencePiece writes it, and what decoders drop before a lone token


def error_body(
    status: int, message: str, code: str | None = None, param: str | None = None
) -> dict[str, Any]:
    """An error in OpenAI's form; `param` is the field of the request that it is about."""
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _num_broken(pending: bytes, following: bytes) -> int:
    """Count the characters that stand for the bytes of one that the following do not continue."""
    try:
        _UTF8().decode(pending + following[:1])
    except UnicodeDecodeError:
        return len(pending.decode(errors="replace"))
    return 0


def server_event(data: Mapping[str, Any] | str) -> bytes:
    """One event of a stream."""
    text = data if isinstance(data, str) else json.dumps(data)
    return f"data: {text}\n\n".encode()


def acceptance(outputs: Iterable[RequestOutput], num_spec_tokens: int) -> dict[str, Any]:
    """Acceptance statistics under vLLM's names; only steps with drafts count."""
    stats = SpecStats.total(output.stats for output in outputs)
    histogram = list(stats.acceptance_histogram)
    if histogram:
        histogram[0] -= stats.num_steps - stats.num_drafts
    accepted, drafts = stats.num_accepted_tokens, stats.num_drafts
    return {
        "speculative_decoding": {
            "mean_acceptance_length": 1 + accepted / drafts if drafts else None,
            "draft_acceptance_rate": stats.acceptance_rate,
            "acceptance_histogram": histogram,
            "num_spec_steps": drafts,
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": stats.num_draft_tokens,
            "num_spec_tokens": num_spec_tokens,
        }
    }


class _Prompt(NamedTuple):
    """What an echo puts in front of a text."""

    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[float | None]
    top_logprobs: Sequence[Mapping[int, float] | None]


_NO_PROMPT = _Prompt("", (), (), ())


class _Offsets:
    """Counts the characters before tokens.

    Args:
        start: place in the returned text where the tokens begin.
        num_left_out: characters at the beginning of the tokens that the text lacks.
    """

    def __init__(self, start: int, num_left_out: int):
        self._start, self._length = start, start - num_left_out
        self._decoder = _UTF8(errors="replace")

    def following(self, tokens: Iterable[bytes]) -> list[int]:
        """Where each of the next tokens begins."""
        offsets = []
        for own in tokens:
            offset = self._length + _num_broken(self._decoder.getstate()[0], own)
            offsets.append(max(self._start, offset))
            self._length += len(self._decoder.decode(own))
        return offsets


class ReplyBuilder:
    """One response, whole or in chunks: a chunk has one token, so clients can count them.

    Args:
        is_chat: whether it is a chat completion.
        model: its name in the response.
        asked: the client's request.
        num_spec_tokens: K of the request.
        decode: gives the text and the bytes of one token.
        generation: the texts of the response.

    Attributes:
        messages: those of a whole response that are more than a text, by the index of the choice.
        readers: read the choices of a stream that may be more than a text.
    """

    def __init__(
        self,
        is_chat: bool,
        model: str,
        asked: ParsedRequest,
        num_spec_tokens: int,
        decode: Callable[[int], tuple[str, bytes]],
        generation: Generation,
    ):
        self._is_chat = is_chat
        self._asked = asked
        self._num_spec_tokens = num_spec_tokens
        self._decode = decode
        self._generation = generation
        kind = "chat.completion" if is_chat else "text_completion"
        self._head = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }
        self._chunk_head = self._head | {"object": f"{kind}.chunk" if is_chat else kind}
        self._num_new: Counter[int] = Counter()  # tokens of each choice
        self._offsets: dict[int, _Offsets] = {}  # by the index of the choice
        self._outputs: list[tuple[int, RequestOutput]] = []
        self.messages: Mapping[int, Mapping[str, Any]] = {}
        self.readers: Sequence[ReplyReader] = ()

    def chunks(self, events: Sequence[StreamEvent]) -> bytes:
        """What a step added, as events of a stream.

        The end of a text, which is a separate event, is merged with its last token.
        """
        chunks: list[tuple[int, dict[str, Any]]] = []
        for event in events:
            chunk = self._chunk(event)
            (choice,) = chunk["choices"]
            if event.output is not None and chunks and chunks[-1][0] == choice["index"]:
                (last,) = chunks[-1][1]["choices"]
                last |= {name: choice[name] for name in ("finish_reason", "stop_reason")}
                if self._is_chat:
                    last["delta"] = _joined(last["delta"], choice["delta"])
                else:
                    last["text"] += event.text
            else:
                chunks.append((choice["index"], chunk))
        return b"".join(server_event(chunk) for _, chunk in chunks)

    def last_chunks(self) -> bytes:
        """The end of a stream, with usage and metrics if requested."""
        extra = self._extra()
        if self._asked.include_usage:
            extra |= {"usage": self._usage()}
        more = server_event({**self._chunk_head, "choices": [], **extra}) if extra else b""
        return more + server_event("[DONE]")

    def whole(self) -> dict[str, Any]:
        """The whole response, after `add` was given all events."""
        pairs = sorted(self._outputs, key=lambda pair: pair[0])
        choices = [self._whole_choice(index, output) for index, output in pairs]
        return {**self._head, "choices": choices, "usage": self._usage(), **self._extra()}

    def add(self, event: StreamEvent) -> None:
        """Keep the output of a text that has ended."""
        if event.output is not None:
            output = _empty(event.output) if self._asked.is_echo_alone else event.output
            self._outputs.append((self._index(event), output))

    def _index(self, event: StreamEvent) -> int:
        return self._generation.places[event.request_id] * self._asked.params.n + event.index

    def _chunk(self, event: StreamEvent) -> dict[str, Any]:
        self.add(event)
        index = self._index(event)
        choice = self._choice(index, event.output)
        if self._is_chat:
            choice["delta"] = self._delta(choice, event)
            if index not in self._offsets:
                choice["delta"]["role"] = "assistant"
        else:
            choice["text"] = event.text
        if event.logprob is not None:
            tops = None if event.top_logprobs is None else [event.top_logprobs]
            values = event.token_ids, [event.logprob], tops
            choice["logprobs"] = self._logprobs(index, *values, event.text)
        if event.token_ids:
            choice |= self._writers(event.token_ids, [event.source], [event.drafter])
        self._offsets.setdefault(index, _Offsets(0, 0))
        chunk = {**self._chunk_head, "choices": [choice]}
        if self._asked.running_usage:
            self._num_new[index] += len(event.token_ids)
            prompt = self._generation.prompt_lens[event.request_id]
            chunk["usage"] = _tokens(prompt, self._num_new[index])
        elif self._asked.include_usage:
            chunk["usage"] = None
        return chunk

    def _delta(self, choice: dict[str, Any], event: StreamEvent) -> dict[str, Any]:
        """What a step adds to a message; an end of it may change why the choice ends."""
        if not self.readers:
            return {"content": event.text}
        reader = self.readers[choice["index"]]
        delta = reader.feed(event.text)
        if event.output is not None:
            delta = _joined(delta, reader.end())
            if reader.num_calls and event.output.finish_reason == "stop":
                choice["finish_reason"] = "tool_calls"
        return delta or {"content": ""}

    def _whole_choice(self, index: int, output: RequestOutput) -> dict[str, Any]:
        choice = self._choice(index, output)
        prompt = self._prompt(index) if self._asked.echo else _NO_PROMPT
        if self._is_chat:
            message = self.messages.get(index, {"content": output.text})
            choice["message"] = {"role": "assistant", **message}
            if "tool_calls" in message and output.finish_reason == "stop":
                choice["finish_reason"] = "tool_calls"
        else:
            choice["text"] = prompt.text + output.text
        if output.logprobs is not None:
            tops = output.top_logprobs
            choice["logprobs"] = self._logprobs(
                index,
                [*prompt.token_ids, *output.token_ids],
                [*prompt.logprobs, *output.logprobs],
                None if tops is None else [*prompt.top_logprobs, *tops],
                output.text,
                prompt,
            )
        return choice | self._writers(output.token_ids, output.sources, output.drafters)

    def _prompt(self, index: int) -> _Prompt:
        """What an echo adds to a choice; of several texts of a prompt the first has its numbers."""
        place, n = index // self._asked.params.n, self._asked.params.n
        (first,) = (output for number, output in self._outputs if number == place * n)
        token_ids, text = first.prompt_token_ids, self._asked.prompts[place]
        if not isinstance(text, str):
            text = _written(self._decode(token_id)[1] for token_id in token_ids)
        tops = first.prompt_logprobs or [None] * len(token_ids)
        pairs = zip(token_ids, tops, strict=True)
        logprobs = [None if top is None else top[token_id] for token_id, top in pairs]
        return _Prompt(text, token_ids, logprobs, tops)

    def _choice(self, index: int, output: RequestOutput | None) -> dict[str, Any]:
        return {
            "index": index,
            "logprobs": None,
            "finish_reason": output and output.finish_reason,
            "stop_reason": output and output.stop_reason,
        }

    def _writers(self, *values: Any) -> dict[str, Any]:
        names = "token_ids", "sources", "drafters"
        return dict(zip(names, values, strict=True)) if self._asked.sources else {}

    def _logprobs(
        self,
        index: int,
        token_ids: Sequence[int],
        logprobs: Sequence[float | None],
        tops: Sequence[Mapping[int, float] | None] | None,
        text: str,
        prompt: _Prompt = _NO_PROMPT,
    ) -> dict[str, Any]:
        """Log-probabilities of a choice's next tokens; an offset counts the text before a token.

        The first token of a prompt has none.

        Args:
            text: how the new tokens are shown, as far as no stop string may follow.
            prompt: what token_ids begin with.
        """
        tokens = [self._decode(token_id) for token_id in token_ids]
        values = [_finite(logprob) for logprob in logprobs]
        best = [
            [(self._decode(token_id), _finite(value)) for token_id, value in (top or {}).items()]
            for top in tops or ()
        ]
        if self._is_chat:
            count = self._asked.params.logprobs or 0
            lists = [[_token(*pair) for pair in pairs[:count]] for pairs in best]
            lists = lists or [[] for _ in tokens]
            rows = zip(tokens, values, lists, strict=True)
            content = [{**_token(token, v), "top_logprobs": each} for token, v, each in rows]
            return {"content": content, "refusal": None}
        return {
            "tokens": [text for text, _ in tokens],
            "token_logprobs": values,
            "top_logprobs": [_by_text(pairs) or None for pairs in best] or None,
            "text_offset": self._text_offsets(index, [own for _, own in tokens], text, prompt),
        }

    def _text_offsets(
        self, index: int, tokens: Sequence[bytes], text: str, prompt: _Prompt
    ) -> list[int]:
        """Where a choice's next tokens begin in its text; arguments as those of `_logprobs`."""
        num_given, length = len(prompt.token_ids), len(prompt.text)
        given, new = tokens[:num_given], tokens[num_given:]
        # Tokenizers put a special token and a space in front of a prompt, which its text lacks.
        places = _Offsets(0, max(0, _written(given).rfind(prompt.text))).following(given)
        if index not in self._offsets:  # a decoder drops the first space if no text comes before
            is_shown = text.strip() or not self._asked.params.stop  # else it may be held back
            num_dropped = _num_spaces(_written(new)) - _num_spaces(text) if is_shown else 0
            self._offsets[index] = _Offsets(length, max(0, num_dropped))
        return [*(min(at, length) for at in places), *self._offsets[index].following(new)]

    def _usage(self) -> dict[str, Any]:
        firsts = [output for _, output in self._outputs if output.index == 0]
        prompt = sum(len(output.prompt_token_ids) for output in firsts)
        new = sum(len(output.token_ids) for _, output in self._outputs)
        cached = sum(output.stats.num_cached_prompt_tokens for output in firsts)
        details = {"prompt_tokens_details": {"cached_tokens": cached}}
        return _tokens(prompt, new) | details | self._prediction_usage()

    def _prediction_usage(self) -> dict[str, Any]:
        """How many copies were accepted, if there is a prediction and no draft model drafted, too.

        Drafters do not tell copies of the prediction from those of the text itself, nor rejected
        copies from a draft model's rejected tokens.
        """
        stats = SpecStats.total(output.stats for _, output in self._outputs)
        if self._asked.params.prediction is None or any(stats.num_draft_passes.values()):
            return {}
        accepted = stats.num_accepted_tokens
        rejected = stats.num_draft_tokens - accepted
        counts = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}
        return {"completion_tokens_details": counts}

    def _extra(self) -> dict[str, Any]:
        if not self._asked.metrics:
            return {}
        outputs = [output for _, output in self._outputs]
        return {"metrics": acceptance(outputs, self._num_spec_tokens)}


def _empty(output: RequestOutput) -> RequestOutput:
    """An output without its new tokens."""
    return replace(
        output,
        token_ids=(),
        text="",
        logprobs=None if output.logprobs is None else (),
        top_logprobs=None if output.top_logprobs is None else (),
        finish_reason="length",
        stop_reason=None,
        sources=(),
        drafters=(),
    )


def token_text(tokenizer: PreTrainedTokenizerBase | None, token_id: int) -> tuple[str, bytes]:
    """The text and the bytes of a token; without a tokenizer, its number.

    A token whose bytes are not whole characters is written `bytes:\\xe2\\x82`, as in OpenAI's API.
    """
    if tokenizer is None:
        return str(token_id), str(token_id).encode()
    text, piece = str(tokenizer.decode([token_id])), str(tokenizer.convert_ids_to_tokens(token_id))
    num_spaces = len(piece) - len(piece.lstrip(_SPACE))
    text = " " * (num_spaces - _num_spaces(text)) + text
    if _INCOMPLETE not in text:
        return text, text.encode()
    if found := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", piece):
        own = bytes.fromhex(found[1])
    else:
        if not BYTE_OF.keys() >= {*piece}:
            return text, text.encode()
        own = bytes(map(BYTE_OF.__getitem__, piece))
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in own), own


def _written(tokens: Iterable[bytes]) -> str:
    return b"".join(tokens).decode(errors="replace")


def _num_spaces(text: str) -> int:
    """Spaces at the beginning."""
    return len(text) - len(text.lstrip(" "))


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, _LEAST_LOGPROB)


def _joined(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Two deltas of a message, one after the other, as one."""
    more = {name: first[name] + value if name in first else value for name, value in second.items()}
    return {**first, **more}


def _by_text(
    tokens: Sequence[tuple[tuple[str, bytes], float | None]],
) -> dict[str, float | None]:
    """Log-probabilities by text, best first as given; of tokens of the same text the best."""
    best: dict[str, float | None] = {}
    for (text, _), logprob in tokens:
        best.setdefault(text, logprob)
    return best


def _token(token: tuple[str, bytes], logprob: float | None) -> dict[str, Any]:
    return {"token": token[0], "logprob": logprob, "bytes": list(token[1])}


def _tokens(prompt: int, new: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
