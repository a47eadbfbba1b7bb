"""`fastspec demo`, `bench`, `info` and the group itself."""

import json
import re
from collections.abc import Callable

import pytest
import torch
import typer

import fastspec
from benchmarks.report import smollm2
from fastspec import Engine, EngineConfig, SpecConfig
from fastspec.cli import app
from fastspec.cli.display import counted
from fastspec.tools.bench import ACCEPTANCE
from fastspec.tools.settings import BenchConfig
from fastspec.tools.timed_methods import Methods

from ..architectures import config_of, random_decoder
from ..models import byte_tokenizer, random_model

DEMO = ["demo", "--num-prompts", "2", "--max-tokens", "8"]
BENCH = ["bench", "--num-prompts", "2", "--max-tokens", "6", "--repeats", "1"]


def test_demo_compares_both_outputs(invoke, bundled):
    result = invoke(*DEMO)
    assert result.exit_code == 0, result.stderr
    assert "Both outputs are identical: 16 token ids compared." in result.stdout
    for word in ("acceptance rate", "mean acceptance length", "ratio", "plain", "speculative"):
        assert word in result.stdout
    assert result.stderr == ""


def test_demo_when_sampling_claims_no_identity(invoke, bundled):
    result = invoke(*DEMO, "--temperature", "1")
    assert result.exit_code == 0, result.stderr
    assert "draws from one distribution" in result.stdout
    assert "identical" not in result.stdout


@pytest.mark.parametrize(
    "command",
    [DEMO, BENCH, ["tune", "--num-prompts", "1", "--max-tokens", "40", "-k", "2"]],
    ids=lambda command: command[0],
)
def test_chat_asks_the_bundled_questions(command, invoke, bundled, chat_pair, tmp_path):
    template = chat_pair[1] / "chat_template.jinja"
    template.write_text("{% for message in messages %}<{{ message.content }}>{% endfor %}")
    (tmp_path / "chat-prompts.jsonl").write_text('{"kind": "chat", "prompt": "why"}\n' * 4)
    extra = ["--methods", "mag", "--out", tmp_path / "tuned.json"] if command[0] == "tune" else []
    result = invoke(*command, *chat_pair, "--chat", *extra)
    assert result.exit_code == 0, result.stderr
    if command is DEMO:
        assert "why" in result.stdout
    asked = [*command, "--target", "tiny", *extra]
    result = invoke(*asked, "--chat")
    assert result.exit_code == 2
    assert "--chat: the target's tokenizer has no chat template" in result.stderr
    assert invoke(*asked, "--chat", "--chat-template", template).exit_code == 0
    result = invoke(*asked, "--chat-template", template)
    assert "--chat-template: needs --chat" in result.stderr


def test_demo_notices_a_difference(invoke, bundled, monkeypatch):
    stream = Engine.stream

    def wrong_when_speculative(engine, ids, params):
        return stream(engine, [*ids, 1] if engine.is_speculative else ids, params)

    monkeypatch.setattr(Engine, "stream", wrong_when_speculative)
    result = invoke(*DEMO)
    assert result.exit_code == 1
    assert "DIFFER" in result.stdout


def test_demo_draws_itself(invoke, bundled, tmp_path):
    result = invoke(*DEMO, "--svg", tmp_path / "demo.svg")
    assert result.exit_code == 0, result.stderr
    picture = (tmp_path / "demo.svg").read_text(encoding="utf-8")
    assert picture.startswith("<svg")
    assert "identical" in picture
    assert "url(https" not in picture


def assert_quotient(value, over, under):
    """A value of three decimals is a quotient of numbers that were rounded after it was formed.

    Args:
        over, under: each with the decimals that it was rounded to; 0 = not at all.
    """
    (over, lost), (under, hidden) = (
        (number, 0.51 * 10**-decimals if decimals else 0.0) for number, decimals in (over, under)
    )
    least, most = (over - lost) / (under + hidden), (over + lost) / (under - hidden)
    assert least - 0.00051 <= value <= most + 0.00051


def test_bench_appends_a_record(invoke, bundled, tmp_path):
    out = tmp_path / "results.jsonl"
    trace = tmp_path / "trace.json"
    for _ in range(2):
        result = invoke(*BENCH, "-k", "2", "--out", out, "--profile", trace)
        assert result.exit_code == 0, result.stderr
        assert result.stderr == ""
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    assert any("fastspec::" in event.get("name", "") for event in events)
    assert "all methods gave the same token ids" in result.stdout
    assert "2 prompts, " in result.stdout
    for name in ACCEPTANCE[2:]:
        label = name.upper() if name == "swi" else name.replace("_", " ")
        assert re.search(f"^{label}[:,]|, {label}:", result.stdout, re.MULTILINE)
    record = json.loads(out.read_text(encoding="utf-8").splitlines()[1])
    assert record["verified"] is True
    assert "draft" not in record["prompts_equal_to_plain"]
    assert record["num_speculative_tokens"] == 2
    assert [row["temperature"] for row in record["results"]] == [0, 1]
    for row in record["results"]:
        assert set(row["tokens_per_s"]) == {
            "plain",
            "speculative",
            "hf_generate",
            "hf_assisted",
            "hf_assisted_default",
            "draft",
        }
        assert all(speed > 0 for speed in row["tokens_per_s"].values())
        assert 0 <= row["acceptance_rate"] <= 1
        assert 1 <= row["mean_acceptance_length"] <= 3
        best = max(row["tokens_per_s"][name] for name in ("hf_assisted", "hf_assisted_default"))
        predicted, plain_ratio = row["predicted_speed_up"], row["ratios"]["speculative / plain"]
        assert 0 < predicted < row["mean_acceptance_length"]
        assert min(row["draft_cost"], row["judge_cost"]) > 0
        # The ratio is rounded before it is divided, all else only when it is written.
        assert_quotient(row["efficiency"], (plain_ratio, 0), (predicted, 3))
        ratio = row["ratios"]["speculative / hf_assisted"]
        assert_quotient(ratio, (row["tokens_per_s"]["speculative"], 2), (best, 2))


def test_bench_times_nothing_when_outputs_differ(invoke, bundled, monkeypatch, tmp_path):
    by_name: Callable = Methods.by_name

    def one_wrong(self):
        methods = by_name(self)
        methods["hf_generate"] = lambda prompt, temperature, seed: [0] * self.max_tokens
        return methods

    monkeypatch.setattr(Methods, "by_name", one_wrong)
    result = invoke(*BENCH, "--out", tmp_path / "results.jsonl")
    assert result.exit_code == 1
    assert "greedy outputs differ: hf_generate and plain agree on 0 of 2 prompts" in result.stderr
    assert not (tmp_path / "results.jsonl").exists()


def test_bench_refuses_a_prompt_that_is_too_long(invoke, bundled, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text(2 * ("a" * 251 + "\n"), encoding="utf-8")
    result = invoke(*BENCH, "--prompts-file", file)
    assert result.exit_code == 1
    assert "the 251 tokens of prompt 1, 1 more than the models accept" in result.stderr


def test_bench_without_peers(invoke, bundled, tmp_path):
    out = tmp_path / "results.jsonl"
    result = invoke(*BENCH, "--method", "suffix", "--no-peers", "--out", out)
    assert result.exit_code == 0, result.stderr
    record = json.loads(out.read_text(encoding="utf-8"))
    assert {*record["results"][0]["tokens_per_s"]} == {"plain", "speculative"}
    assert [*record["results"][0]["ratios"]] == ["speculative / plain"]
    assert "| - | - |" in smollm2([record])
    # A prompt is decoded three times: what suffix then finds must not be its earlier output.
    assert record["results"][0]["mean_acceptance_length"] < 2


def test_bench_of_lossy_drafts(invoke, bundled, tmp_path):
    """What says something else on purpose is not compared, and labelled."""
    out = tmp_path / "results.jsonl"
    rate = ["--synthetic-acceptance-rate", "0.5", "-k", "2"]
    result = invoke(*BENCH, "--no-peers", *rate, "--out", out)
    assert result.exit_code == 0, result.stderr
    record = json.loads(out.read_text(encoding="utf-8"))
    assert (record["lossy"], record["synthetic_acceptance_rate"]) == (True, 0.5)
    assert record["prompts_equal_to_plain"] == {}
    assert "all methods but speculative (LOSSY) gave" in result.stdout
    assert "speculative (LOSSY) / plain" in result.stdout
    relaxed = invoke(*BENCH, "--no-peers", "--relaxed-acceptance", "2", "--out", out)
    assert relaxed.exit_code == 0, relaxed.stderr
    assert "all methods gave the same token ids" in relaxed.stdout  # greedy requests stay exact
    assert "speculative (LOSSY)" in relaxed.stdout
    refused = invoke(*BENCH, *rate, "--record")
    assert refused.exit_code == 2
    assert "--record" in refused.stderr


def test_bench_of_drafts_that_are_encoded_anew(invoke, bundled, model_folders, tmp_path):
    """Beside universal assisted generation; the draft's ids are none to run it alone with."""
    out = tmp_path / "results.jsonl"
    draft = ["--draft", model_folders["stranger"], "-k", "2", "--out", out]
    anew = ["--heterogeneous-vocab", "reencoding", "--temperatures", "1,0"]
    result = invoke(*BENCH, *draft, *anew)
    assert result.exit_code == 0, result.stderr
    record = json.loads(out.read_text(encoding="utf-8"))
    assert (record["heterogeneous_vocab"], record["verified"]) == ("reencoding", True)
    peers = {"hf_generate", "hf_assisted", "hf_assisted_default"}
    assert {*record["results"][0]["tokens_per_s"]} == {"plain", "speculative", *peers}


def test_bench_of_drafts_with_other_tokens(invoke, bundled, model_folders, tmp_path, monkeypatch):
    """Assisted generation gets the draft model that ours has, in the target's ids."""
    out, columns = tmp_path / "results.jsonl", set()
    assistant: Callable = Methods._assistant

    def noted(self, temperature):
        named = assistant(self, temperature)
        draft = named["assistant_model"]
        columns.add(draft(input_ids=torch.tensor([[1, 2]])).logits.shape[-1])
        return named

    monkeypatch.setattr(Methods, "_assistant", noted)
    draft = ["--draft", model_folders["stranger"], "-k", "2", "--temperatures", "0,1"]
    result = invoke(*BENCH, *draft, "--out", out)
    assert result.exit_code == 0, result.stderr
    assert "left out" not in result.stderr
    record = json.loads(out.read_text(encoding="utf-8"))
    assert (record["heterogeneous_vocab"], record["verified"]) == ("intersection", True)
    peers = {"hf_generate", "hf_assisted", "hf_assisted_default"}
    assert {*record["results"][1]["tokens_per_s"]} == {"plain", "speculative", "draft", *peers}
    assert columns == {record["target"]["vocab_size"]}


def test_a_peer_that_fails_is_left_out(invoke, bundled, model_folders, tmp_path):
    """Assisted generation takes no draft model that has fewer logits than its target."""
    out, folder = tmp_path / "results.jsonl", tmp_path / "fewer"
    random_model(num_hidden_layers=2, vocab_size=258).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    result = invoke(*BENCH, "--draft", folder, "-k", "2", "--temperatures", "0,1", "--out", out)
    assert result.exit_code == 0, result.stderr
    said = "note: Hugging Face's assisted generation is left out: it fails with ValueError"
    assert said in result.stderr
    record = json.loads(out.read_text(encoding="utf-8"))
    assert {"plain", "speculative", "hf_generate"} <= {*record["results"][0]["tokens_per_s"]}
    assert "hf_assisted" not in record["results"][0]["tokens_per_s"]


def test_bench_reads_each_prompt_in_every_run(model_folders):
    """As Hugging Face's methods do, also if the config caches prefixes."""
    config = EngineConfig(prefix_caching=True, block_size=4)
    settings = BenchConfig(max_tokens=4, peers=False)
    names = str(model_folders["target"]), [str(model_folders["draft"])]
    methods = Methods(*names, SpecConfig("draft_model", 2), config, settings)
    for decode in [*methods.by_name().values()] * 2:
        decode(list(range(5, 40)), 0.0, 0)
        assert methods.last_stats.num_cached_prompt_tokens == 0


def test_bench_of_a_model_that_also_takes_images(tmp_path):
    random_decoder(config_of("llava")).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    names, settings = (str(tmp_path), [str(tmp_path)]), BenchConfig(max_tokens=4)
    methods = Methods(*names, SpecConfig("draft_model", 2), EngineConfig(), settings)
    texts = {tuple(decode([5, 6, 7], 0.0, 0)) for decode in methods.by_name().values()}
    assert methods.refused is None
    assert len(texts) == 1


def test_bench_of_early_exit(invoke, bundled, model_folders, tmp_path, monkeypatch):
    """Hugging Face exits early too; where it cannot, it is left out and that is said."""
    out, calls = tmp_path / "results.jsonl", []
    generate: Callable = Methods._hf_generate

    def noted(self, *args, **kwargs):
        calls.append(kwargs)
        return generate(self, *args, **kwargs)

    monkeypatch.setattr(Methods, "_hf_generate", noted)
    exits = ["--method", "early_exit", "--exit-layer", "1", "--out", out]
    result = invoke(*BENCH, *exits)
    assert result.exit_code == 0, result.stderr
    assert {"assistant_early_exit": 1} in calls
    assert not any("prompt_lookup_num_tokens" in call for call in calls)
    record = json.loads(out.read_text(encoding="utf-8"))
    assert (record["exit_layer"], record["verified"]) == (1, True)
    parameters = record["target"]["parameters"]
    assert record["pass_costs"] == [parameters, parameters / 2]  # one layer of two
    assert 0 < record["results"][0]["swi"] < record["results"][0]["mean_acceptance_length"]
    folder = tmp_path / "gpt_neox"
    random_model("gpt_neox", max_position_embeddings=256).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    result = invoke(*BENCH, *exits, "--target", folder)
    assert result.exit_code == 0, result.stderr
    assert "note: Hugging Face's early exit is left out: it fails with IndexError" in result.stderr
    record = json.loads(out.read_text(encoding="utf-8").splitlines()[-1])
    assert {*record["results"][0]["tokens_per_s"]} == {"plain", "speculative", "hf_generate"}


@pytest.mark.parametrize("method", ["prompt_lookup", "mag"])
def test_methods_without_a_draft_model(invoke, bundled, tmp_path, method):
    out = tmp_path / "results.jsonl"
    result = invoke(*BENCH, "--method", method, "--out", out)
    assert result.exit_code == 0, result.stderr
    record = json.loads(out.read_text(encoding="utf-8"))
    assert (record["method"], record["draft"], record["verified"]) == (method, None, True)
    result = invoke(*DEMO, "--method", method)
    assert result.exit_code == 0, result.stderr
    assert "identical" in result.stdout
    result = invoke("generate", "--method", method, "--prompt", "abab", "--max-tokens", "4")
    assert result.exit_code == 0, result.stderr
    for command in ("bench", "generate"):
        result = invoke(command, "--method", method, "--draft", "tiny-draft", "--prompt", "a")
        assert result.exit_code == 2


def test_train_bigram(invoke, bundled, tmp_path):
    (tmp_path / "text.txt").write_text("abacab" * 5, encoding="utf-8")
    result = invoke("train", "bigram", tmp_path / "text.txt", "--out", tmp_path / "table.json")
    assert result.exit_code == 0, result.stderr
    table = json.loads((tmp_path / "table.json").read_text(encoding="utf-8"))
    a, b, c = byte_tokenizer()("abc")["input_ids"]
    assert (table[a], table[b], table[c]) == (b, a, a)
    lines = [{"text": "abacab" * 4}, {"prompt_ids": [a], "token_ids": [b]}]
    records = tmp_path / "records.jsonl"
    records.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    result = invoke("train", "bigram", records, "--out", tmp_path / "table2.json")
    assert result.exit_code == 0, result.stderr
    assert json.loads((tmp_path / "table2.json").read_text(encoding="utf-8")) == table
    records.write_text('{"text": "ab"}\n{"texts": "ab"}\n', encoding="utf-8")
    result = invoke("train", "bigram", records, "--out", tmp_path / "table3.json")
    assert "FILE: " in result.stderr
    assert "line 2 has neither" in result.stderr
    options = ["--method", "mag", "--bigram", tmp_path / "table.json", "--max-tokens", "4"]
    result = invoke("generate", *options, "--prompt", "abac")
    assert result.exit_code == 0, result.stderr
    for wrong, named in (
        (["none.txt", "--out", tmp_path / "new.json"], "none.txt"),
        ([tmp_path / "text.txt", "--out", tmp_path / "none" / "new.json"], "--out"),
    ):
        result = invoke("train", "bigram", *wrong)
        assert result.exit_code == 2
        assert named in result.stderr
    assert not (tmp_path / "new.json").exists()


def test_counts_agree_with_their_nouns():
    told = [counted(0, "prompt"), counted(1, "prompt"), counted(2, "target pass")]
    assert told == ["0 prompts", "1 prompt", "2 target passes"]


def test_info(invoke):
    facts = json.loads(invoke("info", "--json").stdout)
    assert facts["fastspec"] == fastspec.__version__
    assert "reference" in facts["available_backends"]
    names = {*facts["available_backends"], *facts["unavailable_backends"]}
    assert names == {"cpu", "cuda", "triton", "reference"}
    text = invoke("info").stdout
    for reason in facts["unavailable_backends"].values():
        assert reason in " ".join(text.split())


@pytest.mark.parametrize("command", ["generate", "demo", "bench", "tune", "simulate", "info"])
def test_every_option_is_explained(command):
    options = typer.main.get_command(app).commands[command].params
    assert [option.name for option in options if not (option.help or "").endswith(".")] == []


def test_help_fits_80_columns_and_cuts_off_no_name(invoke):
    commands = typer.main.get_command(app).commands
    lines = [[], *([name] for name in commands)]
    lines += [["train", name] for name in commands["train"].commands]
    for line in lines:
        text = invoke(*line, "--help").stdout
        assert max(map(len, text.split("\n"))) <= 80
        assert "\u2026" not in text
        assert "list[int]" not in text
        assert "list[str]" not in text
    text, options = invoke("generate", "--help").stdout, commands["generate"].params
    assert {name for option in options for name in (*option.opts, *option.secondary_opts)} <= {
        name.strip(",") for name in text.split()
    }
    titles = re.findall(r"^(\w+):$", text, re.MULTILINE)
    assert titles == ["Options", "Sampling", "Drafting", "Engine"]
    for summary in ("with plain and speculative decoding, and compare both.", "decoding, batch 1"):
        assert summary in " ".join(invoke("--help").stdout.split())


def test_group(invoke):
    assert invoke("--version").stdout == fastspec.__version__ + "\n"
    assert "generate" in invoke().stdout
    assert invoke("--help").exit_code == 0
