"""A draft of three tokens in one call, by a model of SmolLM2's width, and by the ops in turn."""

import pytest
import torch

from fastspec_kernels import (
    DraftWeights,
    LayerWeights,
    decoder_layers,
    draft_chain,
    linear,
    rms_norm,
    sample,
)

from .inputs import BACKENDS, layer_weights

SIZE, HIDDEN, HEADS, KV_HEADS, HEAD_SIZE, COLUMNS = 576, 1536, 9, 3, 64, 8192
CONTEXT, BLOCK, STEPS, EPS = 128, 16, 3, 1e-6
NUM_MODELS = 4  # in turn, so that weights leave the caches


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("backend", BACKENDS)
def test_draft_chain(compare, num_layers, dtype, backend):
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return (torch.randn(*shape, generator=generator) / shape[-1] ** 0.5).to(dtype)

    sizes = SIZE, HIDDEN, HEADS, KV_HEADS, HEAD_SIZE

    def model():
        layers = [LayerWeights(**layer_weights(sizes, random)) for _ in range(num_layers)]
        ends = random(COLUMNS, SIZE), random(COLUMNS, SIZE)
        return DraftWeights(ends[0], layers, torch.ones(SIZE, dtype=dtype), ends[1])

    models = [model() for _ in range(NUM_MODELS)]
    caches = [
        [random(CONTEXT // BLOCK, BLOCK, KV_HEADS, HEAD_SIZE) for _ in range(num_layers)]
        for _ in range(2)
    ]
    angles = torch.randn(CONTEXT, HEAD_SIZE // 2, generator=generator).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()
    table = torch.arange(CONTEXT // BLOCK, dtype=torch.int32)[None]
    first, uniforms = torch.tensor([5, 9]), torch.rand(1, STEPS, generator=generator)
    start = CONTEXT - STEPS - 1

    def ours(weights):
        context_lens = torch.tensor([start + 2], dtype=torch.int32)
        cu_rows, num = (torch.tensor(x, dtype=torch.int32) for x in ([0, 2], [STEPS]))
        given = first, weights, *caches, table, context_lens, cu_rows, num, uniforms
        options = {"eps": EPS, "num_columns": COLUMNS, "cos": cos, "sin": sin}
        return draft_chain(*given, **options, backend=backend)[0][0]

    def in_turn(weights):
        ids, place, drawn = first, start, []
        for step in range(STEPS):
            slots = torch.arange(place, place + len(ids))
            lens, rows = ([place + len(ids)], [0, len(ids)])
            pages = (torch.tensor(x, dtype=torch.int32) for x in (lens, rows))
            factors = {"cos": cos[slots], "sin": sin[slots], "eps": EPS, "backend": backend}
            hidden = weights.embedding[ids].float()
            given = hidden, weights.layers, *caches, slots, table, *pages
            hidden = decoder_layers(*given, **factors).to(dtype)
            normed = rms_norm(hidden[-1:], weights.norm, EPS, backend=backend)
            logits = linear(normed, weights.head, backend=backend)
            token, _ = sample(logits, uniforms[:, step], backend=backend)
            ids, place = token.long(), place + len(ids)
            drawn.append(token)
        return torch.cat(drawn)

    assert torch.equal(ours(models[0]), in_turn(models[0]))
    floats = [
        weight.view(torch.float32)
        for weights in models
        for layer in weights.layers
        for weight in (*(x for x in layer if x is not None), weights.head)
    ]
    shape = {"E": SIZE, "I": HIDDEN, "context": CONTEXT, "layers": num_layers, "K": STEPS}
    compare(
        {"op": "draft_chain", "backend": backend, "shape": shape, "dtype": str(dtype)[6:]},
        ours=lambda: [ours(weights) for weights in models],
        floor=lambda: [[weight.amax() for weight in floats] for _ in range(STEPS)],
        peer=lambda: [in_turn(weights) for weights in models],
    )
