"""The row ops beside Hugging Face's warpers, softmax and multinomial, and one read of the rows."""

import pytest
import torch

from fastspec_kernels import logits_to_probs, row_stats, sample

from .inputs import BACKENDS, SAMPLING, logits_like_a_model, parameters, warpers

SHAPES = [(1, 32000), (1, 128256), (8, 128256)]
cases = pytest.mark.parametrize(
    ("num_rows", "vocab", "sampling", "backend"),
    [
        (*shape, sampling, backend)
        for shape in SHAPES
        for sampling in SAMPLING
        for backend in BACKENDS
    ],
)


def inputs(num_rows, vocab, sampling):
    generator = torch.Generator().manual_seed(0)
    logits = logits_like_a_model(num_rows, vocab, generator)
    values = SAMPLING[sampling]
    uniforms = torch.rand(num_rows, generator=generator)
    return logits, parameters(values, num_rows), warpers(values), uniforms


def fields(op, logits, sampling, backend):
    shape = {"R": logits.shape[0], "V": logits.shape[1], "sampling": sampling}
    return {"op": op, "backend": backend, "shape": shape, "dtype": "float32"}


@cases
def test_row_stats(compare, num_rows, vocab, sampling, backend):
    logits, params, chain, _ = inputs(num_rows, vocab, sampling)
    ours = row_stats(logits, **params, backend=backend)
    torch.testing.assert_close(ours, row_stats(logits, **params, backend="reference"))
    compare(
        fields("row_stats", logits, sampling, backend),
        ours=lambda: row_stats(logits, **params, backend=backend),
        floor=lambda: torch.amax(logits, -1),
        peer=lambda: chain(None, logits).logsumexp(-1),
    )


@cases
def test_logits_to_probs(compare, num_rows, vocab, sampling, backend):
    logits, params, chain, _ = inputs(num_rows, vocab, sampling)
    ours = logits_to_probs(logits, **params, backend=backend)
    theirs = chain(None, logits).softmax(-1)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    compare(
        fields("logits_to_probs", logits, sampling, backend),
        ours=lambda: logits_to_probs(logits, **params, backend=backend),
        floor=lambda: torch.empty_like(logits).copy_(logits),
        peer=lambda: chain(None, logits).softmax(-1),
    )


@cases
def test_sample(compare, num_rows, vocab, sampling, backend):
    logits, params, chain, uniforms = inputs(num_rows, vocab, sampling)
    ours = sample(logits, uniforms, **params, backend=backend)
    torch.testing.assert_close(ours, sample(logits, uniforms, **params, backend="reference"))
    compare(
        fields("sample", logits, sampling, backend),
        ours=lambda: sample(logits, uniforms, **params, backend=backend),
        floor=lambda: torch.amax(logits, -1),
        peer=lambda: torch.multinomial(chain(None, logits).softmax(-1), 1),
    )
