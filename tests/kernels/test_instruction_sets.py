"""FASTSPEC_CPU_ISA forces a path of the CPU kernels, and the paths say the same."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fastspec_kernels import cpu_instruction_set, library, logits_to_probs, row_stats

from .cases import random_logits, random_params
from .conftest import INSTRUCTION_SETS

KERNELS = Path(library.__file__).parents[1]
needs_extension = pytest.mark.skipif(
    not library.HAS_CPU_EXTENSION, reason="fastspec_kernels._cpu is not built"
)


@needs_extension
def test_every_path_is_tested(instruction_set, request):
    assert cpu_instruction_set() == request.node.callspec.params["instruction_set"]


@needs_extension
def test_the_variable_is_read_at_import():
    code = "import fastspec_kernels as kernels; print(kernels.cpu_instruction_set())"
    settings = {"FASTSPEC_CPU_ISA": "portable", "PYTHONPATH": str(KERNELS)}
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True)
    assert run.stdout == "portable\n", run.stderr


@pytest.mark.parametrize("name", ["", "sse4", "AVX2"])
def test_unknown_names_are_refused(name):
    with pytest.raises(ValueError, match=f"FASTSPEC_CPU_ISA: expected one of .* got {name!r}"):
        library.use_instruction_set(name)


def test_a_path_that_is_not_here_is_refused(monkeypatch):
    monkeypatch.setattr(library, "CPU_INSTRUCTION_SETS", ("portable", "avx1024"))
    message = (
        "does not support 'avx1024'; available: portable"
        if library.HAS_CPU_EXTENSION
        else "not built"
    )
    with pytest.raises(ValueError, match=f"FASTSPEC_CPU_ISA: .*{message}"):
        library.use_instruction_set("avx1024")
    monkeypatch.setattr(library, "HAS_CPU_EXTENSION", False)
    with pytest.raises(ValueError, match=r"FASTSPEC_CPU_ISA: 'portable' needs .* not built"):
        library.use_instruction_set("portable")


@pytest.mark.skipif("avx512" not in INSTRUCTION_SETS, reason="the processor has no AVX-512")
@pytest.mark.parametrize("vocab", [33, 4097])
def test_rows_have_the_same_bits_on_every_path_with_a_fused_multiply_add(vocab):
    generator = torch.Generator().manual_seed(vocab)
    logits = random_logits(16, vocab, generator)
    params = random_params(16, vocab, generator)
    before, bits = cpu_instruction_set(), []
    for name in ("avx2", "avx512"):
        torch.ops.fastspec.use_cpu_instruction_set(name)
        outputs = (*row_stats(logits, **params), logits_to_probs(logits, **params))
        bits.append([out.view(torch.int32) for out in outputs])
    torch.ops.fastspec.use_cpu_instruction_set(before)
    for ours, theirs in zip(*bits, strict=True):
        assert torch.equal(ours, theirs)
