"""Every wrong argument of tree_attention raises a ValueError that begins with its name."""

import math

import pytest
import torch

from fastspec_kernels import tree_attention

from .cases import ints
from .paged import attention_backends, paged

backends = pytest.mark.parametrize("backend", attention_backends("tree_attention"))


def arguments() -> dict:
    names = ["query", "key_cache", "value_cache", "block_table", "context_lens", "cu_rows"]
    return dict(zip(names, paged([20, 3], [2, 1]).tensors, strict=True))


WRONG = {
    "query": [
        lambda query: query.tolist(),
        lambda query: query.double(),
        lambda query: query.bfloat16(),
        lambda query: query[:, :, :8],
        lambda query: query[:, :, :0],
        lambda query: query[0, 0, 0],
        lambda query: query[0],
        lambda query: query[:, :3],
        lambda query: query[:, :0],
        lambda query: query.repeat_interleave(2, 2)[:, :, ::2],
        lambda query: query.to("meta"),
    ],
    "key_cache": [
        lambda cache: None,
        lambda cache: cache.double(),
        lambda cache: cache[0],
        lambda cache: cache[:, :0],
        lambda cache: cache.transpose(1, 2).contiguous().transpose(1, 2),
    ],
    "value_cache": [
        lambda cache: cache.half(),
        lambda cache: cache[:1],
        lambda cache: torch.cat([cache, cache], 1)[:, :16],
    ],
    "block_table": [
        lambda table: table.long(),
        lambda table: table[0],
        lambda table: table.T.contiguous().T,
        lambda table: table.fill_(-1),
        lambda table: table.fill_(1000),
    ],
    "context_lens": [
        lambda lens: lens.long(),
        lambda lens: lens[:1],
        lambda lens: lens.repeat_interleave(2)[::2],
        lambda lens: ints(1, 3),
        lambda lens: ints(20, 2**31 - 1),
        lambda lens: ints(-5, 3),
    ],
    "cu_rows": [
        lambda rows: rows.long(),
        lambda rows: rows[1:],
        lambda rows: rows.repeat_interleave(2)[::2],
        lambda rows: ints(1, 2, 3),
        lambda rows: ints(0, 2, 2),
        lambda rows: ints(0, 5, 3),
        lambda rows: ints(0, -1, 3),
    ],
}
CASES = [(name, change) for name, changes in WRONG.items() for change in changes]


@backends
@pytest.mark.parametrize(("name", "change"), CASES)
def test_wrong_tensor(backend, name, change):
    good = arguments()
    with pytest.raises(ValueError, match=f"^{name}"):
        tree_attention(**{**good, name: change(good[name])}, backend=backend)


@backends
@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("scale", math.nan),
        ("scale", math.inf),
        ("scale", 3e38),
        ("sliding_window", -1),
        ("softcap", -1.0),
        ("softcap", math.inf),
        ("softcap", 3e38),
        ("sinks", torch.zeros(3)),
        ("sinks", torch.zeros(4, dtype=torch.float64)),
        ("sinks", [0.0] * 4),
        ("sinks", torch.zeros(8)[::2]),
        ("sinks", torch.zeros(4, device="meta")),
        ("ancestor_mask", torch.ones(2, 1, dtype=torch.int64)),
        ("ancestor_mask", torch.ones(2, 2, 1, dtype=torch.int64, device="meta")),
    ],
)
def test_wrong_option(backend, option, value):
    with pytest.raises(ValueError, match=f"^{option}"):
        tree_attention(**arguments(), backend=backend, **{option: value})


@backends
def test_a_scale_that_overflows_with_a_softcap(backend):
    with pytest.raises(ValueError, match=r"^scale: too large for float32 with softcap 1e-30"):
        tree_attention(**arguments(), backend=backend, scale=1e10, softcap=1e-30)


def test_unknown_backend():
    with pytest.raises(ValueError, match=r"^backend"):
        tree_attention(**arguments(), backend="tpu")
