"""The suffix match beside one read of the text and a sliding-window search with torch."""

import pytest
import torch

from fastspec_kernels import match_suffix

from .inputs import BACKENDS

NUM_TOKENS, MATCH = 5, 5


def windows(token_ids, lengths):
    """Prompt lookup as unfold and compare, for texts that fill their rows; the latest match."""
    width = token_ids.shape[1]
    equal = (token_ids.unfold(1, MATCH, 1)[:, :-1] == token_ids[:, None, -MATCH:]).all(-1)
    end = width - equal.flip(1).int().argmax(1) - 1
    places = end[:, None] + torch.arange(NUM_TOKENS)
    tokens = token_ids.gather(1, places.clamp(max=width - 1))
    return torch.where(equal.any(1, keepdim=True) & (places < width), tokens, -1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("batch", "width"), [(1, 4096), (32, 4096), (1, 131072)])
def test_match_suffix(compare, batch, width, backend):
    token_ids = torch.randint(40, (batch, width), dtype=torch.int32)
    lengths = torch.full((batch,), width, dtype=torch.int32)

    def ours():
        limits = {"min_match": MATCH, "max_match": MATCH, "num_tokens": NUM_TOKENS}
        return match_suffix(token_ids, lengths, **limits, backend=backend)

    assert torch.equal(ours(), windows(token_ids, lengths))
    compare(
        {
            "op": "match_suffix",
            "backend": backend,
            "shape": {"B": batch, "S": width, "match": MATCH},
            "dtype": "int32",
        },
        ours=ours,
        floor=token_ids.amax,
        peer=lambda: windows(token_ids, lengths),
    )
