"""Prompts as token ids that one target can read."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from fastspec.config import is_int
from fastspec.config.checks import require_unicode
from fastspec.engine.prompts import Message, Prompt, as_prompt
from fastspec.models.loading import chat_text


@dataclass(frozen=True)
class PromptReader:
    """Reads prompts for one target.

    Attributes:
        tokenizer: None where the engine has none.
        vocab_size: ids are below this.
        max_model_len: a prompt is shorter than this.
        template: holds {input_text} where a text prompt goes.
    """

    tokenizer: PreTrainedTokenizerBase | None
    vocab_size: int
    max_model_len: int
    template: str | None

    def for_another_thread(self) -> "PromptReader":
        """The same with a tokenizer of its own: one tokenizer is no good in several threads."""
        return replace(self, tokenizer=deepcopy(self.tokenizer))

    def ids(self, prompt: Prompt) -> list[int]:
        """A prompt's ids, of a text with the template around it.

        Raises:
            ValueError: an empty prompt, ids outside the vocabulary, a prompt longer than the
                model, a text without a tokenizer, or something else than a prompt.
        """
        prompt = as_prompt(prompt)
        ids = self._text_ids(prompt) if isinstance(prompt, str) else prompt
        return self.checked_ids("prompt", ids)

    def chat_text(self, messages: Sequence[Message], options: Mapping[str, Any]) -> str:
        """A conversation in the chat template; see `fastspec.models.loading.chat_text`."""
        return chat_text(self.tokenizer, messages, **options)

    def chat_ids(self, text: str) -> list[int]:
        """The ids of what `chat_text` made, which has its special tokens; see `ids`."""
        assert self.tokenizer is not None
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return self.checked_ids("prompt", ids)

    def corpus_ids(self, text: str | Sequence[int]) -> list[int]:
        """The ids of a text of any length, with nothing put before it."""
        if not isinstance(text, str):
            return self._known_ids("texts", text)
        if self.tokenizer is None:
            raise ValueError("texts: a text needs a tokenizer, and the engine has none")
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return self._known_ids("texts", ids)

    def checked_ids(self, name: str, token_ids: Sequence[int]) -> list[int]:
        """Ids as plain ints; ValueError unless they are a prompt, see `ids`."""
        if not token_ids:
            raise ValueError(f"{name}: is empty")
        if len(token_ids) >= self.max_model_len:
            raise ValueError(
                f"{name}: has {len(token_ids)} tokens; the limit is {self.max_model_len - 1},"
                " which leaves room for one new token"
            )
        return self._known_ids(name, token_ids)

    def _text_ids(self, prompt: str) -> list[int]:
        if self.tokenizer is None:
            raise ValueError("prompt: a text needs a tokenizer, and the engine has none; pass ids")
        text = self.template.replace("{input_text}", prompt) if self.template else prompt
        require_unicode("prompt", text)
        return self.tokenizer(text)["input_ids"]

    def _known_ids(self, name: str, token_ids: Sequence[int]) -> list[int]:
        for token_id in token_ids:
            if not is_int(token_id) or not 0 <= token_id < self.vocab_size:
                raise ValueError(
                    f"{name}: token id {token_id!r} is not in 0..{self.vocab_size - 1}"
                )
        return [int(token_id) for token_id in token_ids]
