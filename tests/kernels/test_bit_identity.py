"""The sampling ops give the same bits whatever the batch, its order and the number of threads."""

import pytest
import torch

from fastspec_kernels import (
    logits_to_probs,
    row_stats,
    sample,
    sample_coupled,
    verify_chain,
    verify_tree,
)

from .cases import (
    backends_of,
    device_of,
    is_slow,
    on_device,
    random_bitmask,
    random_logits,
    random_params,
)

pytestmark = pytest.mark.usefixtures("instruction_set")

NUM_ROWS = 8
ROW_OPS = {
    "row_stats": row_stats,
    "logits_to_probs": logits_to_probs,
    "sample": sample,
    "sample_coupled": sample_coupled,
}


def bits(outputs) -> list[torch.Tensor]:
    """Outputs as integers, so that NaN equals NaN and 0.0 differs from -0.0."""
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return [out.cpu().view(torch.int32) for out in outputs]


def assert_same(left, right):
    for one, other in zip(left, right, strict=True):
        assert torch.equal(one, other)


def pick(tensors: dict, index) -> dict:
    return {name: value[index].contiguous() for name, value in tensors.items()}


def threads_of(backend: str) -> tuple[int, ...]:
    """An interpreter has no threads, so one pass says all."""
    return (1,) if is_slow(backend) else (1, 2, 3)


def backends_and_vocabs(op: str) -> list[tuple[str, int]]:
    """Large rows, which the compiled backends split, are too slow for the reference."""
    return [
        (backend, vocab)
        for backend in backends_of(op)
        for vocab in (33, 3000, 70001)
        if vocab < 70001 or backend not in ("reference", "triton") or device_of(backend) == "cuda"
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
    if op == "sample_coupled":
        params["seed"] = params["position"] = torch.arange(NUM_ROWS)
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
    for num_threads in threads_of(backend):
        torch.set_num_threads(num_threads)
        assert_same(whole, bits(call(logits, **params, backend=backend)))
        alone = bits(call(logits[:1], **pick(params, slice(1)), backend=backend))
        assert_same([out[:1] for out in whole], alone)


def chain_batch(vocab, generator, batch=4, num_draft=3):
    """Arguments of verify_chain, all per sequence: four rows of the target for each."""
    target = random_logits(batch * 4, vocab, generator)
    bitmask = random_bitmask(target, generator)
    target = target.unflatten(0, (batch, 4))
    draft_logits = random_logits(batch * num_draft, vocab, generator)
    return {
        "target_logits": target,
        "token_bitmask": bitmask.unflatten(0, (batch, 4)),
        "draft_token_ids": target[:, :num_draft].nan_to_num(-torch.inf).argmax(-1).int(),
        "uniform_samples": torch.rand(batch, num_draft + 1, generator=generator),
        "draft_logits": draft_logits.unflatten(0, (batch, num_draft)),
        **random_params(batch, vocab, generator),
    }


def tree_batch(vocab, generator, batch=4, num_nodes=4):
    """Arguments of verify_tree, all per sequence."""
    case = chain_batch(vocab, generator, batch, num_nodes)
    case["tree_token_ids"] = case.pop("draft_token_ids").clone()
    parents = torch.tensor([[-1, 0, 0, 1], [-1, 0, 1, 2], [-1, 0, 0, 0], [-1, 0, 1, 1]])
    case["parents"] = parents.int()
    return case


def call_on_rows(op, case, index, backend, **options):
    """Call a verification op on some of the sequences, each with four rows."""
    case = {name: value[index] for name, value in case.items()}
    for name in ("target_logits", "token_bitmask"):
        case[name] = case[name].flatten(0, 1)
    batch = len(case["uniform_samples"])
    cu_rows = torch.arange(batch + 1, dtype=torch.int32) * 4
    tensors = on_device({**case, "cu_rows": cu_rows}, backend)
    return bits(op(**tensors, **options, backend=backend))


def assert_no_mates(op, case, backend, **options):
    """The same bits in another order, alone, and for every number of threads."""
    whole = call_on_rows(op, case, slice(None), backend, **options)
    order = torch.tensor([2, 0, 3, 1])
    assert_same([out[order] for out in whole], call_on_rows(op, case, order, backend, **options))
    for num_threads in threads_of(backend):
        torch.set_num_threads(num_threads)
        assert_same(whole, call_on_rows(op, case, slice(None), backend, **options))
        for index in range(4):
            one = slice(index, index + 1)
            assert_same(
                [out[one] for out in whole], call_on_rows(op, case, one, backend, **options)
            )


@pytest.mark.parametrize(("backend", "vocab"), backends_and_vocabs("verify_chain"))
@pytest.mark.parametrize("method", ["standard", "block"])
def test_verify_chain(backend, vocab, method, restore_threads):
    case = chain_batch(vocab, torch.Generator().manual_seed(vocab))
    assert_no_mates(verify_chain, case, backend, method=method)


@pytest.mark.parametrize(("backend", "vocab"), backends_and_vocabs("verify_tree"))
@pytest.mark.parametrize("rule", ["target_only", "without_replacement", "with_replacement"])
def test_verify_tree(backend, vocab, rule, restore_threads):
    case = tree_batch(vocab, torch.Generator().manual_seed(vocab))
    if rule == "target_only":
        case.pop("draft_logits")
    assert_no_mates(verify_tree, case, backend, sibling_rule=rule)
