"""A training that is killed while it writes its record leaves the one before whole."""

import json
from pathlib import Path

import pytest
import torch

from fastspec import SpecConfig
from fastspec.train.data import Rows
from fastspec.train.eagle3 import Eagle3Trainer, make_eagle3
from fastspec.train.new_drafts import make_glide
from fastspec.train.options import DraftShape, TrainOptions
from fastspec.train.processes import OneProcess
from fastspec.train.run import report_acceptance, train_draft
from fastspec.train.states import Text, train_on_states

from ..models import random_model

OPTIONS = TrainOptions(4, batch_size=2, checkpoint_steps=2)  # so its record is written twice
IDS = torch.arange(1, 101).reshape(5, 20)


def train_glide(folder):
    target, rows = random_model("llama"), Rows(IDS, torch.full((5,), 20))
    given = OPTIONS, folder, OneProcess(target.device), False, lambda *step: None
    train_draft(target, make_glide(target), rows, *given)
    report_acceptance(target, rows, SpecConfig("glide", 2), folder)


def train_eagle(folder):
    target = random_model("llama", num_hidden_layers=6)
    texts = [Text(ids, 5) for ids in IDS]
    draft = make_eagle3(target, texts, DraftShape(reduced_vocab_size=40))
    given = OPTIONS, folder, False, lambda *step: None
    train_on_states(Eagle3Trainer, target, draft, texts[1:], texts[:1], *given)


@pytest.mark.parametrize(
    ("train", "last"),
    [(train_glide, 2), (train_glide, 3), (train_eagle, 3)],
    ids=["a checkpoint", "the acceptance", "the acceptance of EAGLE"],
)
def test_a_record_is_written_whole(monkeypatch, tmp_path, train, last):
    """Killed halfway through the last of so many writes."""
    write, records = Path.write_text, []

    def killed(self, text, *args, **kwargs):
        if not self.name.startswith("record.json"):
            return write(self, text, *args, **kwargs)
        records.append(json.loads(text))
        if len(records) < last:
            return write(self, text, *args, **kwargs)
        write(self, text[: len(text) // 2], *args, **kwargs)
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", killed)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path)
    before = json.loads((tmp_path / "record.json").read_text())
    assert before == records[-2] != records[-1]
    assert before["steps"] == 2 * (last - 1)
