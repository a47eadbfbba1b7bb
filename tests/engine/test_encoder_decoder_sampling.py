"""Sampled output of encoder-decoders has the target's exact law."""

from itertools import product

import numpy as np
import pytest
import torch

from fastspec import Engine, EngineConfig, SamplingParams, SpecConfig
from fastspec_kernels import logits_to_probs
from fastspec_kernels.testing import chi_square

from ..models import perturbed, random_t5

VOCAB_SIZE, LENGTH, PROMPT, DRAWS, ALPHA = 6, 3, [4, 2, 5, 1], 3_000, 1e-6
FILTERED = {"temperature": 1.7, "top_k": 5, "top_p": 0.9, "min_p": 0.03}


@pytest.fixture(scope="module")
def pair():
    model = random_t5(seed=4, vocab_size=VOCAB_SIZE)
    return model, perturbed(model, 0.35)


@torch.no_grad()
def exact_law(model, sampling):
    """Probability of each text of LENGTH tokens, indexed by its ids."""
    types = {"top_k": torch.int32}
    params = {
        name: torch.tensor([value], dtype=types.get(name, torch.float32))
        for name, value in sampling.items()
    }
    texts = torch.tensor(list(product(range(VOCAB_SIZE), repeat=LENGTH)))
    ids = torch.cat([torch.zeros_like(texts[:, :1]), texts[:, :-1]], dim=1)
    logits = model(input_ids=torch.tensor([PROMPT] * len(ids)), decoder_input_ids=ids).logits
    rows = {name: value.repeat(ids.numel()) for name, value in params.items()}
    probs = logits_to_probs(logits.flatten(0, 1), **rows, backend="reference").view(logits.shape)
    law = probs.gather(2, texts[:, :, None])[:, :, 0].double().prod(dim=1).numpy()
    return (law / law.sum()).reshape((VOCAB_SIZE,) * LENGTH)


@pytest.mark.parametrize(
    ("method", "sampling"),
    [
        ("draft_model", {"temperature": 1.3}),
        ("draft_model", FILTERED),
        ("greedy drafts", FILTERED),
        ("tree", FILTERED),
        ("mag", {"temperature": 1.3}),
    ],
)
def test_exact_distribution(pair, sampling, method):
    model, drafter = pair
    if method == "mag":
        drafter, spec = None, SpecConfig("mag", 2)
    elif method == "tree":
        spec = SpecConfig("tree", 2, tree_width=2, tree_nodes=4)
    else:
        how = "greedy" if method == "greedy drafts" else "probabilistic"
        spec = SpecConfig(num_speculative_tokens=2, draft_sample_method=how)
    engine = Engine(model, drafter, spec=spec, config=EngineConfig(max_batch_size=500))
    params = [
        SamplingParams(**sampling, seed=seed, max_tokens=LENGTH, ignore_eos=True)
        for seed in range(DRAWS)
    ]
    counts = np.zeros((VOCAB_SIZE,) * LENGTH)
    for output in engine.generate([PROMPT] * DRAWS, params):
        counts[output.token_ids] += 1
    assert engine.stats.num_accepted_tokens > 0
    assert chi_square(counts, exact_law(model, sampling)) > ALPHA
