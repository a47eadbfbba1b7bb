"""Each op on a GPU against the reference: the checks that compute-sanitizer runs too."""

import pytest
import torch

from benchmarks import verification
from benchmarks.gpu import small_shapes
from tests.gpu.backends import each_backend, needs_gpu, require

pytestmark = [pytest.mark.gpu, needs_gpu]


@each_backend
@pytest.mark.parametrize("op", small_shapes.CHECKS)
def test_agrees_with_the_reference(op, backend):
    require(backend, op)
    names = []
    for name, check in small_shapes.checks(backend, "cuda"):
        if name.startswith(f"{op}-"):
            check()
            names.append(name)
    assert names


@each_backend
@pytest.mark.parametrize("op", ["verify_chain", "verify_tree"])
def test_sequences_alone_and_in_a_batch_give_the_same_bits(op, backend):
    require(backend, op)
    run, args, kwargs = small_shapes.call_of(op, 8193, torch.bfloat16, backend)
    together = run(args, kwargs)
    for b in range(small_shapes.BATCH):
        alone = run(*verification.sequences(args, kwargs, [b]))
        for part, whole in zip(alone, together, strict=True):
            assert torch.equal(part[0], whole[b])
