"""`decoder_layers` with packed weights."""

import re
from typing import Any

import pytest
import torch

from fastspec_kernels import (
    LayerWeights,
    available_backends,
    cpu_instruction_set,
    quantize_weight,
)
from fastspec_kernels.reference.quantized import dequantize_weight

from .cases import backends_of
from .test_decoder_layers import Layers, assert_rows_stand_alone, written

pytestmark = [
    pytest.mark.usefixtures("instruction_set"),
    pytest.mark.skipif("cpu" not in available_backends(), reason="needs the CPU kernels"),
]

BITS = (4, 8)
# Kernels and reference quantize rows that differ by the rounding of float32. That seldom moves a
# value to the next multiple, of 127, and then its row, and those that see it, by up to about 1/100;
# a fault moves all rows.
CLOSE, FAR = 2e-6, 3e-2
CLOSE_BY_TILES = 1e-2  # attention by AMX, whose weights are bfloat16, which moves most rows
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES: list[dict[str, Any]] = [
    {},
    {"size": 33, "hidden": 17, "head_size": 24, "heads": 2},  # keys: 48 of 48 outputs, inputs 33
    {"size": 96, "hidden": 70, "head_size": 10, "heads": 8, "kv_heads": 1},  # keys: 10 of 16
    {"embeddings": 48, "number": 1},
    {"size": 33, "embeddings": 7},
]
CALLS = [
    ([3], [[5, 2]], [6], [1]),
    ([0, 1, 2, 3, 4], [[4, 0], [2, 3]], [6, 3], [3, 2]),
    (list(range(18)), [[1, 3, 5, 7, 8]], [18], [18]),
    ([], [[1]], [0], [0]),
]


def changed(weights: LayerWeights, change) -> LayerWeights:
    """With the weights of products changed, and biases in float32."""
    named = weights._asdict().items()
    found = {name: change(weight) for name, weight in named if name.endswith("_weight")}
    found |= {name: x.float() for name, x in named if name.endswith("_bias") and x is not None}
    return weights._replace(**found)


def packed(weights: LayerWeights, bits: int) -> LayerWeights:
    return changed(weights, lambda weight: quantize_weight(weight, bits))


class PackedLayers(Layers):
    """Layers and pages as those of their base, the weights of products in 4 or 8 bits."""

    def __init__(self, dtype, bits, full=False, **sizes):
        super().__init__(dtype, full, **sizes)
        self.weights = [packed(weights, bits) for weights in self.weights]


def deviations(out, caches, expected, expected_caches) -> list[torch.Tensor]:
    """Of each hidden state, and of each token of the caches: the distance, by the row's norm."""
    pairs = [(out, expected)]
    for sides in zip(caches, expected_caches, strict=True):
        pairs += [(x.float().flatten(2), y.float().flatten(2)) for x, y in zip(*sides, strict=True)]
    return [((x - y).norm(dim=-1) / y.norm(dim=-1)).flatten() for x, y in pairs]


def assert_right(layer: Layers, calls=CALLS, close=CLOSE) -> None:
    hidden, stored = [], []
    for call in calls:
        found = deviations(*layer.run(*call), *layer.run(*call, backend="reference"))
        hidden.append(found[0])
        stored += found[1:]
    assert torch.cat(hidden).quantile(0.25) <= close
    assert torch.cat(hidden + stored).max() <= FAR


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("full", [False, True], ids=["plain", "every option"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_values(dtype, full, sizes, bits):
    is_by_tiles = (
        cpu_instruction_set() == "amx" and dtype == torch.bfloat16 and sizes.get("kv_heads") == 1
    )
    close = CLOSE_BY_TILES if is_by_tiles else CLOSE
    assert_right(PackedLayers(dtype, bits, full, **sizes), close=close)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("full", [False, True], ids=["plain", "every option"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_packed_weights_stand_for_a_matrix(backend, full, sizes, bits):
    """Layers with that matrix give the same but for the 8 bits of the rows, some percent."""
    layer = PackedLayers(torch.float32, bits, full, **sizes)
    plain = Layers(torch.float32, full, **sizes)
    plain.weights = [
        weights._replace(
            **{
                name: dequantize_weight(quantize_weight(weight, bits))[
                    : weight.shape[0], : weight.shape[1]
                ]
                .float()
                .contiguous()
                for name, weight in weights._asdict().items()
                if name.endswith("_weight")
            }
        )
        for weights in plain.weights
    ]
    for call in CALLS:
        result = layer.run(*call, backend=backend)
        for error in deviations(*result, *plain.run(*call, backend="reference")):
            assert (error <= 0.05).all()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("full", [False, True], ids=["plain", "every option"])
def test_a_rows_bits_do_not_depend_on_the_call(full, bits, restore_threads):
    assert_rows_stand_alone(PackedLayers(torch.bfloat16, bits, full))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_the_padding_of_the_feed_forward_width_does_not_count(backend, bits):
    """70 of 80 outputs: as 80 of which ten are zero, whatever else the padding holds."""
    padded, poisoned = (PackedLayers(torch.float32, bits, hidden=70) for _ in range(2))
    whole = Layers(torch.float32, hidden=70)
    widened = []
    for weights in whole.weights:
        more = {name: getattr(weights, name) for name in ("gate_weight", "up_weight")}
        more = {name: torch.cat([weight, torch.zeros(10, 48)]) for name, weight in more.items()}
        more["down_weight"] = torch.cat([weights.down_weight, torch.zeros(48, 10)], dim=1)
        widened.append(packed(weights._replace(**more), bits))
    whole.weights = widened
    for weights in poisoned.weights:  # the codes of outputs 70 to 79; their scales stay zero
        for weight in (weights.gate_weight, weights.up_weight):
            codes = weight[4, :, 64:].unflatten(-1, (-1, 16, 4))
            codes[..., 6:, :] = 255
    call = CALLS[1]
    expected, _ = padded.run(*call, backend=backend)
    assert torch.equal(whole.run(*call, backend=backend)[0], expected)
    assert torch.equal(poisoned.run(*call, backend=backend)[0], expected)


@pytest.mark.parametrize("bits", BITS)
def test_a_row_that_is_not_finite_stays_alone(bits):
    layer = PackedLayers(torch.float32, bits)
    call = ([0, 1, 2, 3], [[5], [4], [3], [2]], [1] * 4, [1] * 4)
    clean, _ = layer.run(*call)
    layer.rows[1, 7] = torch.nan
    out, _ = layer.run(*call)
    assert out[1].isnan().all()
    assert torch.equal(out[[0, 2, 3]], clean[[0, 2, 3]])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layers_with_other_weights_in_one_call(dtype):
    """Plain weights, those of 4 bits and of 8."""
    layers = Layers(dtype, number=5)
    for index, bits in ((1, 4), (2, 8), (4, 4)):
        layers.weights[index] = packed(layers.weights[index], bits)
    call = ([0, 1, 2], [[4, 0], [2, 3]], [6, 3], [2, 1])
    together, caches = layers.run(*call)
    weights, pages, rows = layers.weights, layers.caches, layers.rows
    for index in range(5):
        layers.weights, layers.caches = [weights[index]], [[side[index]] for side in pages]
        out, alone = layers.run(*call)
        layers.rows = torch.cat([out, rows[3:]])
        assert torch.equal(alone[0][0], caches[0][index])
    assert torch.equal(out, together)


def test_inputs_are_kept():
    layers = PackedLayers(torch.bfloat16, 4, number=2)
    expected, _ = layers.run(*CALLS[1])
    layers.kept_layers = [0, 1]
    layers.kept_caches = [torch.zeros(9, 4, 2, 24) for _ in range(2)]
    out, _ = layers.run(*CALLS[1])
    assert torch.equal(out, expected)
    kept = torch.cat([cache.flatten(0, 1)[16 + 3] for cache in layers.kept_caches], dim=-1)
    assert torch.equal(kept[0], layers.rows[0])


WRONG = [
    ("query_weight", lambda w: w[:, :1, :-1].contiguous(), "expected blocks of 576 or 1088 bytes"),
    ("query_weight", lambda w: w[0], r"expected shape \[\*, \*, \*\], got \[1, "),
    ("query_weight", lambda w: w[:3], "48 outputs, not a multiple of 2 KV heads of 16"),
    ("query_weight", lambda w: w[:0], "0 outputs, not a multiple of 2 KV heads of 16"),
    ("query_weight", lambda w: w.repeat(1, 2, 1), r"expected shape \[4, 1, \*\], got \[4, 2, "),
    ("key_weight", lambda w: w[:1], r"expected shape \[2, 1, \*\], got \[1, 1, "),
    ("value_weight", lambda w: w.repeat(2, 1, 1), r"expected shape \[2, 1, \*\], got \[4, 1, "),
    ("output_weight", lambda w: w[:, :0], r"expected shape \[3, 1, \*\], got \[3, 0, "),
    ("gate_weight", lambda w: w[:4], r"expected shape \[4, 1, \*\]"),  # of what comes next
    ("up_weight", lambda w: w[:4], r"expected shape \[5, 1, \*\], got \[4, 1, "),
    ("down_weight", lambda w: w[:, :1].contiguous(), r"expected shape \[3, 2, \*\], got \[3, 1, "),
    ("down_weight", lambda w: w[..., :64].contiguous(), "expected blocks of 576 or 1088 bytes"),
    ("down_weight", lambda w: None, "expected a tensor, got NoneType"),
    ("down_weight", lambda w: w.to(torch.int8), "expected uint8, got int8"),
    ("down_weight", lambda w: w.transpose(0, 1).contiguous().transpose(0, 1), "must be contiguous"),
    ("key_weight", lambda w: torch.zeros(32, 48), r"expected shape \[2, 1, \*\], got \[32, 48\]"),
    ("query_weight", lambda w: torch.zeros(64, 48), ""),  # then the others are wrong
]


@pytest.mark.parametrize(("field", "change", "message"), WRONG)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_errors(field, change, message, bits, backend):
    """Nothing is read or written where packed weights do not fit, in the last of two layers."""
    layers = PackedLayers(torch.float32, bits, full=True)
    first, second = layers.weights
    wrong = second._replace(**{field: change(getattr(second, field))})
    unequal, error = written(layers, layers=[first, wrong], backend=backend)
    assert not any(unequal)
    named = {"gate_weight": "up_weight"}.get(field, field) if message else r"\w+"
    assert re.match(rf"layers\[1\]\.{named}: {message}", error), error


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_errors_of_unlike_bits_and_types(backend):
    layers = PackedLayers(torch.float32, 4, full=True)
    other = PackedLayers(torch.float32, 8, full=True)
    first, second = layers.weights
    for field in ("key_weight", "output_weight", "gate_weight", "down_weight"):
        wrong = second._replace(**{field: getattr(other.weights[1], field)})
        unequal, error = written(layers, layers=[first, wrong], backend=backend)
        assert not any(unequal)
        expected = "expected blocks of 576 bytes, as query_weight, got 1088"
        assert error == f"layers[1].{field}: {expected}"
    low = PackedLayers(torch.bfloat16, 4, full=True)
    wrong = second._replace(query_bias=second.query_bias.bfloat16())
    _, error = written(layers, layers=[first, wrong], backend=backend)
    assert error == "layers[1].query_bias: expected float32, got bfloat16"
    wrong = low.weights[0]._replace(mlp_norm=first.mlp_norm)
    low.weights[0] = wrong
    _, error = written(low, backend=backend)
    assert error == "layers[0].mlp_norm: expected bfloat16, got float32"


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_errors_of_heads_that_fill_no_tile(backend):
    """20 query outputs are packed as 32, so the number of heads is not known."""
    layers = PackedLayers(torch.float32, 4, heads=2, kv_heads=2, head_size=10)
    _, error = written(layers, backend=backend)
    assert error.startswith(
        "layers[0].query_weight: 32 outputs, not a multiple of 2 KV heads of 10"
    )


@pytest.mark.skipif("triton" not in backends_of("decoder_layers"), reason="needs Triton")
@pytest.mark.parametrize("bits", BITS)
def test_error_of_triton(bits):
    layers = PackedLayers(torch.float32, bits)
    for call in (CALLS[0], CALLS[-1]):
        with pytest.raises(ValueError, match=r"^layers: 'triton' has no products with packed"):
            layers.run(*call, backend="triton")
