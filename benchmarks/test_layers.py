"""The ops around attention on the shapes of a decoding step, weights cold as in a whole model."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fastspec_kernels import (
    LayerWeights,
    decoder_layers,
    gated_mlp,
    linear,
    quantize_weight,
    quantized_linear,
    rms_norm,
)

from .inputs import BACKENDS, layer_weights

ROWS = [1, 5, 16]
# (size, hidden) of one layer and how many layers share the run, so that weights leave the caches.
MODELS = {"tiny": (192, 384, 100), "1B": (2048, 8192, 2)}
cases = pytest.mark.parametrize(
    ("model", "rows", "backend"),
    [(model, rows, backend) for model in MODELS for rows in ROWS for backend in BACKENDS],
)


def weights(model):
    size, hidden, copies = MODELS[model]
    generator = torch.Generator().manual_seed(0)
    shapes = ((hidden, size), (hidden, size), (size, hidden))
    return [
        [torch.randn(*shape, generator=generator) / shape[1] ** 0.5 for shape in shapes]
        for _ in range(copies)
    ]


def fields(op, model, rows, backend):
    size, hidden, copies = MODELS[model]
    shape = {"rows": rows, "K": size, "I": hidden, "layers": copies}
    return {"op": op, "backend": backend, "shape": shape, "dtype": "float32"}


@cases
def test_linear(compare, model, rows, backend):
    layers = weights(model)
    x = torch.randn(rows, MODELS[model][0])
    torch.testing.assert_close(
        linear(x, layers[0][0], backend=backend), F.linear(x, layers[0][0]), rtol=1e-4, atol=1e-5
    )
    compare(
        fields("linear", model, rows, backend),
        ours=lambda: [linear(x, gate, backend=backend) for gate, _, _ in layers],
        floor=lambda: [gate.amax() for gate, _, _ in layers],
        peer=lambda: [F.linear(x, gate) for gate, _, _ in layers],
    )


@pytest.mark.parametrize("bits", [4, 8])
@cases
def test_quantized_linear(compare, model, rows, backend, bits):
    """Next to one read of the packed weights, and to `linear` with the weights in bfloat16."""
    size, hidden, copies = MODELS[model]
    copies *= 4  # as packed weights are that much smaller
    x = torch.randn(rows, size)
    weight = torch.randn(hidden, size, generator=torch.Generator().manual_seed(0)) / size**0.5
    packed = [quantize_weight(weight, bits)]
    torch.testing.assert_close(
        quantized_linear(x, packed[0], hidden, backend=backend),
        quantized_linear(x, packed[0], hidden, backend="reference"),
        rtol=1e-4,
        atol=1e-5,
    )
    packed += [packed[0].clone() for _ in range(copies - 1)]
    narrow = [weight.bfloat16() for _ in range(copies)]
    narrow_x = x.bfloat16()
    shape = {"rows": rows, "K": size, "I": hidden, "layers": copies, "bits": bits}
    compare(
        {"op": "quantized_linear", "backend": backend, "shape": shape, "dtype": "float32"},
        ours=lambda: [quantized_linear(x, weight, hidden, backend=backend) for weight in packed],
        floor=lambda: [weight.view(torch.int32).amax() for weight in packed],
        peer=lambda: [linear(narrow_x, weight, backend=backend) for weight in narrow],
    )


@cases
def test_gated_mlp(compare, model, rows, backend):
    layers = weights(model)
    x = torch.randn(rows, MODELS[model][0])

    def torch_mlp(gate, up, down):
        return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)

    torch.testing.assert_close(
        gated_mlp(x, *layers[0], backend=backend), torch_mlp(*layers[0]), rtol=1e-4, atol=1e-5
    )
    compare(
        fields("gated_mlp", model, rows, backend),
        ours=lambda: [gated_mlp(x, *layer, backend=backend) for layer in layers],
        floor=lambda: [weight.amax() for layer in layers for weight in layer],
        peer=lambda: [torch_mlp(*layer) for layer in layers],
    )


@cases
def test_rms_norm(compare, model, rows, backend):
    size = MODELS[model][0]
    x, weight = torch.randn(rows, size), torch.randn(size)
    ours = rms_norm(x, weight, 1e-6, backend=backend)
    torch.testing.assert_close(ours, F.rms_norm(x, (size,), weight, 1e-6), rtol=1e-5, atol=1e-6)
    compare(
        fields("rms_norm", model, rows, backend),
        ours=lambda: rms_norm(x, weight, 1e-6, backend=backend),
        floor=lambda: x.clone(),
        peer=lambda: F.rms_norm(x, (size,), weight, 1e-6),
    )


# SmolLM2-135M: size, hidden, query heads, KV heads, head size, layers.
SIZES = (576, 1536, 9, 3, 64, 12)
CONTEXT = 128


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_decoder_layers(compare, rows, dtype, backend):
    size, hidden, heads, kv_heads, head_size, num_layers = SIZES
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return (torch.randn(*shape, generator=generator) / shape[-1] ** 0.5).to(dtype)

    sizes = size, hidden, heads, kv_heads, head_size
    layers = [layer_weights(sizes, random) for _ in range(num_layers)]
    floats = [weight.view(torch.float32) for layer in layers for weight in layer.values()]
    caches = [random(CONTEXT // 16, 16, kv_heads, head_size) for _ in range(2)]
    angles = torch.randn(rows, head_size // 2, generator=generator).repeat(1, 2)
    x, cos, sin = torch.randn(rows, size, generator=generator), angles.cos(), angles.sin()
    places: dict[str, Any] = {
        "slot_mapping": torch.arange(CONTEXT - rows, CONTEXT),
        "block_table": torch.arange(CONTEXT // 16, dtype=torch.int32)[None],
        "context_lens": torch.tensor([CONTEXT], dtype=torch.int32),
        "cu_rows": torch.tensor([0, rows], dtype=torch.int32),
    }
    seen = torch.arange(CONTEXT) <= torch.arange(CONTEXT - rows, CONTEXT)[:, None]

    weights = [LayerWeights(**layer) for layer in layers]
    options = places | {"cos": cos, "sin": sin, "eps": 1e-6, "backend": backend}

    def ours(number):
        keys, values = ([cache] * number for cache in caches)
        return decoder_layers(x, weights[:number], keys, values, **options)

    def turn(states):  # [heads, rows, head_size]
        first, second = states.chunk(2, dim=-1)
        return states * cos.to(dtype) + torch.cat([-second, first], -1) * sin.to(dtype)

    def torch_layer(layer):
        given = F.rms_norm(x.to(dtype), (size,), layer["attention_norm"], 1e-6)
        query, key, value = (
            F.linear(given, layer[f"{name}_weight"]).view(rows, -1, head_size).transpose(0, 1)
            for name in ("query", "key", "value")
        )
        past = [cache.view(CONTEXT, kv_heads, -1)[:-rows].transpose(0, 1) for cache in caches]
        keys, values = torch.cat([past[0], turn(key)], 1), torch.cat([past[1], value], 1)
        attended = F.scaled_dot_product_attention(
            turn(query)[None], keys[None], values[None], attn_mask=seen, enable_gqa=True
        )[0]
        attended = attended.transpose(0, 1).reshape(rows, -1)
        middle = x.to(dtype) + F.linear(attended, layer["output_weight"])
        given = F.rms_norm(middle, (size,), layer["mlp_norm"], 1e-6)
        gate = F.silu(F.linear(given, layer["gate_weight"])) * F.linear(given, layer["up_weight"])
        return middle + F.linear(gate, layer["down_weight"])

    tolerance = 1e-4 if dtype == torch.float32 else 3e-2
    expected = torch_layer(layers[0]).float()
    torch.testing.assert_close(ours(1), expected, rtol=tolerance, atol=tolerance)
    shape = {"rows": rows, "K": size, "I": hidden, "context": CONTEXT, "layers": num_layers}
    compare(
        {"op": "decoder_layers", "backend": backend, "shape": shape, "dtype": str(dtype)[6:]},
        ours=lambda: ours(num_layers),
        floor=lambda: [weight.amax() for weight in floats],
        peer=lambda: [torch_layer(layer) for layer in layers],
    )
