"""Weights of loaded models in large pages."""

import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from fastspec import EngineConfig
from fastspec.drafters.eagle3.loading import load_eagle
from fastspec.models import huge_pages
from fastspec.models.loading import load_model

from ..models import random_model
from .eagle3_models import write_folder

CPU = EngineConfig(device="cpu", dtype="bfloat16")


def saved(folder, **config):
    model = cast(Any, random_model("llama", num_hidden_layers=6, **config)).to(torch.bfloat16)
    model.save_pretrained(folder)
    return model


def asks_for_huge_pages(address):
    """Whether the kernel was told so of the mapping that holds an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *words = line.split()
        if "-" in first:
            start, end = (int(part, 16) for part in first.split("-"))
            inside = start <= address < end
        elif inside and first == "VmFlags:":
            return "hg" in words
    return False


@pytest.mark.parametrize("tied", [True, False])
def test_weights_move_and_keep_their_values(tmp_path, tied):
    expected = saved(tmp_path, tie_word_embeddings=tied).state_dict()
    model = load_model("target", tmp_path, CPU)
    assert model.state_dict().keys() == expected.keys()
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, expected[name]), name
    ends: Any = model.get_input_embeddings(), model.get_output_embeddings()
    assert (ends[0].weight is ends[1].weight) == tied
    for weight in model.parameters():
        assert weight.data_ptr() % 64 == 0
        if sys.platform == "linux" and Path("/sys/kernel/mm/transparent_hugepage").exists():
            assert asks_for_huge_pages(weight.data_ptr())
    model.save_pretrained(tmp_path / "again")
    again = load_model("target", tmp_path / "again", CPU).state_dict()
    assert all(torch.equal(weight, expected[name]) for name, weight in again.items())


def test_a_draft_keeps_what_it_shares_with_its_target(tmp_path):
    target = saved(tmp_path / "target")
    write_folder(tmp_path, target)
    draft = load_eagle(tmp_path, CPU, target)
    places = {weight.data_ptr() for weight in target.parameters()}
    shared = {name for name, each in draft.named_parameters() if each.data_ptr() in places}
    assert "embed_tokens.weight" in shared


def test_systems_without_them(tmp_path, monkeypatch):
    expected = saved(tmp_path).state_dict()

    def refuse(*args, **kwargs):
        raise OSError("no memory")

    monkeypatch.setattr(huge_pages.mmap, "mmap", refuse)
    model = load_model("target", tmp_path, CPU)
    assert all(torch.equal(weight, expected[name]) for name, weight in model.state_dict().items())
