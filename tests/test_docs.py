"""README.md and docs/: every block of code and every command runs; links lead somewhere."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fastspec import drafters
from fastspec.cli import app
from fastspec.config.methods import methods

ROOT = Path(__file__).resolve().parents[1]
ASSETS = ROOT / "fastspec" / "assets"
PAGES = [ROOT / "README.md", ROOT / "kernels" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXTS = {str(page.relative_to(ROOT)): page.read_text(encoding="utf-8") for page in PAGES}
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)
BLOCKS = [(name, *block) for name, text in TEXTS.items() for block in BLOCK.findall(text)]
PYTHON = [(name, code) for name, language, code in BLOCKS if language == "python"]
LINES = [
    (name, line.partition("  #")[0].strip())
    for name, language, text in BLOCKS
    if language == "sh"
    for line in text.splitlines()
    if line.strip()
]
# Appended to a command: the last value of an option counts, so the run is short.
SHORTER = {
    "demo": ["--num-prompts", "1", "--max-tokens", "8"],
    "generate": ["--max-tokens", "8"],
    "bench": ["--num-prompts", "1", "--max-tokens", "4", "--repeats", "1"],
    "tune": ["--num-prompts", "1", "--max-tokens", "40", "-k", "2", "--methods", "mag"],
    "train shapes": ["--num-prompts", "1", "--max-tokens", "24", "-k", "2"],
    "train glide": ["--steps", "2", "--batch-size", "2", "--context", "64"],
    "train eagle3": ["--steps", "2", "--batch-size", "2", "--context", "64"],
    "train dflash": ["--steps", "2", "--batch-size", "2", "--context", "64"],
}
# Those that other tests run, with less to do.
RUN_ELSEWHERE = {
    "pip install torch": "any test: it is there",
    "pip install --no-build-isolation .": "test_packaging.py",
    "python -m benchmarks.gpu --out DIR --minutes 8": "benchmarks/test_gpu_run.py",
    "python -m benchmarks.draft_economics --threads 2": "benchmarks/test_draft_economics.py",
    "fastspec fetch smollm2": "cli/test_fetch.py",
    "fastspec chat": "cli/test_chat.py",
    "fastspec serve": "serve/test_border.py",
    "fastspec serve --port 5000": "serve/test_border.py",
    'curl -X POST -H "Content-Type: application/json" -d \'{"prompt": "Who is the president of the'
    " USA\"}' http://127.0.0.1:5000/predict": "serve/test_border.py",
    "fastspec serve --target smollm2 --method prompt_lookup --schedule adaptive": (
        "serve/test_border.py"
    ),
    "fastspec generate --target smollm2 --dtype bfloat16 --chat"
    ' --prompt "Why is the sky blue?"': "cli/test_eagle3.py",
    "fastspec train texts --target smollm2 --prompts-file prompts.txt --out texts.jsonl": (
        "train/test_reduced_vocabulary.py"
    ),
    "fastspec train draft --target smollm2 --data texts.jsonl --layers 2 --vocab-size 8192"
    " --store-target --out draft": "train/test_reduced_vocabulary.py",
}
_ALL = {line for _, line in LINES}
COMMANDS = sorted(line for line in _ALL - set(RUN_ELSEWHERE) if line.startswith("fastspec "))
OTHER_COMMANDS = sorted(_ALL - set(COMMANDS))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with what the pages take for granted."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    models = tmp_path / "path" / "of"
    models.mkdir(parents=True)
    for name in ("target", "draft", "glide"):
        (models / name).symlink_to(ASSETS / f"tiny-{name}")
    tuned = {"fastspec_config": 1, "target": "tiny", "draft": None, "spec": {"method": "mag"}}
    files = {
        "prompts.txt": "import \nclass \n",
        "rows.jsonl": json.dumps({"prompt": "import "}),
        "text.txt": (ROOT / "setup.py").read_text(encoding="utf-8"),
        "run.jsonl": json.dumps({"prompt": "import ", "token_ids": [5, 6]}),
        "gsm8k.jsonl": json.dumps({"question": "1 + 1?", "answer": "#### 2"}),
        "bigram.json": (ASSETS / "tiny-target" / "bigram.json").read_text(encoding="utf-8"),
        "tuned.json": json.dumps(tuned),
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")


@pytest.mark.parametrize(("page", "code"), PYTHON)
@pytest.mark.usefixtures("folder")
def test_python_runs(page, code):
    known = set(methods())
    try:
        exec(compile(code, page, "exec"), {"__name__": "docs"})
    finally:
        for name in set(methods()) - known:  # of drafters that the page registers
            drafters.unregister(name)


@pytest.mark.parametrize("line", COMMANDS)
@pytest.mark.usefixtures("folder")
def test_command_runs(line):
    arguments = shlex.split(line)[1:]
    command = " ".join(arguments[:2]) if arguments[0] == "train" else arguments[0]
    result = CliRunner().invoke(app, [*arguments, *SHORTER.get(command, [])])
    assert result.exit_code == 0, result.stderr
    assert result.stdout


@pytest.mark.parametrize("line", OTHER_COMMANDS)
def test_other_command_exists(line):
    if line.startswith("make "):
        command = ["make", "--dry-run", *shlex.split(line)[1:]]
        assert subprocess.run(command, cwd=ROOT, capture_output=True).returncode == 0
    else:
        assert line in RUN_ELSEWHERE


def test_every_block_has_a_language():
    assert {language for _, language, _ in BLOCKS} <= {"python", "sh", "text", "toml"}


@pytest.mark.parametrize("page", TEXTS)
def test_linked_files_exist(page):
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", TEXTS[page])
    beside = (ROOT / page).parent
    missing = [name for name in targets if "://" not in name and not (beside / name).exists()]
    assert missing == []


@pytest.mark.check
@pytest.mark.skipif(sys.version_info < (3, 11), reason="mkdocstrings needs Python 3.11")
def test_site_builds_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "api.html").is_file()
