"""match_suffix: an independent search agrees on every backend; edges and errors."""

import pytest
import torch

from fastspec_kernels import library, match_suffix, reference

from .cases import affordable, backends_of, device_of

backends = pytest.mark.parametrize("backend", backends_of("match_suffix"))
rules = pytest.mark.parametrize("rule", ["latest", "earliest_longest"])
LONG = 2**40


def expected_tokens(text, min_match, max_match, num_tokens, rule):
    """Longest suffix first, every place in turn."""
    for size in range(min(max_match, len(text) - 1), min_match - 1, -1):
        suffix = text[len(text) - size :]
        ends = [end for end in range(size, len(text)) if text[end - size : end] == suffix]
        if ends:
            end = ends[-1] if rule == "latest" else ends[0]
            found = text[end : end + num_tokens]
            return found + [-1] * (num_tokens - len(found))
    return [-1] * num_tokens


def run(backend, token_ids, lengths, **options):
    device = device_of(backend)
    ids = torch.as_tensor(token_ids, dtype=torch.int32).to(device)
    lengths = torch.tensor(lengths, dtype=torch.int32, device=device)
    out = match_suffix(ids, lengths, **options, backend=backend)
    assert out.dtype == torch.int32
    return out.tolist()


@backends
@rules
@pytest.mark.parametrize(("min_match", "max_match"), [(1, 1), (1, 3), (2, 5), (3, LONG), (1, LONG)])
def test_random_texts(backend, rule, min_match, max_match):
    generator = torch.Generator().manual_seed(1)
    for case in range(affordable(backend, 40)):
        width = int(torch.randint(1, 70, (1,), generator=generator))
        words = int(torch.randint(1, 7, (1,), generator=generator))
        num_tokens = case % 8
        ids = torch.randint(words, (5, width + 3), generator=generator, dtype=torch.int32)
        lengths = torch.randint(width + 1, (5,), generator=generator).tolist()
        limits = {"min_match": min_match, "max_match": max_match, "num_tokens": num_tokens}
        out = run(backend, ids[:, 1 : width + 1], lengths, rule=rule, **limits)
        for row, text, length in zip(out, ids[:, 1:].tolist(), lengths, strict=True):
            assert row == expected_tokens(text[:length], rule=rule, **limits), (text, length)


@backends
@rules
@pytest.mark.parametrize("period", [1, 2, 7])
def test_long_periodic_texts(backend, rule, period):
    length = 2000 if backend == "cpu" else 300
    text = [token % period for token in range(length)]
    limits = {"min_match": 2, "max_match": LONG, "num_tokens": 9}
    expected = expected_tokens(text, rule=rule, **limits)
    assert run(backend, [text], [length], rule=rule, **limits) == [expected]
    assert expected[:period] == [token % period for token in range(length, length + period)]


@backends
def test_the_two_rules_differ_in_the_place_only(backend):
    text = [[7, 8, 1, 5, 7, 8, 2, 6, 8, 3, 7, 8]]
    limits = {"min_match": 1, "max_match": 3, "num_tokens": 2}
    assert run(backend, text, [12], rule="latest", **limits) == [[2, 6]]
    assert run(backend, text, [12], rule="earliest_longest", **limits) == [[1, 5]]
    limits["max_match"] = 1
    assert run(backend, text, [12], rule="latest", **limits) == [[3, 7]]
    limits["min_match"] = limits["max_match"] = 3
    assert run(backend, text, [12], rule="latest", **limits) == [[-1, -1]]


@backends
@rules
def test_what_follows_the_text_is_not_read(backend, rule):
    limits = {"min_match": 1, "max_match": 4, "num_tokens": 4, "rule": rule}
    text = [3, 1, 2, 3]
    rows = [[*text, garbage, 3, 1, 2] for garbage in (-1, 3, 2**31 - 1)]
    assert run(backend, rows, [4] * 3, **limits) == [[1, 2, 3, -1]] * 3
    assert run(backend, rows, [0, 1, 2], **limits) == [[-1] * 4] * 3


@backends
def test_empty(backend):
    limits = {"min_match": 1, "max_match": 4, "num_tokens": 3}
    assert run(backend, torch.empty(2, 0), [0, 0], **limits) == [[-1] * 3] * 2
    assert run(backend, torch.empty(0, 5), [], **limits) == []
    limits["num_tokens"] = 0
    assert run(backend, [[1, 1]], [2], **limits) == [[]]


@backends
def test_more_columns_than_a_kernel_writes_at_once(backend):
    text = [5, *range(10, 1510), 5]
    limits = {"min_match": 1, "max_match": 2, "num_tokens": 2500}
    assert run(backend, [text], [len(text)], **limits) == [text[1:] + [-1] * 999]


@backends
@rules
def test_a_row_does_not_depend_on_the_batch(backend, rule):
    ids = torch.randint(4, (9, 2500 if backend == "cpu" else 60), dtype=torch.int32)
    lengths = [ids.shape[1] - row for row in range(9)]
    limits = {"min_match": 2, "max_match": 8, "num_tokens": 6, "rule": rule}
    together = run(backend, ids, lengths, **limits)
    assert [run(backend, ids[b : b + 1], [lengths[b]], **limits)[0] for b in range(9)] == together


@backends
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("token_ids", {"token_ids": torch.zeros(2, 4, dtype=torch.int64)}),
        ("token_ids", {"token_ids": torch.zeros(4, dtype=torch.int32)}),
        ("token_ids", {"token_ids": torch.zeros(2, 8, dtype=torch.int32)[:, ::2]}),
        ("lengths", {"lengths": torch.zeros(3, dtype=torch.int32)}),
        ("lengths", {"lengths": torch.zeros(2, dtype=torch.int64)}),
        ("lengths", {"lengths": torch.zeros(2, dtype=torch.int32, device="meta")}),
        ("min_match", {"min_match": 0}),
        ("min_match", {"min_match": 1.5}),
        ("max_match", {"max_match": 1}),
        ("num_tokens", {"num_tokens": -1}),
        ("num_tokens", {"num_tokens": True}),
        ("rule", {"rule": "first"}),
        ("backend", {"backend": "abacus"}),
    ],
)
def test_wrong_arguments(backend, name, change):
    arguments = {
        "token_ids": torch.zeros(2, 4, dtype=torch.int32),
        "lengths": torch.zeros(2, dtype=torch.int32),
        "min_match": 2,
        "max_match": 3,
        "num_tokens": 4,
        "backend": backend,
    }
    with pytest.raises(ValueError, match=f"^{name}: "):
        match_suffix(**{**arguments, **change})


@pytest.mark.parametrize("length", [-1, 5])
@pytest.mark.parametrize("backend", [b for b in backends_of("match_suffix") if b != "cuda"])
def test_lengths_out_of_range(backend, length):
    lengths = torch.tensor([4, length], dtype=torch.int32)
    ids = torch.zeros(2, 4, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"^lengths\[1\]: expected 0 to 4"):
        match_suffix(ids, lengths, min_match=1, max_match=2, num_tokens=3, backend=backend)


def test_opcheck_and_fake():
    arguments = (
        torch.zeros(2, 6, dtype=torch.int32),
        torch.tensor([6, 3]).int(),
        1,
        3,
        4,
        "latest",
    )
    if library.has_kernel("match_suffix", "cpu"):
        torch.library.opcheck(torch.ops.fastspec.match_suffix.default, arguments)
    on_meta = [
        value.to("meta") if isinstance(value, torch.Tensor) else value for value in arguments
    ]
    for result in (reference.match_suffix(*on_meta), torch.ops.fastspec.match_suffix(*on_meta)):
        assert result.is_meta
        assert (result.shape, result.dtype) == ((2, 4), torch.int32)


def test_the_kernel_checks_lengths_by_itself():
    if not library.has_kernel("match_suffix", "cpu"):
        pytest.skip("the CPU extension is not built")
    ids, lengths = torch.zeros(1, 4, dtype=torch.int32), torch.tensor([9]).int()
    with pytest.raises((ValueError, RuntimeError), match=r"^lengths"):  # the latter with torch 2.15
        torch.ops.fastspec.match_suffix(ids, lengths, 1, 2, 3, "latest")
