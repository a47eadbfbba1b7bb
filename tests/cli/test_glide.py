"""The bundled GLIDE draft on the command line."""

import json


def test_generate_writes_what_plain_decoding_writes(invoke):
    run = ["generate", "--prompt", "import os\n", "--max-tokens", "24", "--json"]
    run += ["--temperature", "0"]
    plain, glide = invoke(*run, "--method", "none"), invoke(*run, "--method", "glide")
    assert glide.exit_code == 0, glide.stderr
    outputs = [json.loads(result.stdout) for result in (plain, glide)]
    assert outputs[1]["token_ids"] == outputs[0]["token_ids"]
    assert outputs[1]["stats"]["num_accepted_tokens"] > 0


def test_demo_and_bench(invoke, tmp_path):
    short = ["--method", "glide", "--num-prompts", "1", "--max-tokens", "6"]
    shown = invoke("demo", *short)
    assert shown.exit_code == 0, shown.stderr
    out = tmp_path / "results.jsonl"
    timed = invoke("bench", *short, "--repeats", "1", "--temperatures", "0", "--out", out)
    assert timed.exit_code == 0, timed.stderr
    record = json.loads(out.read_text(encoding="utf-8"))
    assert record["method"] == "glide"
    assert record["draft"]["name"] == "tiny-glide"


def test_tune(invoke, tmp_path):
    """A GLIDE draft is tried as one."""
    prompts, out = tmp_path / "prompts.txt", tmp_path / "tuned.json"
    prompts.write_text("def f(\n", encoding="utf-8")
    run = ["tune", "--draft", "tiny-glide", "--prompts-file", prompts, "--out", out]
    tuned = invoke(*run, "--max-tokens", "16", "-k", "1", "--repeats", "1")
    assert tuned.exit_code == 0, tuned.stderr
    record = json.loads(out.read_text(encoding="utf-8"))
    tried = {row["method"] for row in record["measured"]["table"]}
    assert tried == {"glide", "prompt_lookup", "mag", "suffix"}
