"""Training in several processes: the same as in one with all their rows."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fastspec.drafters.glide import GlideLlamaForCausalLM
from fastspec.train.processes import OneProcess, many_processes

from .two_processes import NUM_STEPS, train

pytestmark = pytest.mark.check
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder that two processes on the CPU have written."""
    pytest.importorskip("accelerate")
    if not torch.distributed.is_available():
        pytest.skip("torch is built for one process")
    folder = tmp_path_factory.mktemp("two")
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    paths = [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    settings = {
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    result = subprocess.run(
        [sys.executable, "-m", *launcher, "tests.train.two_processes", str(folder)],
        cwd=ROOT,
        env=os.environ | settings,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    (folder / "output.txt").write_text(result.stdout)
    return folder


@pytest.mark.parametrize("name", ["whole_0", "broken"])
def test_two_processes_train_what_one_does_with_twice_the_batch(name, trained, tmp_path):
    expected = train(OneProcess(torch.device("cpu")), 6, tmp_path / "one")
    record = json.loads((trained / name / "record.json").read_text())
    assert record["steps"] == expected["steps"] == NUM_STEPS
    assert record["tokens"] == expected["tokens"]
    assert record["train_loss"] == pytest.approx(expected["train_loss"], rel=1e-5)
    ours, theirs = (load_file(f / "model.safetensors") for f in (tmp_path / "one", trained / name))
    for key, weight in ours.items():
        torch.testing.assert_close(theirs[key], weight, rtol=1e-3, atol=1e-5, msg=key)


def test_only_the_main_process_writes(trained):
    assert {path.name for path in trained.iterdir() if path.is_dir()} == {
        "broken",
        "cli",
        "target",
        "whole_0",
    }


def test_the_command_line_makes_one_draft_and_says_so_once(trained):
    record = json.loads((trained / "cli" / "record.json").read_text())
    assert record["steps"] == 4  # of 2 times 4 of 29 rows: each once
    assert 0 <= record["acceptance_rate"] <= 1
    GlideLlamaForCausalLM.from_pretrained(trained / "cli")
    assert (trained / "output.txt").read_text().count("acceptance rate") == 1


def test_set_ups_that_split_the_model_or_put_off_steps_are_refused(monkeypatch):
    accelerate = pytest.importorskip("accelerate")

    class Accelerator:
        gradient_accumulation_steps = 1
        distributed_type = accelerate.DistributedType.FSDP

    monkeypatch.setattr(accelerate, "Accelerator", Accelerator)
    with pytest.raises(ValueError, match=r"accelerate: expected .* got 'FSDP'"):
        many_processes()
    Accelerator.distributed_type = accelerate.DistributedType.MULTI_CPU
    Accelerator.gradient_accumulation_steps = 2
    with pytest.raises(ValueError, match="gradient_accumulation_steps: expected 1"):
        many_processes()
