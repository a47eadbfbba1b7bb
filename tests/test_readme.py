"""README.md: its Python runs, its command lines run, its numbers are those on record."""

import json
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks import report
from fastspec.cli import app, bench
from fastspec.tools.tuned import TunedConfig, save_tuned

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
PYTHON = [text for language, text in BLOCKS if language == "python"]
COMMANDS = [
    line
    for language, text in BLOCKS
    if language == "sh"
    for line in text.splitlines()
    if line.startswith("fastspec ")
]
# Appended to a command of the README: the last value of an option counts, so the run is short.
SHORTER = {
    "demo": ["--num-prompts", "1", "--max-tokens", "8"],
    "generate": ["--max-tokens", "8"],
    "bench": ["--num-prompts", "1", "--max-tokens", "4", "--repeats", "1"],
    "tune": ["--num-prompts", "1", "--max-tokens", "40", "-k", "2", "--methods", "mag"],
    "simulate": [],
    "info": [],
}


@pytest.mark.parametrize("code", PYTHON)
def test_python_runs(code, capsys):
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    assert capsys.readouterr().out


@pytest.mark.parametrize("line", COMMANDS)
def test_command_runs(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "RESULTS", tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "prompts.txt").write_text("import \nclass \n", encoding="utf-8")
    (tmp_path / "run.jsonl").write_text('{"prompt": "import ", "token_ids": [5, 6]}')
    save_tuned(TunedConfig("tiny", None, {"method": "mag"}), tmp_path / "tuned.json")
    arguments = shlex.split(line)[1:]
    result = CliRunner().invoke(app, [*arguments, *SHORTER[arguments[0]]])
    assert result.exit_code == 0, result.stderr
    assert result.stdout


def test_numbers_are_those_on_record():
    assert report.updated(README, report.read_records()) == README


def test_linked_files_exist():
    targets = re.findall(r"\]\(([^)#]+)\)", README)
    missing = [name for name in targets if "://" not in name and not (ROOT / name).exists()]
    assert missing == []


def test_report_of_records():
    end_to_end = {
        "op": "end_to_end",
        "results": [
            {
                "temperature": 0.0,
                "tokens_per_s": dict.fromkeys(report.METHODS, 100.0),
                "ratios": dict.fromkeys(report.RATIOS, 1.5),
                "acceptance_rate": 0.625,
                "mean_acceptance_length": None,
            }
        ],
        "target": {"name": "big", "parameters": 8_500_000, "layers": 24},
        "draft": {"name": "small", "parameters": 1_400_000, "layers": 2},
        "num_speculative_tokens": 4,
        "batch_size": 1,
        "num_prompts": 8,
        "max_tokens": 128,
        "dtype": "float32",
        "repeats": 3,
        "verified": True,
        "argv": ["bench"],
        **dict.fromkeys(("cpu", "torch", "transformers", "threads", "commit"), "known"),
        "date": "2026-01-02T03:04:05+00:00",
    }
    kernel = {
        **end_to_end,
        "op": "verify_chain",
        "backend": "cpu",
        "shape": {"K": 4, "V": 128256},
        "median_us": 12.3,
        "ratio_to_peer": 0.03,
    }
    older, newest = {**kernel, "median_us": 99.0}, json.loads(json.dumps(kernel))
    other_size = {**kernel, "shape": {"K": 4, "V": 1000}, "median_us": 99.0}
    text = report.report([older, newest, other_size, end_to_end])
    assert "| speculative / plain | **1.50x** |" in text
    assert "big (8.5 M parameters, 24 layers)" in text
    assert "| `verify_chain` | K=4, V=128256, float32 | 12.3 µs | peer 0.03 |" in text
    assert "99" not in text
    assert "`draft_model`" not in text
    measured = {**end_to_end["results"][0], "mean_acceptance_length": 2.5, "efficiency": 0.8}
    glide = {"method": "glide", "cape": True, "target": {"name": "tiny"}, "results": [measured]}
    text = report.report([end_to_end, {**end_to_end, **glide}])
    assert "| `glide` `--cape` | 4 | 1.50x | 2.50 | 0.80 |" in text
    assert "draft small (1.4 M" in text
    assert "No end-to-end run" in report.report([])
