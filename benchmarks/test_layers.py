"""The ops around attention on the shapes of a decoding step, weights cold as in a whole model."""

import pytest
import torch
import torch.nn.functional as F

from fastspec_kernels import gated_mlp, linear, rms_norm

from .inputs import BACKENDS

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
