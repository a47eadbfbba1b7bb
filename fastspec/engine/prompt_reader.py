"""Converts prompts to token ids for one target."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase

from fastspec.config.checks import is_int, require_unicode
from fastspec.engine.prompts import Prompt, PromptTooLong, as_prompt


@dataclass(frozen=True)
class PromptReader:
    """Converts prompts for one target to token ids and checks them.

    Attributes:
        tokenizer: None if the engine has none.
        vocab_size: ids must be below this.
        max_model_len: a prompt must be shorter than this.
        template: contains {input_text} where a text prompt goes.
    """

    tokenizer: PreTrainedTokenizerBase | None
    vocab_size: int
    max_model_len: int
    template: str | None

    def for_another_thread(self) -> "PromptReader":
        """Return a copy with its own tokenizer; a tokenizer is not safe in several threads."""
        return replace(self, tokenizer=deepcopy(self.tokenizer))

    def ids(self, prompt: Prompt) -> list[int]:
        """Return a prompt's ids; a text prompt is first inserted into the template.

        Raises:
            ValueError: not a prompt, an empty one, ids outside the vocabulary, more tokens than the
                model allows, or a text without a tokenizer.
        """
        prompt = as_prompt(prompt)
        ids = self._text_ids(prompt) if isinstance(prompt, str) else prompt
        return self.checked_ids("prompt", ids)

    def in_template(self, prompt: str) -> str:
        """Return a text prompt inserted into the template."""
        return self.template.replace("{input_text}", prompt) if self.template else prompt

    def plain_ids(
        self, name: str, text: str | Sequence[int], add_special_tokens: bool = False
    ) -> list[int]:
        """Return the ids of a text of any length, by default without added special tokens."""
        if not isinstance(text, str):
            return self._known_ids(name, text)
        if self.tokenizer is None:
            raise ValueError(f"{name}: a text needs a tokenizer, but the engine has none")
        require_unicode(name, text)
        ids = self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
        return self._known_ids(name, ids)

    def text_of(self, name: str, token_ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens included; ValueError begins with `name`."""
        if self.tokenizer is None:
            raise ValueError(f"{name}: their text needs a tokenizer, but the engine has none")
        return str(self.tokenizer.decode(self._known_ids(name, token_ids)))

    def checked_ids(self, name: str, token_ids: Sequence[int]) -> list[int]:
        """Return ids as plain ints; ValueError unless they form a valid prompt, see `ids`."""
        if not token_ids:
            raise ValueError(f"{name}: is empty")
        if len(token_ids) >= self.max_model_len:
            raise PromptTooLong(
                f"{name}: has {len(token_ids)} tokens; the limit is {self.max_model_len - 1},"
                " to leave room for one new token"
            )
        return self._known_ids(name, token_ids)

    def _text_ids(self, prompt: str) -> list[int]:
        if self.tokenizer is None:
            raise ValueError("prompt: a text needs a tokenizer, but the engine has none; pass ids")
        text = self.in_template(prompt)
        require_unicode("prompt", text)
        return self.tokenizer(text)["input_ids"]

    def _known_ids(self, name: str, token_ids: Sequence[int]) -> list[int]:
        for token_id in token_ids:
            if not is_int(token_id) or not 0 <= token_id < self.vocab_size:
                raise ValueError(
                    f"{name}: token id {token_id!r} is not in 0..{self.vocab_size - 1}"
                )
        return [int(token_id) for token_id in token_ids]
