"""Tiny random models in folders, and a way to call the command line in this process."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner, Result

from fastspec.cli import app, prompts
from fastspec.models import named

from ..models import byte_tokenizer, perturbed, random_model

Invoke = Callable[..., Result]

SIZES = {"num_hidden_layers": 2, "max_position_embeddings": 256}


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    """Again for each test: --threads of the one before it counts for the process."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A target, a draft that is often right, and a draft with another tokenizer."""
    root = tmp_path_factory.mktemp("models")
    target = random_model(**SIZES)
    drafts = {"draft": perturbed(target, 0.1), "stranger": random_model(**SIZES, vocab_size=300)}
    for name, model in {"target": target, **drafts}.items():
        model.save_pretrained(root / name)
        (_other_tokenizer() if name == "stranger" else byte_tokenizer()).save_pretrained(
            root / name
        )
    return {name: root / name for name in ("target", "draft", "stranger")}


@pytest.fixture
def bundled(
    model_folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The random pair and short prompts in the place of the bundled ones."""
    lines = [json.dumps({"text": text}) for text in ("def f(", "import ", "a b", "1 + ")]
    for name in ("prompts.jsonl", "chat-prompts.jsonl"):
        (tmp_path / name).write_text("\n".join(lines), encoding="utf-8")
    monkeypatch.setattr(prompts, "ASSETS", tmp_path)
    monkeypatch.setitem(named.BUNDLED, "tiny", model_folders["target"])
    monkeypatch.setitem(named.BUNDLED, "tiny-draft", model_folders["draft"])


@pytest.fixture
def invoke() -> Invoke:
    """Call the command line; stdin, stdout and stderr are no terminals."""

    def call(*arguments: str | Path, stdin: str | bytes = "") -> Result:
        command_line = [str(argument) for argument in arguments]
        return CliRunner(env={"COLUMNS": "120"}).invoke(app, command_line, input=stdin)

    return call


@pytest.fixture
def chat_pair(model_folders: dict[str, Path], tmp_path: Path) -> list[str | Path]:
    """The same, with a target that has a chat template."""
    folder = tmp_path / "chat"
    folder.mkdir()
    for file in model_folders["target"].iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    template = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return ["--target", folder, "--draft", model_folders["draft"]]


@pytest.fixture
def pair(model_folders: dict[str, Path]) -> list[str | Path]:
    """Options that name the random pair."""
    return ["--target", model_folders["target"], "--draft", model_folders["draft"]]


def _other_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<|other|>"])
    return tokenizer
