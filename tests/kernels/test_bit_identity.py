"""The sampling ops give the same bits whatever the batch, its order and the number of threads."""

import pytest
import torch

from fastspec_kernels import logits_to_probs, row_stats, sample, verify_chain

from .cases import backends_of, device_of, random_logits, random_params

NUM_ROWS = 8
ROW_OPS = {"row_stats": row_stats, "logits_to_probs": logits_to_probs, "sample": sample}


@pytest.fixture
def restore_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def bits(outputs) -> list[torch.Tensor]:
    """Outputs as integers, so that NaN equals NaN and 0.0 differs from -0.0."""
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return [out.cpu().view(torch.int32) for out in outputs]


def assert_same(left, right):
    for one, other in zip(left, right, strict=True):
        assert torch.equal(one, other)


def pick(tensors: dict, index) -> dict:
    return {name: value[index].contiguous() for name, value in tensors.items()}


def backends_and_vocabs(op: str) -> list[tuple[str, int]]:
    """Large rows, which the compiled backends split, are too slow for the reference."""
    return [
        (backend, vocab)
        for backend in backends_of(op)
        for vocab in (33, 3000, 70001)
        if backend != "reference" or vocab < 70001
    ]


@pytest.mark.parametrize(
    ("op", "backend", "vocab"), [(op, *pair) for op in ROW_OPS for pair in backends_and_vocabs(op)]
)
def test_row_ops(op, backend, vocab, restore_threads):
    generator = torch.Generator().manual_seed(vocab)
    logits = random_logits(NUM_ROWS, vocab, generator).to(device_of(backend))
    params = random_params(NUM_ROWS, vocab, generator)
    if op == "sample":
        params["uniform_samples"] = torch.rand(NUM_ROWS, generator=generator)
    params = {name: value.to(logits.device) for name, value in params.items()}
    call = ROW_OPS[op]
    whole = bits(call(logits, **params, backend=backend))

    order = torch.randperm(NUM_ROWS, generator=generator)
    shuffled = bits(call(logits[order], **pick(params, order), backend=backend))
    assert_same([out[order] for out in whole], shuffled)
    for index in range(0, NUM_ROWS, 3):
        one = slice(index, index + 1)
        alone = bits(call(logits[one], **pick(params, one), backend=backend))
        assert_same([out[one] for out in whole], alone)
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        assert_same(whole, bits(call(logits, **params, backend=backend)))
        alone = bits(call(logits[:1], **pick(params, slice(1)), backend=backend))
        assert_same([out[:1] for out in whole], alone)


@pytest.mark.parametrize(("backend", "vocab"), backends_and_vocabs("verify_chain"))
def test_verify_chain(backend, vocab, restore_threads):
    batch, num_draft = 4, 3
    generator = torch.Generator().manual_seed(vocab)
    device = device_of(backend)
    target = random_logits(batch * 4, vocab, generator).to(device).unflatten(0, (batch, 4))
    per_sequence = {
        "draft_token_ids": target[:, :num_draft].float().argmax(-1).int(),
        "uniform_samples": torch.rand(batch, num_draft + 1, generator=generator),
        "draft_logits": random_logits(batch * num_draft, vocab, generator).unflatten(
            0, (batch, -1)
        ),
        **random_params(batch, vocab, generator),
    }
    per_sequence = {name: value.to(device) for name, value in per_sequence.items()}

    def call(index):
        rows = target[index]
        cu_rows = torch.arange(len(rows) + 1, dtype=torch.int32, device=device) * 4
        case = {name: value[index] for name, value in per_sequence.items()}
        return bits(verify_chain(rows.flatten(0, 1), cu_rows, **case, backend=backend))

    whole = call(slice(None))
    order = torch.tensor([2, 0, 3, 1])
    assert_same([out[order] for out in whole], call(order))
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        assert_same(whole, call(slice(None)))
        for index in range(batch):
            one = slice(index, index + 1)
            assert_same([out[one] for out in whole], call(one))
