"""Weights in pickles are read by default, and with load_format="safetensors" never."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fastspec import Engine
from fastspec.config.serve import ENGINE_DEFAULTS
from fastspec.models import weight_files

from ..models import byte_tokenizer, perturbed, random_model
from .eagle3_models import write_folder
from .glide_models import random_glide
from .helpers import GREEDY, PROMPTS

SAFE = {"load_format": "safetensors"}


def pickle(folder, name="pytorch_model.bin"):
    """Replace a folder's safetensors by a pickle."""
    file = folder / "model.safetensors"
    torch.save(load_file(file), folder / name)
    file.unlink()


@pytest.fixture(scope="module")
def target():
    return random_model("llama", num_key_value_heads=4)


@pytest.fixture
def saved(target, tmp_path):
    target.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def opened(monkeypatch):
    """What torch.load was called for."""
    files, load = [], torch.load

    def noted(file, *args, **options):
        files.append(Path(file).name)
        return load(file, *args, **options)

    monkeypatch.setattr(torch, "load", noted)
    return files


def test_what_is_not_there_is_not_blamed_on_its_format():
    messages = []
    for config in ({}, SAFE):
        with pytest.raises(ValueError, match="target: cannot load ") as caught:
            Engine("no/such-model", config=config)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def refusal(field, folder, *models, spec="none"):
    with pytest.raises(ValueError, match=f"^{field}: cannot load ") as caught:
        Engine(*models, byte_tokenizer(), spec=spec, config=SAFE)
    for told in (str(folder), "load_format", "--load-format auto"):
        assert told in str(caught.value)
    return str(caught.value)


def test_a_target(saved, target, opened):
    expected = Engine(target).generate(PROMPTS[:1], GREEDY)[0].token_ids
    assert Engine(saved, config=SAFE).generate(PROMPTS[:1], GREEDY)[0].token_ids == expected
    pickle(saved)
    assert "there is no model.safetensors" in refusal("target", saved, saved, None)
    assert opened == []
    assert Engine(saved).generate(PROMPTS[:1], GREEDY)[0].token_ids == expected
    assert opened == ["pytorch_model.bin"]


@pytest.mark.parametrize("method", ["draft_model", "glide", "eagle3"])
def test_a_draft(target, tmp_path, opened, method):
    if method == "eagle3":
        write_folder(tmp_path, target)
    else:
        draft = random_glide(target) if method == "glide" else perturbed(target, 0.1)
        draft.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    models = target, tmp_path, byte_tokenizer()
    Engine(*models, spec=method, config=SAFE)
    pickle(tmp_path)
    refusal("drafter", tmp_path, target, tmp_path, spec=method)
    assert opened == []
    Engine(*models, spec=method)
    assert opened == ["pytorch_model.bin"]


@pytest.mark.parametrize("way", ["index", "config"])
def test_what_names_pickles_as_safetensors(saved, opened, way):
    if way == "index":
        pickle(saved)
        names = load_names(saved / "pytorch_model.bin")
        index = {"metadata": {}, "weight_map": dict.fromkeys(names, "pytorch_model.bin")}
        (saved / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        pickle(saved, "adapter_model.bin")
        config = json.loads((saved / "config.json").read_text())
        config["transformers_weights"] = "adapter_model.bin"
        (saved / "config.json").write_text(json.dumps(config))
    opened.clear()
    assert ".bin is not safetensors" in refusal("target", saved, saved, None)
    assert opened == []


def load_names(file):
    return [*torch.load(file, weights_only=True)]


def test_shards(saved, target):
    target.save_pretrained(saved, max_shard_size="40KB")
    assert (saved / "model.safetensors.index.json").exists()
    (saved / "model.safetensors").unlink(missing_ok=True)
    Engine(saved, config=SAFE)


@pytest.mark.parametrize("kind", ["adapter_model.safetensors", "adapter_model.bin"])
def test_adapters(saved, tmp_path_factory, monkeypatch, kind):
    """transformers takes a pickled one whatever it is told."""
    monkeypatch.setattr(weight_files, "is_peft_available", lambda: True)
    adapter = tmp_path_factory.mktemp("adapter")
    config = {"base_model_name_or_path": str(saved)}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    save_file({"x": torch.ones(1)}, adapter / kind)
    if kind.endswith(".bin"):
        with pytest.raises(ValueError, match=r"adapter_model\.bin is not safetensors"):
            weight_files.check_safetensors(adapter)
    else:
        weight_files.check_safetensors(adapter)
        pickle(saved)
        with pytest.raises(ValueError, match=r"there is no model\.safetensors"):
            weight_files.check_safetensors(adapter)


def test_the_server_takes_safetensors_unless_it_is_told(saved):
    from typer.testing import CliRunner

    from fastspec.cli import app

    assert ENGINE_DEFAULTS == SAFE
    pickle(saved)
    runner = CliRunner()
    result = runner.invoke(app, ["serve", "--target", str(saved), "--port", "0"])
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert "--load-format auto" in line
    result = runner.invoke(app, ["generate", "--target", str(saved), "--prompt", "x", "--json"])
    assert result.exit_code == 0, result.stderr
