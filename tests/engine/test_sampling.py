"""The engine's sampled output has the target's exact distribution; biased engines are caught."""

import pytest

from fastspec import SpecConfig
from fastspec_kernels.testing import chi_square

from .helpers import ALPHA, FILTERED, PLAIN, drawn_counts, exact_distribution, p_value, small_pair
from .probes import VERIFIER, flatten_draft_logits, share_numbers


@pytest.fixture(scope="module")
def models():
    return small_pair()


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
    assert p_value(models, sampling, spec) > ALPHA


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
    [share_numbers, flatten_draft_logits, _lenient, _unfiltered_verification],
)
def test_biased_engines_are_caught(models, monkeypatch, break_engine):
    break_engine(monkeypatch)
    spec = SpecConfig(num_speculative_tokens=2)
    counts = drawn_counts(models, FILTERED, spec)
    distribution = exact_distribution(models[0], FILTERED)
    impossible = counts[distribution == 0].sum()
    assert impossible > 0 or chi_square(counts, distribution) < ALPHA
