"""penalize against a token-by-token statement of its rule, to the last bit."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from fastspec_kernels import penalize

from .cases import DTYPES, affordable, backends_of, ints, is_slow, on_device

backends = pytest.mark.parametrize("backend", backends_of("penalize"))
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")


def expected_row(case: dict, row: int) -> list[float]:
    """The float32 logits that one row should have before they are rounded to its dtype."""
    b, node = int(case["row_sequence"][row]), int(case["row_node"][row])
    path = []
    while node > 0:
        path.append(int(case["tree_token_ids"][b, node]))
        node = node - 1 if case["parents"] is None else int(case["parents"][b, node])
    history, bias = entries(case, "history", b), entries(case, "bias", b)
    counts = dict(zip(*history, strict=True))
    active = {token: value for token, value, until in zip(*bias, strict=True) if len(path) < until}
    repetition, presence, frequency = (
        np.float32(default if case[name] is None else case[name][b].item())
        for name, default in zip(PENALTIES, (1, 0, 0), strict=True)
    )
    logits = []
    for token, logit in enumerate(case["logits"][row].float().numpy()):
        x = logit + np.float32(active[token]) if token in active else logit
        count = counts.get(token, 0) + path.count(token)
        if token in counts or token in path:
            x = x / repetition if x > 0 else x * repetition
        if count > 0:
            x = x - (frequency * np.float32(count) + presence)
        logits.append(x)
    return logits


def entries(case: dict, kind: str, b: int) -> list[list]:
    """The lists that hold the entries of one sequence."""
    first, end = case[f"cu_{kind}"][b : b + 2].tolist()
    names = ("history_ids", "history_counts")
    names = names if kind == "history" else ("bias_ids", "bias", "bias_until")
    return [case[name][first:end].tolist() for name in names]


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    """The same numbers, with the same signs of zeros; one NaN is like another."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    is_zero = expected == 0
    assert torch.equal(actual.signbit() & is_zero, expected.signbit() & is_zero)


def check(case: dict, backend: str) -> None:
    """Edit a view whose gaps hold a mark, and compare every bit."""
    logits = case["logits"]
    num_rows, vocab = logits.shape
    rows = [expected_row(case, row) for row in range(num_rows)]
    expected = torch.tensor(np.array(rows, np.float32).reshape(logits.shape)).to(logits.dtype)
    tensors = on_device(case, backend)
    buffer = torch.full((num_rows, vocab + 5), 7.0, dtype=logits.dtype).to(tensors["logits"].device)
    view = buffer[:, 2 : vocab + 2].copy_(tensors["logits"])
    assert penalize(**{**tensors, "logits": view}, backend=backend) is None
    assert_same_bits(view.cpu(), expected)
    assert (buffer[:, :2] == 7).all()
    assert (buffer[:, vocab + 2 :] == 7).all()


def lists_of(
    generator: torch.Generator, batch: int, vocab: int, most: int
) -> tuple[Tensor, Tensor]:
    """Prefix sums and ids, some of them just outside the vocabulary; one list is empty."""
    lists = []
    for b in range(batch):
        size = 0 if b == 1 else min(most, vocab + 2)
        ids = torch.randperm(vocab + 2, generator=generator)[:size].sort().values - 1
        lists.append(ids.int())
    sums = torch.tensor([0, *(len(ids) for ids in lists)]).cumsum(0).int()
    return sums, torch.cat(lists)


def random_case(
    generator: torch.Generator, num_rows: int, vocab: int, dtype=torch.float32, num_nodes=7
) -> dict:
    """Rows of any order over three trees, whose texts overlap; all kinds of logits."""
    batch = 3
    cu_history, history_ids = lists_of(generator, batch, vocab, 9)
    cu_bias, bias_ids = lists_of(generator, batch, vocab, 6)

    def below(end: int, *shape: int) -> Tensor:
        return torch.randint(end, shape, generator=generator, dtype=torch.int32)

    tokens = below(vocab + 2, batch, num_nodes) - 1
    again = torch.rand(batch, num_nodes, generator=generator) < 0.4
    own = history_ids[:1] if len(history_ids) else ints(0)
    logits = torch.randn(num_rows, vocab, generator=generator) * 5
    logits[torch.rand(num_rows, vocab, generator=generator) < 0.1] = -math.inf
    logits[torch.rand(num_rows, vocab, generator=generator) < 0.02] = math.nan
    logits[torch.rand(num_rows, vocab, generator=generator) < 0.1] *= 0.0
    bias = torch.randn(len(bias_ids), generator=generator) * 3
    bias[torch.rand(len(bias_ids), generator=generator) < 0.2] = -math.inf
    node = torch.arange(num_nodes)
    return {
        "logits": logits.to(dtype),
        "row_sequence": below(batch, num_rows),
        "row_node": below(num_nodes, num_rows),
        "tree_token_ids": torch.where(again, own, tokens),
        "parents": (torch.rand(batch, num_nodes, generator=generator) * node).int()
        - (node == 0).int(),
        "cu_history": cu_history,
        "history_ids": history_ids,
        "history_counts": below(4, len(history_ids)),
        "cu_bias": cu_bias,
        "bias_ids": bias_ids,
        "bias": bias,
        "bias_until": below(5, len(bias_ids)),
        "repetition_penalty": torch.tensor([1.3, 1.0, 0.7]),
        "presence_penalty": torch.tensor([0.4, 0.0, -0.3]),
        "frequency_penalty": torch.tensor([0.1, 0.25, -0.7]),
    }


@backends
@pytest.mark.parametrize("vocab", [1, 40, 300])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_random_rows(backend, vocab, dtype):
    generator = torch.Generator().manual_seed(vocab)
    for _ in range(affordable(backend, 6)):
        check(random_case(generator, 3 if is_slow(backend) else 12, vocab, dtype), backend)


@backends
def test_each_argument_may_be_left_out(backend):
    generator = torch.Generator().manual_seed(1)
    for names in [("parents",), *((name,) for name in PENALTIES), PENALTIES]:
        case = random_case(generator, 6, 30)
        check({**case, **dict.fromkeys(names)}, backend)


@backends
def test_a_token_in_every_list_is_edited_once(backend):
    """Twice on the path, in the history and in the bias, which ends at depth 2."""
    check(
        {
            "logits": torch.tensor([[4.0, -4.0]]).repeat(3, 1),
            "row_sequence": ints(0, 0, 0),
            "row_node": ints(0, 1, 2),
            "tree_token_ids": ints([9, 0, 0]),
            "parents": None,
            "cu_history": ints(0, 1),
            "history_ids": ints(0),
            "history_counts": ints(3),
            "cu_bias": ints(0, 2),
            "bias_ids": ints(0, 1),
            "bias": torch.tensor([1.0, -math.inf]),
            "bias_until": ints(2, 1),
            "repetition_penalty": torch.tensor([2.0]),
            "presence_penalty": torch.tensor([0.5]),
            "frequency_penalty": torch.tensor([0.25]),
        },
        backend,
    )


@backends
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zeros_stay_zeros(backend, dtype):
    """Of both signs, where a bias of 0 is added and where a penalty multiplies."""
    check(
        {
            "logits": torch.tensor([[0.0, -0.0, 0.0, -0.0, 1.0]]).to(dtype),
            "row_sequence": ints(0),
            "row_node": ints(0),
            "tree_token_ids": ints([9]),
            "parents": None,
            "cu_history": ints(0, 2),
            "history_ids": ints(0, 1),
            "history_counts": ints(0, 2),
            "cu_bias": ints(0, 2),
            "bias_ids": ints(2, 3),
            "bias": torch.zeros(2),
            "bias_until": ints(5, 5),
            "repetition_penalty": torch.tensor([2.0]),
            "presence_penalty": torch.tensor([0.0]),
            "frequency_penalty": torch.tensor([0.0]),
        },
        backend,
    )


@backends
@pytest.mark.parametrize("num_threads", [1, 3])
def test_long_texts(backend, num_threads, restore_threads):
    """More entries than one thread takes, a long path, and only what is named changes."""
    torch.set_num_threads(num_threads)
    vocab, rows = 5000, 4
    size, num_nodes = (300, 31) if is_slow(backend) else (3000, 201)
    generator = torch.Generator().manual_seed(2)
    case = random_case(generator, rows, vocab, torch.bfloat16, num_nodes)
    cu = torch.arange(4, dtype=torch.int32) * size
    ids = torch.stack([torch.randperm(vocab, generator=generator)[:size] for _ in range(3)])
    case |= {
        "parents": None,
        "row_node": ints(num_nodes - 1, 0, num_nodes // 2, 3),
        "cu_history": cu,
        "history_ids": ids.sort().values.flatten().int(),
        "history_counts": torch.randint(300, (3 * size,), generator=generator).int(),
    }
    check(case, backend)


def test_ids_may_lie_as_far_apart_as_int32_allows():
    def call(backend, *ids):
        case = random_case(torch.Generator().manual_seed(3), 4, 20)
        case |= {"cu_history": torch.tensor([0, 2, 2, 2], dtype=torch.int32)}
        case |= {"history_ids": torch.tensor(ids, dtype=torch.int32)}
        penalize(**case | {"history_counts": torch.ones(2, dtype=torch.int32)}, backend=backend)

    for backend in backends_of("penalize"):
        call(backend, -1, 2**31 - 1)
        with pytest.raises(ValueError, match=r"^history_ids: expected ascending ids"):
            call(backend, 2**31 - 1, -2)


def test_what_is_not_in_order_is_refused_on_the_cpu():
    case = random_case(torch.Generator().manual_seed(3), 4, 20)
    before = case["logits"].clone()
    wrong = {
        "row_sequence": (0, 3, r"row_sequence\[0\]: expected 0 to 2, got 3"),
        "row_node": (1, -1, r"row_node\[1\]: expected 0 to 6, got -1"),
        "parents": ((2, 3), 3, "parents: .* got 3 for node 3 of tree 2"),
        "cu_history": (0, 1, "cu_history: expected prefix sums"),
        "cu_bias": (3, 99, "cu_bias: expected prefix sums from 0 to at most"),
        "history_ids": (8, -5, "history_ids: expected ascending ids .* in sequence 0"),
        "bias_ids": (7, int(case["bias_ids"][6]), "bias_ids: expected ascending .* sequence 2"),
    }
    for backend in backends_of("penalize"):
        for name, (at, value, message) in wrong.items():
            changed = case[name].clone()
            changed[at] = value
            with pytest.raises(ValueError, match=f"^{message}"):
                penalize(**{**case, name: changed}, backend=backend)
    assert torch.equal(case["logits"].nan_to_num(), before.nan_to_num())
    for bad in (0.0, -1.0, torch.nan):
        changed = torch.ones_like(case["repetition_penalty"])
        changed[-1] = bad
        for backend in backends_of("penalize"):
            with pytest.raises(
                ValueError, match=r"^repetition_penalty\[\d+\]: expected a number > 0"
            ):
                penalize(**{**case, "repetition_penalty": changed}, backend=backend)
    with pytest.raises(ValueError, match=r"^logits: require a gradient"):
        penalize(**{**case, "logits": case["logits"].clone().requires_grad_()})
    with pytest.raises(ValueError, match=r"^logits: the rows overlap"):
        penalize(**{**case, "logits": torch.zeros(1, 20).expand(4, 20)})
