"""README.md: short, in step with the records; its blocks and those of docs/ run in test_docs.py."""

import json
import re
from pathlib import Path

from benchmarks import draft_economics, report

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
RECORDS = report.read_records()


def test_length():
    assert len(README.splitlines()) <= 120
    first = re.findall(r"^```python\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)[0]
    assert len([line for line in first.splitlines() if line.strip()]) <= 10


def test_figures_are_those_on_record():
    assert report.updated(README, RECORDS) == README
    path = ROOT / report.RESULTS
    assert report.results_page(RECORDS) == path.read_text(encoding="utf-8")


def test_no_figure_is_written_by_hand():
    pages = [ROOT / "kernels" / "README.md", *(ROOT / "docs").glob("*.md")]
    texts = {path.name: path.read_text(encoding="utf-8") for path in pages}
    del texts[Path(report.RESULTS).name]
    texts["draft-economics.md"] = draft_economics.TABLE.sub("", texts["draft-economics.md"])
    texts["README.md"] = report.DRAFTERS.sub("", report.HEADLINE.sub("", README))
    for name, text in texts.items():
        assert not re.findall(r"\d\.\d+x|\d+ tokens (?:per|a) second", text), name


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
        "target": {"name": "tiny", "parameters": 8_500_000, "layers": 24},
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
    text = report.results_page([older, newest, other_size, end_to_end])
    assert "| speculative / plain | **1.50x** |" in text
    assert "tiny (8.5 M parameters, 24 layers)" in text
    assert "| `verify_chain` | K=4, V=128256, float32 | 12.3 µs | peer 0.03 |" in text
    assert "99" not in text
    assert "`draft_model`" not in text
    measured = {**end_to_end["results"][0], "mean_acceptance_length": 2.5, "efficiency": 0.8}
    glide = {"method": "glide", "cape": True, "target": {"name": "tiny"}, "results": [measured]}
    text = report.results_page([end_to_end, {**end_to_end, **glide}])
    assert "| `glide` `--cape` | 4 | 1.50x | 2.50 | 0.80 |" in text
    assert "draft small (1.4 M" in text
    assert "No end-to-end run" in report.results_page([])
    first_token = {
        **kernel,
        "op": "first_token",
        "method": "none",
        "shape": {"shared_tokens": 1000, "own_tokens": 10},
        "median_us": 25_000.0,
        "peer_us": 420_000.0,
        "ratio_to_peer": 0.0603,
    }
    text = report.results_page([first_token])
    assert "| `none` | 1000 | 10 | 25 ms | 420 ms | 0.0603 |" in text
    assert "## Kernels" not in text


def test_readme_of_records():
    """The headline is of the last run with a draft model, each drafter's cells of its own."""
    row = {"tokens_per_s": dict.fromkeys(report.METHODS, 100.0), "efficiency": 0.5}
    row |= {"ratios": dict.fromkeys(report.RATIOS, 1.5), "mean_acceptance_length": 2.0}
    run = {
        "op": "end_to_end",
        "method": "draft_model",
        "cape": False,
        "results": [row | {"temperature": 0.0}],
        "target": {"name": "tiny"},
        "draft": {"name": "small"},
        **dict.fromkeys(("num_speculative_tokens", "batch_size", "threads"), 1),
        **dict.fromkeys(("dtype", "cpu", "torch", "transformers"), "known"),
        "argv": [],
        "verified": True,
        "date": "2026-01-02T03:04:05+00:00",
    }
    tree = {**run, "method": "tree", "draft": None}
    real = {**run, "method": "eagle3", "target": {"name": "smollm2"}, "dtype": "bfloat16"}
    faster = row | {"ratios": {"speculative / plain": 1.75}, "temperature": 0.0}
    faster["tokens_per_s"] = {"plain": 100.0, "speculative": 175.0}  # no peer beside
    at_1 = faster | {"ratios": {"speculative / plain": 1.25}, "temperature": 1.0}
    copied = {**real, "suffix_tokens": 8, "results": [faster, at_1]}
    text = report.updated(README, [run, tree, real, copied, {**real, "tree_nodes": 6}])
    assert "**1.50x** the speed of plain greedy decoding" in text
    assert "1 thread, 2026-01-02" in text
    rows = (line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `"))
    cells = {name: measured for name, _, _, *measured in rows}
    assert cells["`draft_model`"] == cells["`tree`"] == ["1.50x / -", "-", "-", "-"]
    assert cells["`glide`"] == ["-"] * 4
    assert cells["`eagle3`"] == ["-", "1.50x / -", "2.00 / -", "1.50x / -"]
    assert cells["`eagle3`, copies"] == ["-", "1.75x / 1.25x", "2.00 / 2.00", "-"]
    assert cells["`eagle3`, tree"] == ["-", "1.50x / -", "2.00 / -", "1.50x / -"]
