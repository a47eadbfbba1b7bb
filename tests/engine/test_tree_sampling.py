"""Sampling through token trees: exactly the target's law, and broken engines are caught."""

import pytest

from fastspec import Engine, EngineConfig, SamplingParams, SpecConfig
from fastspec.drafters import TreeDrafter
from fastspec_kernels.testing import chi_square

from ..models import perturbed, random_model
from .probes import VERIFIER
from .test_sampling import ALPHA, FILTERED, LENGTH, PROMPT, VOCAB_SIZE, exact_law

DRAWS = 6_000
SAMPLED_PATHS = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [1, 1], [0, 0, 0]]


@pytest.fixture(scope="module")
def small_models():
    model = random_model("llama", seed=4, vocab_size=VOCAB_SIZE, bos_token_id=0, eos_token_id=0)
    return model, perturbed(model, 0.35)


def drawn_counts(models, law, **options):
    """Counts of the first tokens of texts so long that the trees are whole."""
    model, drafter = models
    spec = SpecConfig(num_speculative_tokens=3, **options)
    engine = Engine(model, drafter, spec=spec, config=EngineConfig(max_batch_size=512))
    params = [
        SamplingParams(**FILTERED, seed=seed, max_tokens=LENGTH + 1, ignore_eos=True)
        for seed in range(DRAWS)
    ]
    counts = law * 0
    for output in engine.generate([PROMPT] * DRAWS, params):
        counts[output.token_ids[:LENGTH]] += 1
    return counts


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"method": "tree", "tree_nodes": 9}, "without_replacement"),
        ({"method": "tree", "tree_paths": SAMPLED_PATHS}, "without_replacement"),
        ({"method": "tree", "tree_nodes": 9, "draft_sample_method": "greedy"}, "target_only"),
        ({"cape": True}, "without_replacement"),
        ({"cape": True, "draft_sample_method": "greedy"}, "target_only"),
    ],
    ids=["drawn", "paths", "likeliest", "cape", "cape of likeliest"],
)
def test_exact_distribution(small_models, options, rule, monkeypatch):
    rules = set()
    propose = TreeDrafter.propose

    def spied(self, batch):
        proposal = propose(self, batch)
        rules.add(proposal.sibling_rule)
        return proposal

    monkeypatch.setattr(TreeDrafter, "propose", spied)
    law = exact_law(small_models[0], FILTERED)
    assert chi_square(drawn_counts(small_models, law, **options), law) > ALPHA
    assert rules == {rule}


def _shared_numbers(monkeypatch):
    monkeypatch.setattr(VERIFIER, "VERIFY_STREAM", 1)


def _draft_logits_not_drawn_from(monkeypatch):
    original = VERIFIER.verify_tree

    def verify_tree(*args, draft_logits, **kwargs):
        return original(*args, draft_logits=draft_logits / 3, **kwargs)

    monkeypatch.setattr(VERIFIER, "verify_tree", verify_tree)


@pytest.mark.parametrize("break_engine", [_shared_numbers, _draft_logits_not_drawn_from])
def test_biased_engines_are_caught(small_models, monkeypatch, break_engine):
    break_engine(monkeypatch)
    law = exact_law(small_models[0], FILTERED)
    counts = drawn_counts(small_models, law, method="tree", tree_paths=SAMPLED_PATHS)
    assert chi_square(counts, law) < ALPHA
