"""Structured outputs by llguidance: JSON, a regex, a choice of texts, or a grammar."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

_COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class GrammarError(ValueError):
    """A grammar that is not understood, or that takes more than the matcher's limits to follow."""


@dataclass(eq=False)
class GrammarCompiler:
    """Compiles grammars for one tokenizer, whose trie is built with the first of them.

    Args:
        tokenizer: the target's fast tokenizer; without one every grammar is refused.
        vocab_size: the target's vocabulary size.
        eos_ids: tokens that may end a text once it is complete.
    """

    tokenizer: PreTrainedTokenizerBase | None
    vocab_size: int
    eos_ids: frozenset[int]
    _tokens: Any = field(default=None, init=False)

    def compile(self, structure: Mapping[str, Any]) -> "LlguidanceGrammar":
        """Compile `SamplingParams.structured_outputs`.

        Raises:
            ValueError: the form is not understood, there is no fast tokenizer with an
                end-of-sequence token, it has more tokens than the target, or llguidance is not
                installed.
        """
        try:
            from llguidance import LLMatcher
            from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark
            from llguidance.hf import from_tokenizer
        except ImportError as error:
            raise ValueError(
                "structured_outputs: needs llguidance; pip install 'fastspec-kernels[grammar]'"
            ) from error
        if not isinstance(self.tokenizer, PreTrainedTokenizerFast) or not self.eos_ids:
            raise ValueError(
                "structured_outputs: needs a fast tokenizer with an end-of-sequence token"
            )
        try:
            if self._tokens is None:
                self._tokens = from_tokenizer(self.tokenizer, self.vocab_size, sorted(self.eos_ids))
            source = _source(LLMatcher, any_to_lark, structure)
            matcher = LLMatcher(self._tokens, source, log_level=0)
        except (ValueError, GbnfToLarkError) as error:
            raise GrammarError(f"structured_outputs: {error}") from error
        if not matcher.is_error():
            matcher.compute_bitmask()  # finds what compiling alone does not, such as endless forms
        if matcher.is_error():
            raise GrammarError(_reason(matcher))
        return LlguidanceGrammar(matcher)


@dataclass(eq=False)
class LlguidanceGrammar:
    """Tracks what may follow one text."""

    matcher: Any

    def copy(self) -> "LlguidanceGrammar":
        """Return one for another text with the same beginning."""
        return LlguidanceGrammar(self.matcher.deep_copy())

    def mask_after(self, path: list[int], words: np.ndarray) -> None:
        """Write the bits [ceil(V/32)] int32 of the tokens that may follow the text and a path.

        If the grammar does not allow the path, all bits are set.

        Raises:
            GrammarError: the matcher failed.
        """
        matcher = self.matcher.deep_copy() if path else self.matcher  # errors are permanent
        taken = matcher.try_consume_tokens(path) if path else 0
        mask = None
        if taken == len(path) and not matcher.is_error() and not matcher.is_stopped():
            mask = np.frombuffer(matcher.compute_bitmask(), np.int32)
        if matcher.is_error():  # also on the way along a path that it may allow
            raise GrammarError(_reason(matcher))
        if mask is not None:
            words[: len(mask)] = mask[: len(words)]
            words[len(mask) :] = 0

    def advance(self, token_id: int) -> bool:
        """Add a token to the text; return whether anything may follow it."""
        self.matcher.consume_token(token_id)
        return self.matcher.is_error() or not self.matcher.is_stopped()


_CAUSE = "error: "  # begins the line in which a regex's parser says what is wrong


def _reason(matcher: Any) -> str:
    """Return why a matcher failed, without the dumps of its source and its state that follow."""
    first, *others = matcher.get_error().partition("<state>")[0].splitlines()
    causes = [line[len(_CAUSE) :] for line in others if line.startswith(_CAUSE)]
    return " ".join([f"structured_outputs: {first}", *causes])


def _source(matcher: Any, any_to_lark: Any, structure: Mapping[str, Any]) -> str:
    """Return the form as llguidance's source."""
    ((kind, form),) = structure.items()
    if kind == "json_object":
        kind, form = "json", {"type": "object"}
    if kind == "json":
        schema = form if isinstance(form, str) else json.dumps(form)
        return matcher.grammar_from_json_schema(schema, defaults=_COMPACT)
    if kind == "regex":
        return matcher.grammar_from_regex(form)
    if kind == "choice":
        texts = " | ".join(json.dumps(text) for text in form)
        return matcher.grammar_from_lark(f"start: {texts}")
    return matcher.grammar_from_lark(any_to_lark(form))
