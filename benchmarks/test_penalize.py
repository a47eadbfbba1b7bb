"""The sparse penalties beside the read and write of as many logits, and beside dense ones."""

import pytest
import torch

from fastspec_kernels import penalize

from .inputs import BACKENDS

VOCAB, NUM_NODES = 128256, 6


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("batch", "history"), [(1, 500), (8, 500), (8, 5000)])
def test_penalize(compare, batch, history, dtype, backend):
    """The rows of a step that judges chains of five tokens."""
    num_rows = batch * NUM_NODES
    logits = torch.randn(num_rows, VOCAB).to(dtype)
    rows = torch.arange(num_rows, dtype=torch.int32)
    sequence, node = rows // NUM_NODES, rows % NUM_NODES
    tokens = torch.randint(VOCAB, (batch, NUM_NODES)).int()
    known = torch.stack([torch.randperm(VOCAB)[:history].sort().values for _ in range(batch)])
    counts = torch.randint(3, known.shape)
    cu_history = torch.arange(batch + 1, dtype=torch.int32) * history
    no_bias = [torch.zeros(0, dtype=dtype) for dtype in (torch.int32, torch.float32, torch.int32)]
    lists = (cu_history, known.flatten().int(), counts.flatten().int(), cu_history * 0, *no_bias)
    values = 1 + 1e-3 * torch.rand(3, batch)  # applied again and again

    def ours(rows=logits, backend=backend):
        names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
        penalties = dict(zip(names, values, strict=True))
        penalize(rows, sequence, node, tokens, *lists, **penalties, backend=backend)

    expected, found = logits.clone(), logits.clone()
    ours(expected, "reference")
    ours(found)
    assert torch.equal(found, expected)
    own_ids = known[sequence.long()]
    repetition, presence, frequency = values[:, sequence.long(), None]
    all_counts = torch.zeros(num_rows, VOCAB).scatter_(1, own_ids, counts[sequence.long()].float())
    is_known = torch.zeros(num_rows, VOCAB, dtype=torch.bool).scatter_(1, own_ids, True)

    def dense():
        """As engines do it that keep a count of every token; the path is left out."""
        scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
        x = torch.where(is_known, scaled, logits)
        return x - frequency * all_counts - presence * (all_counts > 0)

    compare(
        {
            "op": "penalize",
            "backend": backend,
            "shape": {"R": num_rows, "V": VOCAB, "history": history},
            "dtype": str(dtype).removeprefix("torch."),
        },
        ours=ours,
        floor=lambda: logits.scatter_(1, own_ids, logits.gather(1, own_ids)),
        peer=dense,
    )
