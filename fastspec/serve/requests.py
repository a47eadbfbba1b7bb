"""The bodies of OpenAI's requests, converted to prompts and parameters of the engine."""

import json
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from fastspec.config import SamplingParams
from fastspec.config.checks import counted, is_int, refuse, require
from fastspec.config.files import unambiguous
from fastspec.config.options import options_of
from fastspec.config.serve import ServeConfig
from fastspec.engine.prompts import Message

_COMPLETION_TOKENS = 16  # what OpenAI's interface has where max_tokens is not given
_MOST_ITEMS = 1024  # of a list or mapping that every token may be compared with
_MOST_LOGPROBS = 20  # as in OpenAI's API
_MOST_FORM_BYTES = 2**16  # of a grammar, which is read recursively
_MOST_STOPS = 16
_LIMITED = {"stop": _MOST_STOPS, "bad_words": _MOST_STOPS, "prediction": 2**17}
# Fields that both kinds of requests name as SamplingParams does.
_SAMPLING = options_of(SamplingParams).keys() - {
    *("max_tokens", "logprobs", "prompt_logprobs", "logits_processors"),
    *("drafter", "num_speculative_tokens"),
}
_GUIDED = {f"guided_{kind}": kind for kind in ("json", "regex", "choice", "grammar")}
# Change nothing here.
_UNUSED = {"user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
_COMMON = {"model", "stream", "stream_options", "speculation", "response_format"}
_COMMON |= {*_SAMPLING, *_GUIDED, *_UNUSED, "max_tokens", "logprobs"}
_COMMON |= {"store", "metadata", "service_tier"}
COMPLETION_FIELDS = _COMMON | {"prompt", "echo", "best_of", "suffix"}
_TEMPLATE_FLAGS = {"add_generation_prompt", "continue_final_message"}
_OF_TEMPLATES = {"tools", "chat_template_kwargs", *_TEMPLATE_FLAGS}
CHAT_FIELDS = _COMMON | {
    "messages",
    "max_completion_tokens",
    "top_logprobs",
    "modalities",
    "tool_choice",
    "parallel_tool_calls",
    *_OF_TEMPLATES,
}
TOKENIZE_FIELDS = {"model", "prompt", "messages", "add_special_tokens", "return_token_strs"}
TOKENIZE_FIELDS |= _OF_TEMPLATES
DETOKENIZE_FIELDS = {"model", "tokens"}
FIELDS: Mapping[str, Set[str]] = {
    "completion": COMPLETION_FIELDS,
    "chat": CHAT_FIELDS,
    "predict": {"prompt"},
    "tokenize": TOKENIZE_FIELDS,
    "detokenize": DETOKENIZE_FIELDS,
}
# What the engine's errors name, and the fields that may have set it; a format may also be text.
_SET_BY = {
    "structured_outputs": (*_GUIDED, "response_format"),
    "num_speculative_tokens": ("speculation",),
    "n": ("prompt",),
    "prompt_logprobs": ("echo",),
    "prompt": ("messages",),
    "chat": ("messages",),
}
_OF_SCHEMAS = {"name": str, "description": str, "strict": bool}  # change nothing here
_STREAM_OPTIONS = {"include_usage", "continuous_usage_stats", "include_obfuscation"}
_SPECULATION = {"method", "drafter", "num_speculative_tokens", "metrics", "sources"}


@dataclass(frozen=True)
class ParsedRequest:
    """A client's request.

    Attributes:
        prompts: texts or ids, or one conversation.
        params: of all prompts.
        stream: whether tokens are sent as they are generated.
        include_usage: whether a stream ends with the number of tokens.
        running_usage: whether each of its chunks has the number so far.
        metrics, sources: whether the response has acceptance statistics, and who wrote each token.
        template: arguments for a conversation's template.
        fields: names of those that the client gave.
        is_open_ended: whether params.max_tokens is the server's limit rather than the client's
            choice, so that fewer tokens are acceptable.
        echo: whether each text begins with its prompt.
        is_echo_alone: whether nothing follows the prompt; the engine writes a token, which is
            dropped.
    """

    prompts: Sequence[str | list[int]] | Sequence[Message]
    params: SamplingParams
    stream: bool = False
    include_usage: bool = False
    running_usage: bool = False
    metrics: bool = False
    sources: bool = False
    template: Mapping[str, Any] | None = None
    fields: Set[str] = frozenset()
    is_open_ended: bool = False
    echo: bool = False
    is_echo_alone: bool = False


@dataclass(frozen=True)
class TokenizeRequest:
    """A client's request for the ids of a prompt.

    Attributes:
        prompt: a text, or a conversation.
        template: arguments for a conversation's template; None for a text.
        add_special_tokens: whether the tokenizer adds those of its own, such as a first one.
        token_strs: whether the response has the tokens as the vocabulary writes them, too.
        fields: names of those that the client gave.
    """

    prompt: Any
    template: Mapping[str, Any] | None
    add_special_tokens: bool
    token_strs: bool
    fields: Set[str]


@dataclass(frozen=True)
class DetokenizeRequest:
    """A client's request for the text of ids; see `TokenizeRequest`."""

    tokens: Sequence[int]
    fields: Set[str]


def field_of(message: str, given: Set[str], known: Set[str]) -> str | None:
    """The field of a request that an error is about, by the name that its message begins with.

    Args:
        given, known: the fields that the client gave, and those that it could have given.
    """
    begun = re.match(r"([\w-]+)(\.\w+)*: ", message)
    name = begun[1] if begun else ""
    given_names = (each for each in (name, *_SET_BY.get(name, ())) if each in given)
    return next(given_names, name if name in known else None)


def parse_body(body: bytes) -> dict[str, Any]:
    """The JSON object in a body; ValueError for anything else."""
    try:
        parsed = json.loads(body, parse_constant=_no_number, object_pairs_hook=unambiguous)
        json.dumps(parsed, ensure_ascii=False).encode()  # escapes may make halves of characters
    except (ValueError, RecursionError) as error:
        raise ValueError(f"body: invalid JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise ValueError(f"body: expected an object, got {type(parsed).__name__}")
    return parsed


def completion(
    body: Mapping[str, Any], config: ServeConfig, drafters: Mapping[str, str | None]
) -> ParsedRequest:
    """A body of /v1/completions.

    Args:
        drafters: names that `speculation` accepts, with the engine's names for them.
    Raises:
        ValueError: an unknown field, or a value that cannot be served.
    """
    if body.get("messages") is not None:
        raise ValueError("messages: use prompt, or /v1/chat/completions for messages")
    given = _given(body, COMPLETION_FIELDS)
    prompt = given.get("prompt")
    several: Any = [prompt] if isinstance(prompt, str) or _is_ids(prompt) else prompt
    fits = isinstance(several, list) and bool(several)
    fits = fits and (all(map(_is_text, several)) or all(map(_is_ids, several)))
    require("prompt", prompt, fits, "a string, a list of token ids, or a list of either")
    refuse("suffix", given.get("suffix", "") or None, "not supported")
    echo = _flag(given, "echo")
    refuse("echo", (echo and _flag(given, "stream")) or None, "not with stream")
    n, best_of = given.get("n", 1), given.get("best_of")
    fits = best_of is None or (is_int(best_of) and best_of == n)
    require("best_of", best_of, fits, f"n ({n!r})")
    fields = _sampling(given, config, len(several))
    least = 0 if echo else 1
    num_tokens = _max_tokens(given, "max_tokens", config, _COMPLETION_TOKENS, least)
    fields["max_tokens"] = max(1, num_tokens)
    logprobs = given.get("logprobs")
    if logprobs is not None:
        fits = is_int(logprobs) and 0 <= logprobs <= _MOST_LOGPROBS
        require("logprobs", logprobs, fits, f"0 to {_MOST_LOGPROBS}")
        fields["logprobs"] = logprobs
        if echo:
            fields["prompt_logprobs"] = logprobs
    asked = _parsed(several, fields, given, drafters)
    return replace(asked, echo=echo, is_echo_alone=num_tokens == 0)


def chat(
    body: Mapping[str, Any], config: ServeConfig, drafters: Mapping[str, str | None]
) -> ParsedRequest:
    """A body of /v1/chat/completions; see `completion`."""
    if body.get("prompt") is not None:
        raise ValueError("prompt: use messages, or /v1/completions for a prompt")
    given = _given(body, CHAT_FIELDS)
    messages = _messages(given)
    fields = _sampling(given, config, 1)
    name = "max_tokens" if "max_tokens" in given else "max_completion_tokens"
    if {"max_tokens", "max_completion_tokens"} <= {*given}:
        refuse("max_tokens", given["max_tokens"], "not with max_completion_tokens")
    fields["max_tokens"] = _max_tokens(given, name, config, None)
    modalities = given.get("modalities", ["text"])
    require("modalities", modalities, modalities == ["text"], '["text"]')
    wants = _flag(given, "logprobs")
    top = given.get("top_logprobs")
    require("top_logprobs", top, top in (None, 0) or wants, "null or 0 unless logprobs is true")
    fits = top is None or (is_int(top) and 0 <= top <= _MOST_LOGPROBS)
    require("top_logprobs", top, fits, f"0 to {_MOST_LOGPROBS}")
    if wants:
        fields["logprobs"] = 0 if top is None else top
    asked = _parsed(messages, fields, given, drafters, _template(given))
    return replace(asked, is_open_ended=name not in given)


def tokenize(body: Mapping[str, Any]) -> TokenizeRequest:
    """A body of /tokenize; ValueError for an unknown field or a wrong value."""
    given = _given(body, TOKENIZE_FIELDS)
    prompt, template = given.get("prompt"), None
    if "messages" in given:
        refuse("prompt", prompt, "not with messages")
        prompt, template = _messages(given), _template(given)
    else:
        require("prompt", prompt, _is_text(prompt), "a string, or messages")
        for name in sorted(_OF_TEMPLATES):
            refuse(name, given.get(name), "only with messages")
    adds = _flag(given, "add_special_tokens", default=template is None)
    return TokenizeRequest(prompt, template, adds, _flag(given, "return_token_strs"), given.keys())


def detokenize(body: Mapping[str, Any]) -> DetokenizeRequest:
    """A body of /detokenize; see `tokenize`."""
    given = _given(body, DETOKENIZE_FIELDS)
    tokens: Any = given.get("tokens")
    require("tokens", tokens, tokens == [] or _is_ids(tokens), "a list of token ids")
    return DetokenizeRequest(tokens, given.keys())


def _messages(given: Mapping[str, Any]) -> list[Any]:
    messages: Any = given.get("messages")
    fits = isinstance(messages, list) and bool(messages)
    require("messages", messages, fits, "a non-empty list of messages")
    return messages


def _given(body: Mapping[str, Any], known: set[str]) -> dict[str, Any]:
    """The fields of a body, without those that are null, which clients send of any field."""
    given = {name: value for name, value in body.items() if value is not None}
    _check_names("", given, known)
    store, metadata = given.get("store"), given.get("metadata", {})
    fits = store is None or store is False
    require("store", store, fits, "false (nothing is stored)")
    require("metadata", metadata, isinstance(metadata, dict), "an object")
    tier = given.get("service_tier", "auto")
    fits = tier in ("auto", "default")
    require("service_tier", tier, fits, "auto or default (all requests are served alike)")
    return given


def _sampling(given: Mapping[str, Any], config: ServeConfig, num_prompts: int) -> dict[str, Any]:
    """The fields that go to SamplingParams unchanged, within the server's limits."""
    fields = {name: value for name, value in given.items() if name in _SAMPLING}
    if "prediction" in fields:
        fields["prediction"] = _prediction(fields["prediction"])
    for name, value in fields.items():
        most = _LIMITED.get(name, _MOST_ITEMS)
        fits = not isinstance(value, (list, dict)) or len(value) <= most
        require(name, value, fits, f"at most {most} entries")
    n = fields.get("n", 1)
    require("n", n, is_int(n) and n >= 1, "an int >= 1")
    most = config.max_n
    expected = f"at most {counted(most, 'text')} for {counted(num_prompts, 'prompt')}"
    require("n", n, n * num_prompts <= most, expected)
    forms = {kind: given[name] for name, kind in _GUIDED.items() if name in given}
    if "response_format" in given:
        form = _response_format(given["response_format"])
        refuse("response_format", (forms and form) or None, "not with guided_*")
        forms |= form
    if forms:
        refuse("structured_outputs", fields.get("structured_outputs"), "also given by other fields")
        fields["structured_outputs"] = forms
    form = fields.get("structured_outputs")
    size, most = len(json.dumps(form)), _MOST_FORM_BYTES
    require("structured_outputs", form, size <= most, f"at most {most} bytes of JSON")
    return fields


def _response_format(form: Any) -> dict[str, Any]:
    """OpenAI's response_format as structured_outputs."""
    kind = form.get("type") if isinstance(form, dict) else None
    expected = "an object whose type is text, json_object or json_schema"
    require("response_format", form, kind in ("text", "json_object", "json_schema"), expected)
    _check_names("response_format.", form, {"type", "json_schema"})
    inner = form.get("json_schema")
    if kind != "json_schema":
        refuse("response_format.json_schema", inner, f"not with type {kind}")
        return {} if kind == "text" else {"json_object": True}
    inner = inner if isinstance(inner, dict) else {}
    schema = inner.get("schema")
    fits = isinstance(schema, dict)
    require("response_format", form, fits, 'a schema: {"json_schema": {"schema": {...}}}')
    place = "response_format.json_schema."
    _check_names(place, inner, {"schema", *_OF_SCHEMAS})
    for name, type_ in _OF_SCHEMAS.items():
        value = inner.get(name)
        fits = value is None or isinstance(value, type_)
        require(f"{place}{name}", value, fits, f"a {type_.__name__}")
    return {"json": schema}


def _prediction(given: Any) -> Any:
    """OpenAI's prediction as a text; others as SamplingParams takes them."""
    if not isinstance(given, dict):
        return given
    _check_names("prediction.", given, {"type", "content"})
    kind, content = given.get("type"), given.get("content")
    require("prediction", given, kind == "content", "an object whose type is content")
    if _is_text(content):
        return content
    expected = "a content that is a text or a list of parts with text"
    require("prediction", given, isinstance(content, list), expected)
    assert isinstance(content, list)
    for part in content:
        fits = isinstance(part, dict) and part.get("type") == "text" and _is_text(part.get("text"))
        require("prediction", part, fits, expected)
        _check_names("prediction.content.", part, {"type", "text"})
    return "".join(part["text"] for part in content)


def _check_names(place: str, given: Mapping[str, Any], known: Set[str]) -> None:
    if unknown := sorted({*given} - known):
        expected = ", ".join(sorted(known))
        raise ValueError(f"{place}{unknown[0]:.60}: unknown field; known are {expected}")


def _max_tokens(
    given: Mapping[str, Any], name: str, config: ServeConfig, default: int | None, least: int = 1
) -> int:
    """Maximum number of new tokens; None as default is as many as the server allows."""
    most = config.max_completion_tokens
    value = given.get(name, min(default or most, most))
    fits = is_int(value) and least <= value <= most
    require(name, value, fits, f"an int from {least} to {most}")
    return value


def _template(given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments for the chat template; never another template, which is a program."""
    template = given.get("chat_template_kwargs", {})
    require("chat_template_kwargs", template, isinstance(template, dict), "an object")
    if "chat_template" in template:
        raise ValueError("chat_template_kwargs: chat_template cannot be set by requests")
    for name in sorted({"tools", *_TEMPLATE_FLAGS}):
        refuse("chat_template_kwargs", template.get(name), f"{name} is a field of its own")
    tools, choice = given.get("tools"), given.get("tool_choice")
    fits = tools is None or (isinstance(tools, list) and all(isinstance(t, dict) for t in tools))
    require("tools", tools, fits, "a list of objects")
    expected = "auto or none (the model decides whether it calls)"
    require("tool_choice", choice, choice in (None, "auto", "none"), expected)
    _flag(given, "parallel_tool_calls")  # the model's text has as many calls as it has
    continues = _flag(given, "continue_final_message")
    begins = _flag(given, "add_generation_prompt", default=not continues)
    both = (continues and begins) or None
    refuse("continue_final_message", both, "not with add_generation_prompt")
    template = {**template, "add_generation_prompt": begins}
    if continues:
        template["continue_final_message"] = True
    if tools and choice != "none":
        template["tools"] = tools
    return template


def _parsed(
    prompts: Sequence[Any],
    fields: dict[str, Any],
    given: Mapping[str, Any],
    drafters: Mapping[str, str | None],
    template: Mapping[str, Any] | None = None,
) -> ParsedRequest:
    speculation = given.get("speculation", {})
    known = isinstance(speculation, dict) and {*speculation} <= _SPECULATION
    require("speculation", speculation, known, f"an object of {sorted(_SPECULATION)}")
    choices = speculation.get("method"), speculation.get("drafter")
    names = [name for name in choices if name is not None]
    for name in names:
        fits = isinstance(name, str) and name in drafters and name == names[0]
        require("speculation", name, fits, f"method: one of {sorted(drafters)}")
        fields["drafter"] = drafters[name]
    num_tokens = speculation.get("num_speculative_tokens")
    if num_tokens is not None:
        fields["num_speculative_tokens"] = num_tokens
    options = given.get("stream_options", {})
    fits = isinstance(options, dict) and {*options} <= _STREAM_OPTIONS
    require("stream_options", options, fits, f"an object of {sorted(_STREAM_OPTIONS)}")
    stream = _flag(given, "stream")
    require("stream_options", options, stream or not options, "null unless stream is true")
    padded = _flag(options, "include_obfuscation", "stream_options.") or None
    refuse("stream_options.include_obfuscation", padded, "chunks are not padded")
    return ParsedRequest(
        prompts,
        SamplingParams(**fields),
        stream,
        _flag(options, "include_usage", "stream_options."),
        _flag(options, "continuous_usage_stats", "stream_options."),
        _flag(speculation, "metrics", "speculation."),
        _flag(speculation, "sources", "speculation."),
        template,
        given.keys(),
    )


def _flag(given: Mapping[str, Any], name: str, place: str = "", default: bool = False) -> bool:
    value = given.get(name)
    require(f"{place}{name}", value, value is None or isinstance(value, bool), "a bool")
    return default if value is None else value


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(is_int, value))


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")
