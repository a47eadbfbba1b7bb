"""Prompts of a model's chat template, the messages that it reads, and those in a reply."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, cast
from uuid import uuid4

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from fastspec.config.checks import one_line, refuse, require, require_unicode

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
            are not text or more than that, the last one is to be continued and has no content, or
            the template fails or does not read the tools or calls of them.
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
    if options.get("continue_final_message") and not (messages and messages[-1].get("content")):
        raise ValueError("continue_final_message: the last message has no content to continue")
    _check_read(tokenizer, messages, options)
    text = _rendered(tokenizer, messages, options)
    require_unicode("messages", text)
    return text


def _check_read(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any],
) -> None:
    """Refuse tools, and calls of them, that the template would leave out."""
    tools, template = options.get("tools"), ""
    has_calls = any(message.get("tool_calls") for message in messages)
    if tools or has_calls:
        template = tokenizer.get_chat_template(options.get("chat_template"), tools)
    if tools and re.search(r"\btools\b", template) is None:
        raise ValueError("tools: the chat template does not read them: the model sees none")
    if has_calls and "tool_calls" not in template:  # it may still write whole messages
        texts = [{**message, "content": message.get("content") or ""} for message in messages]
        without = [{**message, "tool_calls": None} for message in texts]
        if _rendered(tokenizer, texts, options) == _rendered(tokenizer, without, options):
            raise ValueError("messages: the chat template does not read tool_calls: it drops them")


# What a template writes that takes a list of parts for a text.
_PARTS_AS_TEXT = re.compile(r"""['"]type['"]: *['"]text['"]""")


def _rendered(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any],
) -> str:
    """Run the template on contents that are texts, or, if it does not read these, on parts.

    Templates of models that also take images may look only for parts, and then leave a text out.
    A text could be found by chance in what a template writes itself, so numbers take its place.
    """

    def render(given: Iterable[Mapping[str, Any]]) -> str:
        return str(tokenizer.apply_chat_template(cast(Any, [*given]), tokenize=False, **options))

    numbered = [
        {**message, "content": str(uuid4().int)} if message.get("content") else message
        for message in messages
    ]
    asked = [message for message in numbered if message["role"] == "user"] or numbered

    def reads(form: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> bool:
        with suppress(*_TEMPLATE_ERRORS):
            text = render(map(form, numbered))
            is_complete = all((message.get("content") or "") in text for message in asked)
            return is_complete and _PARTS_AS_TEXT.search(text) is None
        return False

    in_parts = not reads(dict) and reads(_in_parts)
    try:
        return render(map(_in_parts, messages) if in_parts else messages)
    except _TEMPLATE_ERRORS as error:
        raise ValueError(f"messages: the chat template failed: {one_line(error)}") from error


def _in_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if content else message


_REASONING = ("reasoning_content", "thinking")  # as response templates call it


def reply_message(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    prompt: str,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """Read a reply by the tokenizer's response template, as OpenAI's interface has messages.

    Args:
        text: with special tokens.
        prompt: the conversation, which may have begun the message, for example its reasoning.
        tools: those that may be called, which say the types of arguments.
    Returns:
        The content, with reasoning_content and tool_calls if there are any. If the template cannot
        read a reply, for example a call that was cut, or if it calls without tools, all of it is
        the content.
    """
    try:
        parser = tokenizer.get_response_parser(prefix=prompt, tools=cast(Any, tools))
        events = [*parser.feed(text), *parser.finalize()[1]]
        values = [each["value"] for each in events if _is_of(each, "region_close", "tool_calls")]
        calls = [call for value in values for call in _openai_calls(value)]
        if calls and not tools:
            return {"content": text}
    except (*_TEMPLATE_ERRORS, RecursionError):
        return {"content": text}
    # The parser's own message has only the last of several contents.
    content, reasoning = (
        "".join(each["text"] for each in events if _is_of(each, "region_chunk", *names))
        for names in (("content",), _REASONING)
    )
    if not calls and not reasoning:
        has_reasoned = any(_is_of(each, "region_open", *_REASONING) for each in events)
        return {"content": content if has_reasoned else content or text}
    message: dict[str, Any] = {"content": content.strip() or None}
    message |= {"reasoning_content": reasoning.strip()} if reasoning else {}
    return message | ({"tool_calls": calls} if calls else {})


class ReplyReader:
    """Reads a reply by the tokenizer's response template while it is written.

    `feed` and `end` return what is new in OpenAI's form: content and reasoning_content as far as
    they are known, and tool_calls, each as a whole. From where the template cannot read a reply on,
    or where it calls without tools, its text is content.

    Args:
        prompt, tools: see `reply_message`.
    Attributes:
        num_calls: tool calls returned so far.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt: str,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ):
        self.num_calls = 0
        self._may_call = bool(tools)
        self._unreturned = ""  # what the parser holds back, or all of a call that has begun
        self._is_in_call = False
        self._whole: str | None = ""  # None once anything was returned
        self._parser: Any = None  # None once a reply cannot be read
        with suppress(*_TEMPLATE_ERRORS):
            self._parser = tokenizer.get_response_parser(prefix=prompt, tools=cast(Any, tools))

    def feed(self, text: str) -> dict[str, Any]:
        """Read more of the reply."""
        delta: dict[str, Any] = {}
        for place, char in enumerate(text):  # one at a time, to know where delimiters end
            if self._parser is None:
                delta["content"] = delta.get("content", "") + text[place:]
                break
            self._unreturned += char
            if self._whole is not None:
                self._whole += char
            self._read(partial(self._parser.feed, char), delta)
        return delta

    def end(self) -> dict[str, Any]:
        """Return what the end of the reply makes known."""
        delta: dict[str, Any] = {}
        if self._parser is not None:
            self._read(lambda: self._parser.finalize()[1], delta)
        return {"content": self._whole} if self._whole else delta

    def _read(self, read: Callable[[], Iterable[Mapping[str, Any]]], delta: dict[str, Any]) -> None:
        try:
            for event in read():
                self._add(event, delta)
            if not self._is_in_call:
                num_held = len(self._parser._buffer) - self._parser._pos
                self._unreturned = self._unreturned[len(self._unreturned) - num_held :]
        except (*_TEMPLATE_ERRORS, RecursionError):
            delta["content"] = delta.get("content", "") + self._unreturned
            self._parser = None
        if delta:
            self._whole = None

    def _add(self, event: Mapping[str, Any], delta: dict[str, Any]) -> None:
        kind, field = event["type"], event["field"]
        if kind == "region_open" and field in _REASONING:
            self._whole = None  # the rest of a reply may be empty
        if field == "tool_calls":
            if not self._may_call:
                raise ValueError("a call without tools")
            self._is_in_call = kind != "region_close"
            if kind == "region_close":
                calls = _openai_calls(event["value"])
                numbered = [{"index": self.num_calls + n, **call} for n, call in enumerate(calls)]
                delta["tool_calls"] = [*delta.get("tool_calls", ()), *numbered]
                self.num_calls += len(calls)
        elif kind == "region_chunk" and (field == "content" or field in _REASONING):
            name = "content" if field == "content" else "reasoning_content"
            delta[name] = delta.get(name, "") + event["text"]
            self._unreturned = self._unreturned.removeprefix(event["text"])


def _is_of(event: Mapping[str, Any], kind: str, *fields: str) -> bool:
    return event["type"] == kind and event["field"] in fields


def _openai_calls(value: Any) -> list[dict[str, Any]]:
    """The calls that a region of a reply holds: one, or a list of them."""
    return [_openai_call(call) for call in (value if isinstance(value, list) else [value])]


def _openai_call(call: Any) -> dict[str, Any]:
    """A call that a response template has read, with its arguments as JSON text."""
    name, arguments = call["function"]["name"], call["function"].get("arguments", {})
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, allow_nan=False)
    for each in (name, arguments):
        require("tool_calls", each, isinstance(each, str), "texts")
        require_unicode("tool_calls", each)
    function = {"name": name, "arguments": arguments}
    return {"id": f"call_{uuid4().hex}", "type": "function", "function": function}


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
    for name in ("function_call", "audio", "refusal"):  # templates do not read them
        refuse("messages", message.get(name), f"{name} is not supported")
    if content is None and not message.get("tool_calls"):
        message = {**message, "content": ""}
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
