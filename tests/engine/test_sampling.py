"""The engine's sampled output has the target's exact law; biased engines are caught."""

from itertools import product

import numpy as np
import pytest
import torch

from fastspec import Engine, EngineConfig, SamplingParams, SpecConfig
from fastspec_kernels import logits_to_probs
from fastspec_kernels.testing import chi_square

from ..models import perturbed, random_model
from .probes import VERIFIER

VOCAB_SIZE, LENGTH, PROMPT, DRAWS = 6, 3, [1, 4, 2], 12_000
ALPHA = 1e-6
PLAIN = {"temperature": 1.3}
FILTERED = {"temperature": 1.7, "top_k": 5, "top_p": 0.9, "min_p": 0.03}


@pytest.fixture(scope="module")
def models():
    model = random_model("llama", seed=4, vocab_size=VOCAB_SIZE, bos_token_id=0, eos_token_id=0)
    return model, perturbed(model, 0.35)


@torch.no_grad()
def exact_law(model, sampling):
    """Probability of each text of LENGTH tokens, indexed by its ids."""
    types = {"top_k": torch.int32}
    params = {
        name: torch.tensor([value], dtype=types.get(name, torch.float32))
        for name, value in sampling.items()
    }
    law = np.zeros((VOCAB_SIZE,) * LENGTH)
    for text in product(range(VOCAB_SIZE), repeat=LENGTH):
        logits = model(torch.tensor([[*PROMPT, *text]])).logits[0, len(PROMPT) - 1 : -1]
        probs = [
            logits_to_probs(row[None], **params, backend="reference")[0, token].item()
            for row, token in zip(logits, text, strict=True)
        ]
        law[text] = np.prod(probs)
    return law / law.sum()


def drawn_counts(models, sampling, spec, num_draws=DRAWS):
    model, drafter = models
    engine = Engine(model, drafter, spec=spec, config=EngineConfig(max_batch_size=512))
    params = [
        SamplingParams(**sampling, seed=seed, max_tokens=LENGTH, ignore_eos=True)
        for seed in range(num_draws)
    ]
    counts = np.zeros((VOCAB_SIZE,) * LENGTH)
    for output in engine.generate([PROMPT] * num_draws, params):
        counts[output.token_ids] += 1
    return counts


@pytest.mark.parametrize("sampling", [PLAIN, FILTERED], ids=["plain", "filtered"])
@pytest.mark.parametrize(
    "spec",
    [
        {"method": "none"},
        {"draft_sample_method": "probabilistic"},
        {"draft_sample_method": "greedy"},
        {"rejection_sample_method": "block"},
        {"rejection_sample_method": "block", "draft_sample_method": "greedy"},
    ],
    ids=lambda spec: "-".join(spec.values()),
)
def test_exact_distribution(models, sampling, spec):
    spec = SpecConfig(num_speculative_tokens=2, **spec)
    assert chi_square(drawn_counts(models, sampling, spec), exact_law(models[0], sampling)) > ALPHA


def _shared_numbers(monkeypatch):
    monkeypatch.setattr(VERIFIER, "VERIFY_STREAM", 1)


def _draft_logits_not_sampled_from(monkeypatch):
    original = VERIFIER.verify_chain

    def verify_chain(*args, draft_logits, **kwargs):
        flattened = None if draft_logits is None else draft_logits / 3
        return original(*args, draft_logits=flattened, **kwargs)

    monkeypatch.setattr(VERIFIER, "verify_chain", verify_chain)


def _lenient(monkeypatch):
    original = VERIFIER.verify_chain
    monkeypatch.setattr(
        VERIFIER,
        "verify_chain",
        lambda *args, **kwargs: original(*args, **{**kwargs, "lenience": 1.5}),
    )


def _unfiltered_verification(monkeypatch):
    original = VERIFIER.verify_chain
    monkeypatch.setattr(
        VERIFIER,
        "verify_chain",
        lambda *args, top_p, **kwargs: original(*args, top_p=None, **kwargs),
    )


@pytest.mark.parametrize(
    "break_engine",
    [_shared_numbers, _draft_logits_not_sampled_from, _lenient, _unfiltered_verification],
)
def test_biased_engines_are_caught(models, monkeypatch, break_engine):
    break_engine(monkeypatch)
    counts = drawn_counts(models, FILTERED, SpecConfig(num_speculative_tokens=2))
    law = exact_law(models[0], FILTERED)
    impossible = counts[law == 0].sum()
    assert impossible > 0 or chi_square(counts, law) < ALPHA
