"""A target that transformers splits over two processes writes what one process writes."""

import json
import os
import subprocess
import sys

import pytest

from ..models import perturbed, random_model
from ..test_layers import ROOT
from .two_ranks import texts


@pytest.mark.check
def test_two_ranks_write_what_one_process_writes(tmp_path):
    model = random_model("llama", num_hidden_layers=2)
    draft = perturbed(model, 0.05)
    model.save_pretrained(tmp_path / "target")
    draft.save_pretrained(tmp_path / "draft")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "-m", "tests.engine.two_ranks", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400
    )
    assert result.returncode == 0, result.stderr[-3000:]
    first, second = (json.loads((tmp_path / f"rank{n}.json").read_text()) for n in range(2))
    assert first == second
    expected = texts(model, draft)
    assert {name: first[name] for name in expected} == expected
    assert first["agreed 0.0"] == expected["none 0.0"]
    assert first["agreed 0.9"] != expected["none 0.9"]
