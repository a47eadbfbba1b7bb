"""The prompts of requests as token ids, within a server's limits; replies as messages."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from fastspec.config.serve import ServeConfig
from fastspec.engine.engine import Engine
from fastspec.engine.outputs import RequestOutput
from fastspec.engine.prompts import Message, Prompt, PromptTooLong
from fastspec.models.chat import ReplyReader, chat_text, reply_message
from fastspec.models.shared_vocabulary import BYTE_OF
from fastspec.serve.requests import DetokenizeRequest, ParsedRequest, TokenizeRequest

# Characters that NFC makes one of at most: no character's canonical decomposition has more.
_NFC = 4
_SPLITTERS = ("ByteLevel", "Digits", "Punctuation", "Split")  # that keep what they split


class PromptMaker:
    """Makes the ids of requests' prompts, texts of ids, and messages of replies.

    Everything but `check_length` and `text_read` is called in one thread of its own.

    Attributes:
        reads_replies: whether the tokenizer has a response template.
    """

    def __init__(self, engine: Engine, config: ServeConfig):
        self._reader = engine.prompt_reader()
        template = getattr(self._reader.tokenizer, "response_template", None)
        self.reads_replies = template is not None
        limits = [engine.max_model_len - 1, config.max_prompt_tokens]
        self._most = min(limit for limit in limits if limit is not None)
        longest = longest_token(self._reader.tokenizer)
        self._most_characters = None if longest is None else self._most * longest

    def check_length(self, text: str) -> None:
        """Refuse at once, with ValueError, a text that must have more tokens than the limit."""
        most = self._most_characters
        if most is not None and len(text) > most:
            raise PromptTooLong(
                f"prompt: has {len(text)} characters, more than fit in {self._most} tokens, the"
                " limit"
            )

    def ids(self, prompt: Prompt) -> list[int]:
        """The ids of a prompt; ValueError for one that is invalid or too long."""
        return self._within_limit(self._reader.ids(prompt))

    def text_read(self, prompt: Any) -> Any:
        """A prompt as the model reads it: a text is inserted into the template."""
        return self._reader.in_template(prompt) if isinstance(prompt, str) else prompt

    def chat_ids(self, messages: Sequence[Message], template: Mapping[str, Any]) -> list[int]:
        """The ids of a conversation, with arguments for its template; ValueError as for `ids`."""
        text = chat_text(self._reader.tokenizer, messages, **template)
        self.check_length(text)
        ids = self._reader.plain_ids("prompt", text)
        return self._within_limit(self._reader.checked_ids("prompt", ids))

    def prediction_ids(self, prediction: str | Sequence[int]) -> list[int]:
        """The ids of what an output may resemble; ValueError as for `ids`."""
        return self._within_limit(self._reader.plain_ids("prediction", prediction), "prediction")

    def tokenized(self, asked: TokenizeRequest) -> dict[str, Any]:
        """vLLM's reply with the ids of a prompt, which may be longer than the model allows.

        Raises:
            ValueError: it is invalid, or `check_length` refuses it.
        """
        if asked.template is None:
            text = self._reader.in_template(asked.prompt)
        else:
            text = chat_text(self._reader.tokenizer, asked.prompt, **asked.template)
        self.check_length(text)
        ids = self._reader.plain_ids("prompt", text, asked.add_special_tokens)
        tokenizer = self._reader.tokenizer
        assert tokenizer is not None
        return {
            "count": len(ids),
            "max_model_len": self._reader.max_model_len,
            "tokens": ids,
            "token_strs": tokenizer.convert_ids_to_tokens(ids) if asked.token_strs else None,
        }

    def detokenized(self, asked: DetokenizeRequest) -> dict[str, Any]:
        """vLLM's reply with the text of ids; ValueError for ids outside the vocabulary."""
        return {"prompt": self._reader.text_of("tokens", asked.tokens)}

    def replies(
        self, asked: ParsedRequest, outputs: Sequence[RequestOutput]
    ) -> dict[int, dict[str, Any]]:
        """Outputs for a conversation as messages, by index; see `reply_message`."""
        given = self._read_by_template(asked)
        return {o.index: reply_message(given[0], o.text, *given[1:]) for o in outputs}

    def reply_readers(self, asked: ParsedRequest) -> list[ReplyReader]:
        """A reader for each answer to a conversation."""
        given = self._read_by_template(asked)
        return [ReplyReader(*given) for _ in range(asked.params.n)]

    def _read_by_template(self, asked: ParsedRequest) -> tuple[PreTrainedTokenizerBase, str, Any]:
        """What replies are read with: the tokenizer, the text of the conversation, and tools."""
        tokenizer, template = self._reader.tokenizer, asked.template or {}
        assert tokenizer is not None
        prompt = chat_text(tokenizer, cast(Any, asked.prompts), **template)
        return tokenizer, prompt, template.get("tools")

    def _within_limit(self, ids: list[int], name: str = "prompt") -> list[int]:
        if len(ids) > self._most:
            kind = PromptTooLong if name == "prompt" else ValueError
            raise kind(f"{name}: has {len(ids)} tokens; the limit is {self._most}")
        return ids


def longest_token(tokenizer: PreTrainedTokenizerBase | None) -> int | None:
    """Maximum number of characters that one token stands for; None if that is not certain.

    It is certain for byte-level BPE with all bytes, if no character is dropped on the way: no white
    space next to an added token, and none by a normaliser or by what splits the text.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return None
    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    model, added = parts["model"], parts["added_tokens"]
    splitters = _steps(parts["pre_tokenizer"], "pretokenizers")
    normalizers = [each["type"] for each in _steps(parts["normalizer"], "normalizers")]
    keeps_all = (
        model["type"] == "BPE"
        and not model["continuing_subword_prefix"]
        and not model["end_of_word_suffix"]
        and BYTE_OF.keys() <= model["vocab"].keys()
        and any(each["type"] == "ByteLevel" for each in splitters)
        and all(each["type"] in _SPLITTERS for each in splitters)
        and all(each.get("behavior") != "Removed" for each in splitters)
        and not any(token["lstrip"] or token["rstrip"] for token in added)
        and normalizers in ([], ["NFC"])
    )
    if not keeps_all:
        return None
    longest = max(map(len, [*model["vocab"], *(token["content"] for token in added)]))
    return longest * (_NFC if normalizers else 1)


def _steps(part: Mapping[str, Any] | None, name: str) -> list[Mapping[str, Any]]:
    """The steps of a part of a tokenizer, including those of sequences."""
    if part is None:
        return []
    if part["type"] != "Sequence":
        return [part]
    return [step for each in part[name] for step in _steps(each, name)]
