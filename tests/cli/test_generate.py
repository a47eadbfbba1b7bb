"""`fastspec generate`: what it prints, to where, and what its options do."""

import json
from io import BytesIO, TextIOWrapper
from types import SimpleNamespace

import pytest

from fastspec import Engine, SamplingParams
from fastspec.cli import prompts

GREEDY = ["--temperature", "0"]


def records(result) -> list[dict]:
    assert result.exit_code == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_json_is_one_object_and_nothing_else(invoke, pair):
    result = invoke(
        "generate",
        *pair,
        "--prompt",
        "def f(",
        "--max-tokens",
        "9",
        "--json",
        "--seed",
        "1",
        "-k",
        "3",
    )
    (record,) = records(result)
    assert set(record) == {
        "request_id",
        "prompt",
        "text",
        "token_ids",
        "sources",
        "finish_reason",
        "error",
        "stats",
    }
    assert record["prompt"] == "def f("
    assert len(record["token_ids"]) == len(record["sources"]) == 9
    assert set(record["sources"]) <= {"draft", "recovered", "bonus", "target"}
    assert record["finish_reason"] == "length"
    assert record["error"] is None
    assert record["stats"]["num_output_tokens"] == 9
    assert result.stderr == ""


def test_text_equals_the_library(invoke, pair, model_folders):
    engine = Engine(str(model_folders["target"]), str(model_folders["draft"]))
    expected = engine.generate("import os", SamplingParams(temperature=0, max_tokens=20))[0].text
    result = invoke("generate", *pair, "--prompt", "import os", "--max-tokens", "20", *GREEDY)
    assert result.stdout == expected + "\n"
    assert result.stderr == ""  # no progress bar, no note: stderr is no terminal


def test_methods_agree_greedily(invoke, pair):
    arguments = ["--prompt", "x = 1", "--max-tokens", "16", "--json", *GREEDY]
    (speculative,) = records(invoke("generate", *pair, *arguments))
    (plain,) = records(invoke("generate", *pair[:2], *arguments, "--method", "none"))
    assert plain["token_ids"] == speculative["token_ids"]
    assert set(plain["sources"]) == {"target"}
    assert speculative["stats"]["num_accepted_tokens"] > 0


def test_several_prompts_keep_their_order(invoke, pair, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("two\n\nthree\n", encoding="utf-8")
    arguments = ["--prompt", "one", "--prompts-file", file, "--max-tokens", "5"]
    both = records(invoke("generate", *pair, *arguments, "--json", "--max-batch-size", "2"))
    assert [record["prompt"] for record in both] == ["one", "two", "three"]
    assert len({record["request_id"] for record in both}) == 3
    text = invoke("generate", *pair, *arguments).stdout
    for number, prompt in enumerate(("one", "two", "three"), 1):
        assert f"--- prompt {number} of 3: {prompt}\n" in text


def test_the_line_before_a_text_shows_where_its_prompt_begins(invoke, pair):
    prompts = ["--prompt", "a\n\tb\x1b[1m", "--prompt", "word " * 20, "--max-tokens", "2"]
    text = invoke("generate", *pair, *prompts).stdout
    assert "--- prompt 1 of 2: a b\u241b[1m\n" in text
    assert f"--- prompt 2 of 2: {('word ' * 12).rstrip()}...\n" in text


def test_prefix_caching_changes_no_ids(invoke, pair):
    begin = "a beginning that all of them share, and then "
    arguments = [a for end in "xyz" for a in ("--prompt", begin + end)]
    arguments += ["--max-tokens", "5", "--json", *GREEDY]
    without = records(invoke("generate", *pair, *arguments))
    shared = records(invoke("generate", *pair, *arguments, "--prefix-caching"))
    assert [r["token_ids"] for r in shared] == [r["token_ids"] for r in without]
    found = [[r["stats"]["num_cached_prompt_tokens"] for r in run] for run in (without, shared)]
    assert found == [[0, 0, 0], [0, *[len(begin) // 16 * 16] * 2]]


def test_float8_cache_is_refused_on_the_cpu(invoke, pair):
    arguments = ["--prompt", "one", "--device", "cpu", "--kv-cache-dtype", "float8"]
    result = invoke("generate", *pair, *arguments)
    assert result.exit_code == 1
    message = " ".join(result.stderr.split())
    assert "kv-cache-dtype: the compiled kernels of cpu do not support float8" in message


@pytest.mark.parametrize("source", ["pipe", "dash"])
def test_stdin(invoke, pair, source):
    dash = ["--prompts-file", "-"] if source == "dash" else []
    result = invoke("generate", *pair, *dash, "--max-tokens", "3", "--json", stdin="a b\nc\n")
    assert [record["prompt"] for record in records(result)] == ["a b", "c"]


def test_jsonl_prompts(invoke, pair, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"text": "one\\nline"}\n{"prompt": "two"}\n', encoding="utf-8")
    result = invoke("generate", *pair, "--prompts-file", file, "--max-tokens", "3", "--json")
    assert [record["prompt"] for record in records(result)] == ["one\nline", "two"]


def test_answers_are_no_prompts(invoke, pair, tmp_path):
    """What generate --json and batch write has the prompt beside its text."""
    file = tmp_path / "answers.txt"
    given = ["--max-tokens", "3", "--json"]
    file.write_text(invoke("generate", *pair, "--prompt", "one", *given).stdout, encoding="utf-8")
    (record,) = records(invoke("generate", *pair, "--prompts-file", file, *given))
    assert record["prompt"] == "one"


@pytest.mark.parametrize("source", ["file", "dash", "pipe"])
def test_byte_order_marks_and_line_ends_are_not_in_prompts(
    invoke, pair, tmp_path, monkeypatch, source
):
    file, content = tmp_path / "prompts.txt", b"\xef\xbb\xbfa b\r\nc\r\n"
    file.write_bytes(content)
    stdin = TextIOWrapper(BytesIO(content), encoding="utf-8", newline="\n")  # as Python's is
    monkeypatch.setattr(prompts, "sys", SimpleNamespace(stdin=stdin))
    given = {"file": ["--prompts-file", file], "dash": ["--prompts-file", "-"], "pipe": []}[source]
    result = invoke("generate", *pair, *given, "--max-tokens", "3", "--json")
    assert [record["prompt"] for record in records(result)] == ["a b", "c"]


def test_options_that_have_flags_by_their_declarations(invoke, pair):
    arguments = ["--prompt", "abc", "--max-tokens", "12", "--json", "--ignore-eos", *GREEDY]
    (plain,) = records(invoke("generate", *pair, *arguments))
    stop = plain["token_ids"][5]
    paths = ["--method", "tree", "--tree-paths", "[[0],[1],[0,0]]", "--max-model-len", "40"]
    (tree,) = records(
        invoke("generate", *pair, *arguments, *paths, "--stop-token-ids", stop, "--block-size", "4")
    )
    count = plain["token_ids"].index(stop) + 1
    assert tree["token_ids"] == plain["token_ids"][:count]
    assert tree["finish_reason"] == "stop"
    costs = ["-k", "2", "--schedule", "adaptive", "--step-costs", "[1,1.1,1.2]"]
    (paced,) = records(invoke("generate", *pair, *arguments, *costs))
    assert paced["token_ids"] == plain["token_ids"]


def test_seed_repeats_a_sample(invoke, pair):
    arguments = ["--prompt", "a", "--max-tokens", "12", "--json", "--temperature", "1"]
    arguments += ["--top-k", "40", "--top-p", "0.9", "--min-p", "0.01"]

    def ids(*more: str) -> list[int]:
        return records(invoke("generate", *pair, *arguments, *more))[0]["token_ids"]

    assert ids("--seed", "0") == ids("--seed", "0")
    assert ids("--seed", "0") != ids("--seed", "1")


def test_stop_string_ends_the_text(invoke, pair):
    arguments = [
        "--prompt",
        "a",
        "--json",
        "--max-tokens",
        "99",
        "--temperature",
        "1",
        "--seed",
        "0",
    ]
    whole = records(invoke("generate", *pair, *arguments))[0]["text"]
    stop = next(letter for letter in whole[3:] if letter.isascii() and letter.isprintable())
    (record,) = records(invoke("generate", *pair, *arguments, "--stop", stop))
    assert record["finish_reason"] == "stop"
    assert record["text"] == whole[: whole.index(stop)]


def test_sources_are_marked_where_there_is_no_colour(invoke, pair):
    result = invoke(
        "generate",
        *pair,
        "--prompt",
        "ab",
        "--max-tokens",
        "30",
        "--show-sources",
        "--temperature",
        "0",
    )
    assert result.exit_code == 0
    assert "<draft>" in result.stdout
    assert "proposed and accepted" in result.stdout
    assert "\x1b" not in result.stdout


def test_a_target_alone_decodes_plainly_and_says_so(invoke, model_folders):
    target = ["--target", model_folders["target"]]
    result = invoke("generate", *target, "--prompt", "a", "--max-tokens", "3")
    assert result.exit_code == 0
    assert result.stderr == "fastspec: note: no --draft, so this is plain decoding\n"


def test_chat_wraps_the_prompt(invoke, chat_pair):
    folder = chat_pair[1]
    plain = ["generate", "--target", folder, "--max-tokens", "6", "--json", "--method", "none"]
    plain += GREEDY
    (wrapped,) = records(invoke(*plain, "--prompt", "hi", "--chat"))
    (spelt_out,) = records(invoke(*plain, "--prompt", "[user]hi"))
    assert wrapped["token_ids"] == spelt_out["token_ids"]
    assert wrapped["prompt"] == "hi"


def test_a_chat_template_from_a_file(invoke, model_folders, tmp_path):
    (tmp_path / "quoted.jinja").write_text("<{{ messages[0].content }}>")
    plain = ["generate", "--target", model_folders["target"], "--max-tokens", "6", "--json"]
    plain += GREEDY
    given = ["--prompt", "hi", "--chat-template", tmp_path / "quoted.jinja"]
    (wrapped,) = records(invoke(*plain, *given, "--chat"))
    (spelt_out,) = records(invoke(*plain, "--prompt", "<hi>"))
    assert wrapped["token_ids"] == spelt_out["token_ids"]
    result = invoke(*plain, *given)
    assert result.exit_code == 2
    assert "--chat-template: needs --chat" in result.stderr
