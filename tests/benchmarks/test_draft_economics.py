"""The comparison of drafts of equal size, on a draft that is there."""

import json
import shutil
from pathlib import Path

from benchmarks import draft_economics

ASSETS = Path(__file__).resolve().parents[2] / "fastspec" / "assets"


def test_a_draft_is_measured_drawn_and_told(tmp_path):
    draft = tmp_path / "draft"
    shutil.copytree(ASSETS / "tiny-draft", draft)
    (draft / "record.json").write_text(json.dumps({"steps": 5, "train_loss": 2.5}))
    (row,) = draft_economics.measured([draft], num_prompts=1, max_tokens=12, repeats=1)
    assert (row["layers"], row["hidden_size"], row["steps"]) == (2, 192, 5)
    assert 0 < row["acceptance_rate"] <= 1
    assert row["cost_of_a_draft_token"] > 0
    assert row["measured_speed_up"] > 0
    environment = {"cpu": "a processor", "threads": 2, "torch": "2", "date": "2026-01-02T03"}
    run = {"commit": "abc", "num_prompts": 1, "max_tokens": 12, "drafts": [row]}
    picture = tmp_path / "picture.svg"
    draft_economics.plot(run, picture)
    assert "2 x 192" in picture.read_text()
    text = draft_economics.PAGE.read_text()
    *_, last = draft_economics.RECORDS.read_text(encoding="utf-8").splitlines()
    assert draft_economics.page(text, json.loads(last)) == text
    page = draft_economics.page(text, environment | run)
    assert "| 2 layers, width 192 | 1.4 M |" in page
    assert draft_economics.page(page, environment | run) == page
