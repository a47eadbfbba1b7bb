"""Prompts of a model's chat template, and the messages that templates read."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from fastspec.config.checks import one_line, require, require_unicode

# Errors of a template, which is a program that runs on user input.
_TEMPLATE_ERRORS = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
)


def prompt_ids(tokenizer: PreTrainedTokenizerBase | None, text: str, chat: bool) -> list[int]:
    """Return a text's token ids; with `chat`, as a user message in the chat template.

    Raises:
        ValueError: there is no tokenizer, or no template.
    """
    if tokenizer is None:
        raise ValueError("target: text prompts need its tokenizer")
    if not chat:
        return tokenizer(text)["input_ids"]
    messages = [{"role": "user", "content": text}]
    return chat_prompt_ids(tokenizer, messages, add_generation_prompt=True)


def chat_prompt_ids(
    tokenizer: PreTrainedTokenizerBase | None,
    messages: Sequence[Mapping[str, Any]],
    /,
    **options: Any,
) -> list[int]:
    """Return a conversation's ids by the chat template, which writes special tokens itself.

    See `chat_text`.
    """
    text = chat_text(tokenizer, messages, **options)
    return cast(Any, tokenizer)(text, add_special_tokens=False)["input_ids"]


# Arguments of apply_chat_template that act only on ids.
_OF_TOKENIZING = {
    "tokenize",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
}


def chat_text(
    tokenizer: PreTrainedTokenizerBase | None,
    messages: Sequence[Mapping[str, Any]],
    /,
    **options: Any,
) -> str:
    """Format a conversation by the chat template.

    Args:
        messages: as the interfaces of OpenAI have them: a content may be a list of parts of type
            text, which are joined, and the arguments of tool calls may be JSON text, which is
            parsed, because templates expect a string and an object.
        options: further arguments of the tokenizer's apply_chat_template.
    Raises:
        ValueError: there is no tokenizer or no template, a message is malformed or has parts that
            are not text or more than that, or the template fails or does not read the tools.
    """
    messages = [_template_message(message) for message in messages]
    if tokenizer is None:
        raise ValueError("chat: messages need a tokenizer, but there is none")
    if taken := _OF_TOKENIZING & options.keys():
        raise ValueError(f"chat_template_kwargs: {min(taken)} does not apply, the result is text")
    if taken := {"self", "conversation", "messages"} & options.keys():
        raise ValueError(f"chat_template_kwargs: {min(taken)} is given by the messages")
    if tokenizer.chat_template is None and options.get("chat_template") is None:
        raise ValueError("chat: the target's tokenizer has no chat template; give a chat_template")
    try:
        text = str(tokenizer.apply_chat_template(cast(Any, messages), tokenize=False, **options))
    except _TEMPLATE_ERRORS as error:
        raise ValueError(f"messages: the chat template failed: {one_line(error)}") from error
    require_unicode("messages", text)
    if tools := options.get("tools"):
        template = tokenizer.get_chat_template(options.get("chat_template"), tools)
        if re.search(r"\btools\b", template) is None:
            raise ValueError("tools: the chat template does not read them: the model sees none")
    return text


def _template_message(message: Any) -> Mapping[str, Any]:
    """A message whose content is one text, as templates expect."""
    fits = isinstance(message, Mapping) and isinstance(message.get("role"), str)
    require("messages", message, fits, "objects with a role")
    content, expected = message.get("content"), "content: a string, or parts of type text"
    if isinstance(content, list):
        texts = [_text_of(part) for part in content]
        require("messages", content, None not in texts, expected)
        content = "".join(map(str, texts))
        message = {**message, "content": content}
    fits = isinstance(content, str) or (content is None and message["role"] == "assistant")
    require("messages", content, fits, expected)
    if (calls := message.get("tool_calls")) is not None:
        require("messages", calls, isinstance(calls, list), "tool_calls: a list")
        message = {**message, "tool_calls": [_tool_call(call) for call in calls]}
    return message


def _tool_call(call: Any) -> dict[str, Any]:
    """A call whose arguments are an object, as templates expect, not its JSON text."""
    fits = isinstance(call, dict) and isinstance(call.get("function"), dict)
    expected = "tool_calls: objects with a function, whose arguments are JSON"
    require("messages", call, fits, expected)
    function = call["function"]
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments else {}
        except (ValueError, RecursionError) as error:
            raise ValueError(f"messages: expected {expected}, got {arguments!r:.200}") from error
    return {**call, "function": {**function, "arguments": arguments}}


def _text_of(part: Any) -> str | None:
    is_text = isinstance(part, dict) and part.get("type", "text") == "text"
    text = part.get("text") if is_text else None
    if not isinstance(text, str):
        return None
    for name, value in part.items():
        if name not in ("type", "text") and value is not None:
            raise ValueError(f"messages: content: unknown field {name!r:.60} of a text part")
    return text
