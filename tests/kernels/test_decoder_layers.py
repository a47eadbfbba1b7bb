"""`decoder_layers`: right against float64, rows independent, caches written as `store_kv` does."""

from typing import Any

import pytest
import torch

from fastspec_kernels import LayerWeights, available_backends, build_tree, decoder_layers

from .cases import backends_of, device_of

pytestmark = [
    pytest.mark.usefixtures("instruction_set"),
    pytest.mark.skipif("cpu" not in available_backends(), reason="needs the CPU kernels"),
]

compiled = pytest.mark.parametrize(
    "backend", [name for name in backends_of("decoder_layers") if name != "reference"]
)
# Of a row's norm; 16 bits: queries, keys, values and what enters a product may be rounded.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
PLAIN: dict[str, Any] = {"eps": 1e-6}
FULL: dict[str, Any] = {
    "eps": 1e-5,
    "norm_shift": 1.0,
    "activation": "gelu_tanh",
    "softcap": 3.0,
    "sliding_window": 4,
    "scale": 0.3,
}


class Layers:
    """Weights and pages of two layers, the same for the same sizes."""

    def __init__(
        self,
        dtype,
        full=False,
        size=48,
        hidden=80,
        heads=4,
        kv_heads=2,
        head_size=16,
        embeddings=0,
        number=2,
    ):
        generator = torch.Generator().manual_seed(size)

        def random(*shape):
            scale = shape[-1] ** -0.5 if len(shape) > 1 else 1.0
            return (scale * torch.randn(*shape, generator=generator)).to(dtype)

        queries, keys = heads * head_size, kv_heads * head_size
        self.size, self.rotated = size, head_size if not full else 8
        inputs = size + embeddings

        def weights():
            given: dict[str, Any] = {
                "attention_norm": random(size),
                "query_weight": random(queries, inputs),
                "key_weight": random(keys, inputs),
                "value_weight": random(keys, inputs),
                "output_weight": random(size, queries),
                "mlp_norm": random(size),
                "gate_weight": random(hidden, size),
                "up_weight": random(hidden, size),
                "down_weight": random(size, hidden),
            }
            if full:
                given |= {
                    "query_bias": random(queries),
                    "key_bias": random(keys),
                    "value_bias": random(keys),
                    "output_bias": random(size),
                    "query_norm": random(head_size),
                    "key_norm": random(head_size),
                    "attention_out_norm": random(size),
                    "mlp_out_norm": random(size),
                    "sinks": torch.randn(heads, generator=generator),
                }
            return LayerWeights(**given)

        self.weights = [weights() for _ in range(number)]
        self.options = FULL if full else PLAIN
        written = [[random(9, 4, kv_heads, head_size) for _ in self.weights] for _ in range(2)]
        self.caches = [[torch.cat([cache, cache[:3]]) for cache in side] for side in written]
        self.rows = torch.randn(64, size, generator=generator)
        self.embeddings = torch.randn(64, embeddings, generator=generator) if embeddings else None
        self.angles = torch.randn(64, self.rotated, generator=generator)
        self.kept_layers: list[int] = []
        self.kept_caches: list[torch.Tensor] = []

    def run(self, rows, table, context_lens, counts, mask=None, backend="cpu"):
        """The rows with these numbers, the last of their contexts; also the caches afterwards."""
        device = device_of(backend)
        table = torch.tensor(table, dtype=torch.int32)
        caches = [[cache.to(device, copy=True) for cache in side] for side in self.caches]
        slots = [
            int(table[b, place // 4]) * 4 + place % 4
            for b, (length, count) in enumerate(zip(context_lens, counts, strict=True))
            for place in range(length - count, length)
        ]
        given: dict[str, Any] = {
            "slot_mapping": torch.tensor(slots, dtype=torch.int64),
            "block_table": table,
            "context_lens": torch.tensor(context_lens, dtype=torch.int32),
            "cu_rows": torch.tensor([0, *counts]).cumsum(0, dtype=torch.int32),
            "cos": self.angles[rows].cos(),
            "sin": self.angles[rows].sin(),
            "embeddings": None if self.embeddings is None else self.embeddings[rows],
            "ancestor_mask": mask,
        }
        if self.kept_layers:
            self.options = self.options | {
                "kept_layers": self.kept_layers,
                "kept_caches": self.kept_caches,
            }
        out = decoder_layers(
            self.rows[rows].to(device),
            [LayerWeights(*(x if x is None else x.to(device) for x in w)) for w in self.weights],
            *caches,
            **{name: x if x is None else x.to(device) for name, x in given.items()},
            backend=backend,
            **self.options,
        )
        return out.cpu(), [[cache.cpu() for cache in side] for side in caches]


def tolerance_of(dtype: torch.dtype, backend: str) -> float:
    """More where products, torch's, give 16 bits."""
    return TOLERANCE[dtype] * (2.0 if backend == "triton" else 1.0)


def assert_close(actual, expected, tolerance):
    assert actual.dtype == torch.float32
    error, size = (actual - expected).norm(dim=-1), expected.norm(dim=-1)
    assert (error <= tolerance * size).all(), (error / size).max()


def check_call(layer: Layers, call: tuple, backend: str, tolerance: float) -> None:
    """What a call gives and leaves in the caches, against the reference."""
    out, caches = layer.run(*call, backend=backend)
    expected, expected_caches = layer.run(*call, backend="reference")
    assert_close(out, expected, tolerance)
    for side, expected_side in zip(caches, expected_caches, strict=True):
        for cache, other in zip(side, expected_side, strict=True):
            assert_close(cache.float().flatten(2), other.float().flatten(2), tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("full", [False, True], ids=["plain", "every option"])
@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"size": 33, "hidden": 17, "head_size": 10, "heads": 2},
        {"embeddings": 48, "number": 1},
        {"size": 33, "embeddings": 7},
    ],
    ids=str,
)
@compiled
def test_values(dtype, full, sizes, backend):
    layer = Layers(dtype, full, **sizes)
    calls = [
        ([3], [[5, 2]], [6], [1]),
        ([0, 1, 2, 3, 4], [[4, 0], [2, 3]], [6, 3], [3, 2]),
        (list(range(18)), [[1, 3, 5, 7, 8]], [18], [18]),
        ([], [[1]], [0], [0]),
    ]
    for call in calls:
        check_call(layer, call, backend, tolerance_of(dtype, backend))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@compiled
def test_trees(dtype, backend):
    layer = Layers(dtype)
    parents = torch.tensor([[-1, 0, 0, 1, 1]], dtype=torch.int32)
    _, mask = build_tree(parents)
    call = ([0, 1, 2, 3, 4], [[4, 0, 2]], [11], [5], mask)
    out, _ = layer.run(*call, backend=backend)
    expected, _ = layer.run(*call, backend="reference")
    assert_close(out, expected, tolerance_of(dtype, backend))


def assert_rows_stand_alone(layer: Layers):
    """A row's bits: alone on the cache that the rows before it have left, or with them and others,
    on any number of threads."""
    count, table, alone = 9, [[4, 0, 2]], []
    for row in range(count):
        out, layer.caches = layer.run([row], table, [row + 1], [1])
        alone.append(out)
    rows = torch.cat(alone)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for number in (1, 2, 4, 5, 9):
            together, _ = layer.run(list(range(number)), table, [number], [number])
            assert torch.equal(together, rows[:number]), (threads, number)
        for others, other_table in ((11, [1, 3, 5]), (36, [1, 3, *range(5, 12)])):
            numbers = [*range(20, 20 + others), *range(count)]
            tables = [other_table, table[0] + [0] * (len(other_table) - len(table[0]))]
            more, _ = layer.run(numbers, tables, [others, count], [others, count])
            assert torch.equal(more[others:], rows), (threads, others)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("full", [False, True], ids=["plain", "every option"])
def test_a_rows_bits_do_not_depend_on_the_call(dtype, full, restore_threads):
    assert_rows_stand_alone(Layers(dtype, full))


def written(given: Layers, **changes):
    """The caches after a call with one row of 2, and the call's error."""
    caches = [[cache.clone() for cache in side] for side in given.caches]
    arguments: dict[str, Any] = {
        "layers": given.weights,
        "slot_mapping": torch.tensor([17]),
        "block_table": torch.tensor([[4]], dtype=torch.int32),
        "context_lens": torch.tensor([2], dtype=torch.int32),
        "cu_rows": torch.tensor([0, 1], dtype=torch.int32),
    }
    error = ""
    try:
        decoder_layers(
            given.rows[:1],
            key_caches=caches[0],
            value_caches=caches[1],
            eps=1e-6,
            **(arguments | changes),
        )
    except ValueError as raised:
        error = str(raised)
    return [
        not torch.equal(*pair)
        for sides in zip(caches, given.caches, strict=True)
        for pair in zip(*sides, strict=True)
    ], error


def test_nothing_is_written_for_the_slot_minus_one():
    layers = Layers(torch.float32)
    assert written(layers) == ([True] * 4, "")
    assert written(layers, slot_mapping=torch.tensor([-1])) == ([False] * 4, "")


def test_nothing_is_written_where_a_later_layer_is_wrong():
    layers = Layers(torch.float32)
    first, second = layers.weights
    wrong = second._replace(down_weight=second.down_weight[:, 1:].contiguous())
    changed, error = written(layers, layers=[first, wrong])
    assert not any(changed)
    assert error.startswith("layers[1].down_weight: expected shape")
    changed, error = written(layers, layers=[first])
    assert not any(changed)
    assert error == "key_caches: expected one for each of 1 layers, got 2"


def test_nothing_is_written_where_an_index_is_wrong():
    layers = Layers(torch.float32)
    changed, error = written(layers, context_lens=torch.tensor([5], dtype=torch.int32))
    assert not any(changed)
    assert error.startswith("context_lens[0]: expected from 1 "), error


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_long_contexts_with_any_number_of_threads(dtype, restore_threads):
    """Contexts whose keys are split among tasks."""
    layers = Layers(dtype)
    call = ([0, 1, 2], [[*range(9)] * 40, [7] * 360], [1440, 600], [2, 1])
    outs = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        outs.append(layers.run(*call)[0])
    assert all(torch.equal(out, outs[0]) for out in outs)
    assert_close(outs[0], layers.run(*call, backend="reference")[0], TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    "sizes",
    [{}, {"heads": 6}, {"kv_heads": 1}, {"hidden": 33}, {"heads": 6, "kv_heads": 3, "hidden": 33}],
    ids=str,
)
def test_layers_of_unlike_sizes_or_types_in_one_call(dtype, sizes):
    layers, others = Layers(torch.float32), Layers(dtype, **sizes)
    layers.weights += others.weights
    layers.caches = [own + more for own, more in zip(layers.caches, others.caches, strict=True)]
    check_call(layers, ([0, 1, 2], [[4, 0], [2, 3]], [6, 3], [2, 1]), "cpu", TOLERANCE[dtype])


def test_layers_of_several_head_sizes_need_a_scale():
    layers, others = Layers(torch.float32), Layers(torch.float32, head_size=8)
    layers.weights += others.weights
    layers.caches = [own + more for own, more in zip(layers.caches, others.caches, strict=True)]
    layers.rotated, layers.angles = 8, layers.angles[:, :8].contiguous()
    call = ([0, 1, 2], [[4, 0], [2, 3]], [6, 3], [2, 1])
    with pytest.raises(ValueError, match="scale: expected a number, as layers differ in head"):
        layers.run(*call)
    layers.options = PLAIN | {"scale": 0.3}
    check_call(layers, call, "cpu", TOLERANCE[torch.float32])


def test_layers_in_one_call_are_those_in_several(restore_threads):
    layers = Layers(torch.bfloat16, number=3)
    call = ([0, 1, 2, 3, 4], [[4, 0], [2, 3]], [6, 3], [3, 2])
    together, caches = layers.run(*call)
    weights, pages, rows = layers.weights, layers.caches, layers.rows
    for index in range(3):
        layers.weights, layers.caches = [weights[index]], [[side[index]] for side in pages]
        out, alone = layers.run(*call)
        layers.rows = torch.cat([out, rows[5:]])
        assert torch.equal(alone[0][0], caches[0][index])
    assert torch.equal(out, together)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kept_dtype", TOLERANCE, ids=str)
@compiled
def test_inputs_are_kept(dtype, kept_dtype, backend):
    """In the slots of the rows, in halves, as the layers one by one are given them."""
    layers, kept_layers = Layers(dtype, number=3), [2, -1, 0, 2]
    call = ([0, 1, 2, 3, 4], [[4, 0], [2, 3]], [6, 3], [3, 2])
    slots = [4 * 4 + 3, 0, 1, 2 * 4 + 1, 2 * 4 + 2]
    given, weights, pages = layers.rows[:5], layers.weights, layers.caches
    inputs = []
    for index in range(3):
        layers.weights, layers.caches = [weights[index]], [[side[index]] for side in pages]
        inputs.append(given)
        given, _ = layers.run(*call, backend=backend)
        layers.rows = torch.cat([given, layers.rows[5:]])
    layers = Layers(dtype, number=3)
    alone, _ = layers.run(*call, backend=backend)
    poison = torch.full((9, 4, 4, 24), torch.nan, dtype=kept_dtype)
    layers.kept_layers = kept_layers
    layers.kept_caches = [poison.to(device_of(backend), copy=True) for _ in range(2)]
    out, _ = layers.run(*call, backend=backend)
    assert torch.equal(out, alone)
    kept = torch.cat([cache.cpu().flatten(0, 1) for cache in layers.kept_caches], dim=-1)
    for head, layer in enumerate(kept_layers):
        expected = torch.full((36, 48), torch.nan, dtype=kept_dtype)
        if layer >= 0:
            expected[slots] = inputs[layer].to(kept_dtype)
        assert torch.equal(kept[:, head].nan_to_num(99.0), expected.nan_to_num(99.0)), head


def test_no_input_is_kept_for_the_slot_minus_one_or_where_a_call_is_wrong():
    layers = Layers(torch.float32)
    kept = [torch.zeros(9, 4, 1, 24) for _ in range(2)]
    options = {"kept_layers": [0], "kept_caches": kept}
    assert written(layers, **options)[1] == ""
    stored = torch.cat([cache.flatten(0, 1)[17, 0] for cache in kept])
    assert torch.equal(stored, layers.rows[0])
    for cache in kept:
        cache.zero_()
    written(layers, slot_mapping=torch.tensor([-1]), **options)
    small = [cache[:4] for cache in kept]
    for wrong, name in (
        ({"kept_layers": [2]}, "kept_layers: expected numbers from -1 to 1"),
        ({"kept_layers": [0, 1]}, "kept_caches[0]: expected 2 heads of half of 48 numbers"),
        ({"kept_layers": []}, "kept_layers: got none, but kept_caches are given"),
        ({"kept_caches": kept[:1]}, "kept_caches: expected two caches or none"),
        ({"kept_caches": small}, "slot_mapping: expected -1 or a slot below 16, got [17]"),
    ):
        changed, error = written(layers, **(options | wrong))
        assert not any(changed)
        assert error.startswith(name), error
    assert not any(cache.any() for cache in kept)
