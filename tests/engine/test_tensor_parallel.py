"""A target that transformers splits over two processes writes what one process writes."""

import json
import os
import socket
import subprocess
import sys

import pytest

from ..models import perturbed, random_model, random_t5
from ..test_layers import ROOT
from . import eagle1_models, eagle3_models
from .glide_models import random_glide
from .test_other_tokenizers import other_tokenizer, renumbered
from .two_ranks import late_texts, recurrent_texts, texts


@pytest.mark.check
def test_two_ranks_write_what_one_process_writes(tmp_path):
    model = random_model("llama", num_hidden_layers=4)
    draft = perturbed(model, 0.05)
    models = {"target": model, "draft": draft, "glide": random_glide(model, 2), "t5": random_t5()}
    models |= {"recurrent": random_model("lfm2"), "spelled": renumbered(draft)}
    for name, each in models.items():
        each.save_pretrained(tmp_path / name)
    other_tokenizer().save_pretrained(tmp_path / "spelled")
    eagle3_models.write_folder(tmp_path / "eagle3", model)
    eagle1_models.write_folder(tmp_path / "eagle1", model)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    launchers = []
    for number in range(2):  # as on two machines
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
        command += ["--node-rank", str(number), "--nproc-per-node", "1"]
        command += ["--master-addr", "127.0.0.1", "--master-port", str(port)]
        command += ["-m", "tests.engine.two_ranks", str(tmp_path)]
        with (tmp_path / f"said{number}").open("w") as said:
            given = {"cwd": ROOT, "env": environment, "stderr": said}
            launchers.append(subprocess.Popen(command, **given))
    statuses = [launcher.wait(900) for launcher in launchers]
    assert statuses == [0, 0], [(tmp_path / f"said{n}").read_text()[-3000:] for n in range(2)]
    first, second = (json.loads((tmp_path / f"rank{n}.json").read_text()) for n in range(2))
    left, left_for_good = first.pop("left"), first.pop("left for good")
    assert first == second
    expected = texts(model, draft, tmp_path) | late_texts(model, tmp_path)
    expected |= recurrent_texts(models["recurrent"], draft)
    assert {name: first[name] for name in expected} == expected
    for name in ("unlike", "unlike copies", "unlike exit", "unlike cape exit"):
        assert first[f"{name} 0.0"] == expected["none 0.0"]
        assert first[f"{name} 0.9"] != expected["none 0.9"]
    assert "is split over processes; each needs a whole draft model" in first["split draft"]
    assert "FSDPLlamaForCausalLM is wrapped by FSDP, not supported" in first["fsdp"]
    assert "an encoder-decoder split over processes" in first["encoder-decoder"]
    assert "'waiting' differs: rank 0 has [('request-1'," in first["lonely"]
    assert "'call' differs: rank 0 has 'step'; rank 1 has 'add_corpus'" in first["lonely corpus"]
    assert "RuntimeError: tensor parallel: rank 0 of 2 cannot continue" in left
    assert left_for_good == left
