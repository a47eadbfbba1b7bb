"""Conversations become the ids that the tokenizer's chat template gives."""

from pathlib import Path

import pytest
from tokenizers.processors import TemplateProcessing

from fastspec import Engine, SamplingParams

from ..models import EOS_ID, byte_tokenizer

GREEDY = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
TEMPLATE = (
    "<|end|>{% for tool in tools or [] %}({{ tool.name }}){% endfor %}"
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}{{ style }}"
)
CALLING = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}],
}
HI, WHY = [{"role": "user", "content": "hi"}], [{"role": "user", "content": "why?"}]


def chat_tokenizer():
    """With a template, and a text start that other texts get."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    start = TemplateProcessing("<|end|> $A", special_tokens=[("<|end|>", EOS_ID)])
    tokenizer.backend_tokenizer.post_processor = start
    assert tokenizer("a")["input_ids"][0] == EOS_ID
    return tokenizer


@pytest.fixture(scope="module")
def engine(model):
    return Engine(model, tokenizer=chat_tokenizer())


def shown(engine, *arguments, **options):
    outputs = engine.chat(*arguments, **options)
    return [engine.tokenizer.decode(output.prompt_token_ids) for output in outputs]


def test_one_conversation_or_several(engine):
    assert shown(engine, HI, GREEDY) == ["<|end|>[user]hi[assistant]"]
    assert shown(engine, [HI, HI + WHY], [GREEDY] * 2)[1] == "<|end|>[user]hi[user]why?[assistant]"


def test_parts_of_a_content_and_json_of_tool_calls_are_what_templates_expect(engine):
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    assert shown(engine, [{"role": "user", "content": parts}], GREEDY) == shown(engine, HI, GREEDY)
    template = "{{ messages[0].tool_calls[0].function.arguments.a + 1 }}"
    for arguments in ('{"a": 1}', {"a": 1}):
        call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
        asked = [{"role": "assistant", "tool_calls": [call]}]
        options = {"chat_template_kwargs": {"chat_template": template}}
        assert shown(engine, asked, GREEDY, **options) == ["2"]


PARTS = (
    "{% for message in messages %}[{{ message.role }}]{% for part in message.content"
    " if part.type == 'text' %}{{ part.text }}{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize(
    "template", [PARTS, "{% if messages[0].content is string %}{{ fail() }}{% endif %}" + PARTS]
)
def test_templates_that_read_parts(engine, template):
    for text in ("hi", "user"):  # the template itself writes the second, too
        asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]
        expected = [f"[system]Be brief.[user]{text}"]
        assert shown(engine, asked, GREEDY, chat_template=template) == expected


def test_calls_may_be_written_with_whole_messages(engine):
    (text,) = shown(engine, [*HI, CALLING], GREEDY, chat_template="{{ messages | tojson }}")
    assert '"name": "add"' in text


def test_a_template_that_changes_the_text_gets_texts(engine):
    assert shown(engine, HI, GREEDY, chat_template="{{ messages[0].content | upper }}") == ["HI"]
    template = "{{ messages[0].content[:2] }}"  # the first parts of a list
    assert shown(engine, WHY, GREEDY, chat_template=template) == ["wh"]


def test_no_second_start_token(engine):
    (output,) = engine.chat(HI, GREEDY)
    expected = engine.tokenizer.apply_chat_template(HI, add_generation_prompt=True)["input_ids"]
    assert list(output.prompt_token_ids) == expected
    assert output.prompt_token_ids.count(EOS_ID) == 1


def test_what_the_template_is_told(engine):
    options = {"add_generation_prompt": False, "tools": [{"name": "add"}]}
    assert shown(engine, HI, GREEDY, **options) == ["<|end|>(add)[user]hi"]
    style = {"style": "short"}
    assert shown(engine, HI, GREEDY, chat_template_kwargs=style)[0].endswith("[assistant]short")
    other = {"chat_template": "{{ messages[0].content }}"}
    assert shown(engine, HI, GREEDY, chat_template_kwargs=other) == ["hi"]
    assert shown(engine, HI, GREEDY, **other) == ["hi"]
    needs_tools = {"chat_template": "{{ tools[0].name.upper() }}"}
    options = {"tools": [{"name": "add"}], "chat_template_kwargs": needs_tools}
    assert shown(engine, HI, GREEDY, **options) == ["ADD"]


@pytest.mark.parametrize(
    ("messages", "options", "message"),
    [
        ("hi", {}, "messages: expected a list, got str"),
        ([], {}, "messages: a conversation is empty"),
        ([HI, []], {}, "messages: a conversation is empty"),
        ([HI, "hi"], {}, "messages: expected a list, got str"),
        ([{"role": "user", "content": "\ud800"}], {}, "messages: 'utf-8' codec"),
        ([{"content": "hi"}], {}, "messages: expected objects with a role"),
        ([HI[0], "hi"], {}, "messages: expected objects with a role"),
        ([{"role": "user"}], {}, "messages: expected content"),
        ([{"role": "user", "content": [{"type": "image"}]}], {}, "content: a string, or parts of"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "h", "image_url": "i"}]}],
            {},
            "messages: content: unknown field 'image_url'",
        ),
        ([{"role": "assistant", "tool_calls": [{}]}], {}, "tool_calls: objects with a function"),
        (HI, {"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs: tokenize"),
        (HI, {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs: messages"),
        (HI, {"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs: self"),
        (HI, {"chat_template": Path("a.jinja")}, "chat_template: expected a string, got "),
        (
            HI,
            {"chat_template": "a", "chat_template_kwargs": {"chat_template": "b"}},
            "chat_template_kwargs: chat_template cannot be set here",
        ),
        (
            HI,
            {"chat_template_kwargs": {"chat_template": "{% if %}"}},
            "messages: the chat template",
        ),
        (
            HI,
            {"chat_template_kwargs": {"chat_template": "{{ raise_exception('roles') }}"}},
            "messages: the chat template failed: roles",
        ),
        (
            [{"role": "user", "content": "hi"}, CALLING],
            {"chat_template": "{{ messages[-1].content }}"},
            "messages: the chat template does not read tool_calls",
        ),
        (
            HI,
            {"tools": [{"name": "add"}], "chat_template_kwargs": {"chat_template": "my_tools"}},
            "tools: the chat template does not read them",
        ),
    ],
)
def test_errors(engine, messages, options, message):
    with pytest.raises(ValueError, match=message):
        engine.chat(messages, GREEDY, **options)
    assert not engine.has_unfinished


def test_no_tokenizer_or_no_template(model):
    with pytest.raises(ValueError, match="chat: messages need a tokenizer"):
        Engine(model).chat(HI, GREEDY)
    with pytest.raises(ValueError, match="no chat template; give a chat_template"):
        Engine(model, tokenizer=byte_tokenizer()).chat(HI, GREEDY)
