"""Inputs that the tests of the sampling ops share: backends, logits, sampling parameters."""

import math

import torch
from torch import Tensor

from fastspec_kernels import backend

SMALL_VOCABS = (1, 2, 31, 32, 33, 65, 1000, 4096, 4097)
LARGE_VOCABS = (32000, 50257, 128256)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TEMPERATURES = (0.0, 1e-6, 0.1, 0.8, 1.0, 10.0, math.inf)
TOP_P = (0.0, 1e-6, 0.5, 0.9, 0.999, 1.0)
MIN_P = (0.0, 0.05, 0.5, 1.0)
POISON = math.nan


def backends_of(op: str) -> list[str]:
    """The backends that can run `op` on one of the devices here."""
    devices = ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]
    names = [name for device in devices for name in backend.backends_of(op, torch.device(device))]
    return list(dict.fromkeys(names))


def device_of(name: str) -> str:
    return "cuda" if name in ("cuda", "triton") and torch.cuda.is_available() else "cpu"


def ints(*values) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def margin_of(name: str) -> float:
    """Decisions closer than this to their bound may differ from the oracle's."""
    return 1e-12 if name == "reference" else 1e-5


def is_slow(name: str) -> bool:
    """Whether the backend is interpreted."""
    return name == "triton" and device_of(name) == "cpu"


def affordable(name: str, num: int) -> int:
    """How many of `num` cases a backend can take in a test."""
    return max(1, num // 40) if is_slow(name) else num


def sizes_and_dtypes(name: str, sizes: tuple[int, ...], vocab: int) -> list:
    """Each of four sizes with a dtype; one of the pairs, by the vocabulary, for a slow backend."""
    pairs = list(zip(sizes, (*DTYPES, torch.float32), strict=True))
    return [pairs[vocab % 4]] if is_slow(name) else pairs


def random_params(num: int, vocab: int, generator: torch.Generator) -> dict[str, Tensor]:
    """One random combination of sampling parameters for each of `num` rows."""

    def pick(values, dtype):
        index = torch.randint(len(values), (num,), generator=generator)
        return torch.tensor(values, dtype=dtype)[index]

    return {
        "temperature": pick(TEMPERATURES, torch.float32),
        "top_k": pick((0, 0, 1, 2, 50, vocab, vocab + 1, -1, 2**31 - 1), torch.int32),
        "top_p": pick(TOP_P, torch.float32),
        "min_p": pick(MIN_P, torch.float32),
    }


def row_params_of(params: dict[str, Tensor], index: int) -> dict:
    """The sampling parameters of one row as the oracle takes them."""
    numbers = {name: value[index] for name, value in params.items()}
    bitmask = numbers.pop("token_bitmask", None)
    plain = {name: value.item() for name, value in numbers.items()}
    return plain if bitmask is None else {**plain, "bitmask": bitmask.numpy()}


def rows_for(vocab: int, name: str) -> int:
    """How many random rows a test of a backend can afford; eight are one of each kind."""
    return 64 if vocab < 100 and not is_slow(name) else 8


def random_logits(num: int, vocab: int, generator: torch.Generator, dtype=torch.float32) -> Tensor:
    """Rows of eight kinds in turn, as a strided view whose gaps hold NaN."""
    buffer = torch.full((num, vocab + 3), POISON, dtype=dtype)
    rows = buffer[:, 1 : vocab + 1]
    values = torch.randn(num, vocab, generator=generator) * 3
    for row in range(num):
        kind = row % 8
        if kind == 1:  # one peak
            values[row, int(torch.randint(vocab, (1,), generator=generator))] += 20
        elif kind == 2:  # many ties
            values[row] = values[row].round()
        elif kind == 3:  # nearly flat
            values[row] *= 1e-3
        elif kind == 4:  # masked, with one finite logit at least
            masked = torch.rand(vocab, generator=generator) < 0.7
            masked[int(torch.randint(vocab, (1,), generator=generator))] = False
            values[row, masked] = -math.inf
        elif kind == 5:  # all equal
            values[row] = values[row, 0]
        elif kind == 6:  # steep, far from zero
            values[row] = values[row] * 20 - 500
        elif kind == 7:  # a single finite logit
            keep = int(torch.randint(vocab, (1,), generator=generator))
            value = values[row, keep].clone()
            values[row] = -math.inf
            values[row, keep] = value
    rows.copy_(values.to(dtype))
    return rows


def invalid_rows(vocab: int) -> Tensor:
    """Three rows that no distribution can be made of: NaN, +inf, nothing finite."""
    rows = torch.zeros(3, vocab)
    rows[0, vocab // 2] = math.nan
    rows[1, vocab - 1] = math.inf
    rows[2] = -math.inf
    return rows


def uniform_samples(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Uniform numbers, some at the two ends of [0, 1)."""
    samples = torch.rand(shape, generator=generator)
    ends = torch.rand(shape, generator=generator)
    samples[ends < 0.05] = 0.0
    samples[ends > 0.95] = 1 - 2.0**-24
    return samples


def random_bitmask(logits: Tensor, generator: torch.Generator) -> Tensor:
    """Allowed tokens of each row: most, few, all or, rarely, none; logits of others may be NaN.

    Bits beyond the vocabulary are arbitrary, and so is the row stride.
    """
    num, vocab = logits.shape
    words = (vocab + 31) // 32
    allowed = torch.rand(num, words * 32, generator=generator)
    share = torch.tensor([0.9, 0.5, 0.1, 1.0])[torch.arange(num) % 4]
    bits = allowed < share[:, None]
    bits[torch.arange(num), torch.randint(vocab, (num,), generator=generator)] = True
    bits[torch.rand(num, generator=generator) < 0.02] = False
    banned = ~bits[:, :vocab] & (torch.rand(num, vocab, generator=generator) < 0.1)
    logits.masked_fill_(banned, math.nan)
    packed = torch.zeros(num, words + 1, dtype=torch.int64)
    for bit in range(32):
        packed[:, :words] += bits[:, bit::32].long() << bit
    return packed.int()[:, :words]


def on_device(case: dict, name: str) -> dict:
    """The tensors of a case where the backend wants them; other values as they are."""
    device = device_of(name)
    return {k: v.to(device) if isinstance(v, Tensor) else v for k, v in case.items()}
