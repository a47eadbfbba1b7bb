"""EngineConfig.backend reaches every kernel, the drafters' own ones too."""

import pytest

from fastspec import Engine, EngineConfig, SamplingParams, SpecConfig
from fastspec.train.new_drafts import make_glide
from fastspec_kernels import backend

from ..models import perturbed, random_t5

PROMPTS = [[1, 2, 3, 1, 2, 3, 1, 2], [7] * 20]
PARAMS = [
    SamplingParams(
        temperature=temperature,
        seed=0,
        max_tokens=8,
        ignore_eos=True,
        repetition_penalty=1.2,
        logprobs=2,
    )
    for temperature in (1.0, 0.0)
]
CASES = {
    "plain": ("none", {}),
    "draft_model": ("draft_model", {"schedule": "adaptive", "rejection_sample_method": "block"}),
    "prompt_lookup": ("prompt_lookup", {}),
    "mag": ("mag", {}),
    "ngram": ("ngram", {}),
    "cascade": ("cascade", {"k_matrix": [[2, 2], [0, 3]]}),
    "lenient": ("cascade", {"k_matrix": [[2, 2], [0, 3]], "lenience": 2.0}),
    "glide": ("glide", {}),
    "cape": ("glide", {"cape": True, "num_speculative_tokens": 3}),
    "drawn tree": ("tree", {"tree_nodes": 6}),
    "mixed tree": ("tree", {"tree_nodes": 9, "tree_suffix": 7}),
    "coupled mixed tree": (
        "tree",
        {"tree_nodes": 9, "tree_suffix": 7, "rejection_sample_method": "coupled"},
    ),
    "coupled": ("draft_model", {"rejection_sample_method": "coupled"}),
    "coupled tree": ("tree", {"tree_nodes": 6, "rejection_sample_method": "coupled"}),
    "likeliest tree": (
        "tree",
        {"tree_nodes": 6, "draft_sample_method": "greedy", "tree_prompt_lookup": True},
    ),
}


@pytest.fixture
def asked_for(monkeypatch):
    """The backends that ops were called with, by op."""
    asked = {}
    other_backend = backend._other_backend

    def noted(op, requested, *rest):
        asked.setdefault(op, set()).add(requested)
        return other_backend(op, requested, *rest)

    monkeypatch.setattr(backend, "_other_backend", noted)
    return asked


@pytest.mark.parametrize("case", CASES)
def test_every_kernel_is_asked_for_by_name(case, asked_for, model, drafter):
    method, options = CASES[case]
    draft = make_glide(model) if method == "glide" else drafter
    draft = draft if method in ("draft_model", "glide", "cascade", "tree") else None
    config = EngineConfig(backend="reference", num_blocks=64)
    engine = Engine(model, draft, spec=SpecConfig(method, **options), config=config)
    engine.generate(PROMPTS, PARAMS)
    verifier = "verify_tree" if "tree" in case or case == "cape" else "verify_chain"
    verifiers = {"sample_coupled"} if "coupled" in case else {verifier, "uniform"}
    assert {*verifiers, "penalize", "row_stats", "tree_attention"} <= {*asked_for}
    assert set().union(*asked_for.values()) == {"reference"}, asked_for


def test_encoder_decoders_pass_it_on_too(asked_for):
    target = random_t5(vocab_size=100)
    config = EngineConfig(backend="reference", num_blocks=64)
    spec = SpecConfig("draft_model")
    engine = Engine(target, perturbed(target, 0.03), spec=spec, config=config)
    engine.generate(PROMPTS, PARAMS)
    assert "cross_attention" in asked_for
    assert set().union(*asked_for.values()) == {"reference"}, asked_for
