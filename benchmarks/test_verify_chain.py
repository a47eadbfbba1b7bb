"""verify_chain beside Hugging Face's warpers and speculative sampling, and one read of the rows."""

from itertools import cycle

import pytest
import torch
from transformers.generation.utils import _speculative_sampling

from fastspec_kernels import logits_to_probs, verify_chain

from .inputs import BACKENDS, SAMPLING, chain_case, parameters, warpers

NUM_DRAFT = 4


def verify(case, params, values, backend):
    """Our tokens are the reference's, and our distribution is the one Hugging Face makes."""
    for uniforms in case.uniform_samples:
        ours = call(case, uniforms, params, backend)
        reference = call(case, uniforms, params, "reference")
        assert ours[0].tolist() == reference[0].tolist()
        torch.testing.assert_close(ours[2], reference[2])
    rows = case.target_logits
    per_row = parameters(values, len(rows))
    theirs = warpers(values)(None, rows).softmax(-1)
    torch.testing.assert_close(
        logits_to_probs(rows, **per_row, backend=backend), theirs, rtol=1e-4, atol=1e-6
    )


def call(case, uniforms, params, backend):
    return verify_chain(
        case.target_logits,
        case.cu_rows,
        case.draft_token_ids,
        uniforms,
        draft_logits=case.draft_logits,
        **params,
        backend=backend,
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("vocab", [32000, 128256])
def test_verify_chain(compare, vocab, sampling, backend):
    case, values = chain_case(NUM_DRAFT, vocab), SAMPLING[sampling]
    params = parameters(values, 1)
    verify(case, params, values, backend)
    uniforms, chain = cycle(case.uniform_samples), warpers(values)

    def peer():
        target = chain(None, case.target_logits)
        draft = chain(None, case.draft_logits[0])
        return _speculative_sampling(case.draft_token_ids, draft[None], NUM_DRAFT, target[None])

    compare(
        {
            "op": "verify_chain",
            "backend": backend,
            "shape": {"B": 1, "K": NUM_DRAFT, "V": vocab, "sampling": sampling},
            "dtype": "float32",
        },
        ours=lambda: call(case, next(uniforms), params, backend),
        floor=lambda: torch.amax(case.target_logits, -1),
        peer=peer,
    )
