"""Random numbers: published Philox vectors, the same bits on every backend, distributions."""

import numpy as np
import pytest
import torch

from fastspec_kernels import reference, uniform
from fastspec_kernels.testing import chi_square

from .cases import backends_of, device_of

backends = pytest.mark.parametrize("backend", backends_of("uniform"))
MIN, MAX = -(2**63), 2**63 - 1


def philox(key: int, counter: tuple[int, int, int, int]) -> list[int]:
    """Philox4x32-10 in Python's own integers, from the paper."""
    low = 0xFFFFFFFF
    c0, c1, c2, c3 = counter
    k0, k1 = key & low, key >> 32
    for _ in range(10):
        even, odd = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (odd >> 32) ^ c1 ^ k0, odd & low, (even >> 32) ^ c3 ^ k1, even & low
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    return [c0, c1, c2, c3]


@pytest.mark.parametrize(
    ("key", "counter", "words"),
    [
        (0, (0, 0, 0, 0), [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        (2**64 - 1, (2**32 - 1,) * 4, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            0x299F31D0A4093822,
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_published_vectors(key, counter, words):
    """The known answers that come with the authors' library."""
    assert philox(key, counter) == words


def draw(backend, seeds, positions, num, stream):
    tensors = (torch.tensor(seeds), torch.tensor(positions))
    on_device = [tensor.to(device_of(backend)) for tensor in tensors]
    return uniform(*on_device, num, stream, backend=backend).cpu()


@backends
@pytest.mark.parametrize("num", [0, 1, 4, 7])
@pytest.mark.parametrize("stream", [0, 5, 2**32 - 1])
def test_matches_the_definition(backend, num, stream):
    seeds, positions = [0, 1, -1, MIN, MAX, 12345678901], [0, 2**32 - 1, 2**32, MAX, MIN, 77]
    expected = torch.empty(len(seeds), num)
    for b, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        low, high = position & 0xFFFFFFFF, position >> 32 & 0xFFFFFFFF
        for i in range(num):
            word = philox(seed % 2**64, (low, high, i // 4, stream))[i % 4]
            expected[b, i] = (word >> 8) * 2.0**-24
    out = draw(backend, seeds, positions, num, stream)
    assert out.dtype == torch.float32
    assert torch.equal(out, expected)


@backends
def test_a_longer_draw_begins_with_the_shorter(backend):
    short, long = (draw(backend, [3, 9], [1, 2], num, 0) for num in (5, 11))
    assert torch.equal(long[:, :5], short)


@backends
def test_rows_do_not_depend_on_the_batch(backend):
    whole = draw(backend, [3, 9, 4], [1, 2, 3], 6, 1)
    assert torch.equal(whole[1:2], draw(backend, [9], [2], 6, 1))


@backends
def test_empty_batch(backend):
    empty = torch.empty(0, dtype=torch.int64, device=device_of(backend))
    assert uniform(empty, empty, 3, 0, backend=backend).shape == (0, 3)


@backends
def test_is_uniform_and_uncorrelated(backend):
    """Mean, variance, range and lag correlations of 2^18 numbers, within six standard errors."""
    positions = torch.arange(2**16, device=device_of(backend))
    samples = uniform(torch.zeros_like(positions), positions, 4, 0, backend=backend).cpu().double()
    assert 0.0 <= samples.min() < 1e-4
    assert 1 - 1e-4 < samples.max() < 1.0
    flat = samples.flatten() - 0.5
    error = len(flat) ** -0.5
    assert abs(flat.mean()) < 6 * error / 12**0.5
    assert abs(flat.square().mean() - 1 / 12) < 6 * error / 180**0.5
    for lag in (1, 2, 4, 1000):
        assert abs((flat[lag:] * flat[:-lag]).mean()) < 6 * error / 12


def test_the_noise_is_gumbel_and_independent_within_a_group():
    """Exponential numbers of unit rate: each token's, and pairs of one group; 16 bins each way."""
    num, vocab, bins = 4_000, 260, 8
    noise = reference.rng.gumbel(torch.full((num,), 5), torch.arange(num), vocab)
    shares = ((-(-noise).exp()).exp() * bins).long().clamp(0, bins - 1)
    even = np.full(bins, 1 / bins)
    for token in (0, 16, 37, 240, 255, 256):
        counts = np.bincount(shares[:, token], minlength=bins)
        assert chi_square(counts, even) > 1e-6
    for one, other in ((0, 16), (0, 240), (21, 37), (0, 1), (240, 256)):
        joint = np.bincount(shares[:, one] * bins + shares[:, other], minlength=bins**2)
        assert chi_square(joint, np.outer(even, even).flatten()) > 1e-6


def test_streams_and_seeds_differ():
    draws = [draw("reference", [seed], [7], 8, stream) for seed in (0, 1) for stream in (0, 1)]
    assert len({tuple(numbers.flatten().tolist()) for numbers in draws}) == 4


@backends
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("seed", ([1], torch.ones(1, dtype=torch.int64), 1, 0)),
        ("seed", (torch.ones(1), torch.ones(1, dtype=torch.int64), 1, 0)),
        ("seed", (torch.ones(1, 1, dtype=torch.int64), torch.ones(1, dtype=torch.int64), 1, 0)),
        ("position", (torch.ones(1, dtype=torch.int64), torch.ones(2, dtype=torch.int64), 1, 0)),
        ("position", (torch.ones(1, dtype=torch.int64), torch.ones(1, dtype=torch.int32), 1, 0)),
        ("num", (torch.ones(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64), -1, 0)),
        ("stream", (torch.ones(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64), 1, -1)),
        ("stream", (torch.ones(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64), 1, 2**32)),
    ],
)
def test_wrong_arguments(backend, name, arguments):
    with pytest.raises(ValueError, match=f"^{name}"):
        uniform(*arguments, backend=backend)


def test_opcheck():
    seeds = torch.tensor([1, 2])
    torch.library.opcheck(torch.ops.fastspec.uniform.default, (seeds, seeds, 5, 3))


def test_fake_matches_reference():
    seeds = torch.tensor([1, 2])
    fake = torch.ops.fastspec.uniform(seeds.to("meta"), seeds.to("meta"), 5, 3)
    real = reference.uniform(seeds, seeds, 5, 3)
    assert (fake.shape, fake.dtype) == (real.shape, real.dtype)
