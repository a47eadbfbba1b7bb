"""Draft models with weights of 4 or 8 bits: same output, and drafts near those they would give."""

import pytest

from fastspec import Engine, EngineConfig, SamplingParams, SpecConfig
from fastspec.drafters import PromptLookupDrafter
from fastspec_kernels.testing import chi_square

from ..models import perturbed, random_model, random_t5
from .eagle3_models import write_folder
from .glide_models import often_right
from .helpers import (
    ALPHA,
    FILTERED,
    drawn_counts,
    exact_distribution,
    hugging_face_greedy,
    small_model,
)
from .probes import draft_model_of

PROMPTS = [[1, 2, 3], list(range(5, 22)), [40, 7] * 17, [9]]
GREEDY = SamplingParams(temperature=0, max_tokens=28, ignore_eos=True)


@pytest.mark.parametrize(
    ("kind", "method", "bits", "options"),
    [
        ("llama", "auto", 4, {}),
        ("llama", "draft_model", 8, {"suffix_tokens": 6}),
        ("gpt_neox", "tree", 4, {"tree_nodes": 6}),
        ("lfm2", "draft_model", 8, {}),
    ],
)
def test_greedy_output_is_that_of_plain_decoding(kind, method, bits, options):
    model = random_model(kind)
    expected = [hugging_face_greedy(model, prompt, GREEDY.max_tokens) for prompt in PROMPTS]
    spec = SpecConfig(method, 3, draft_bits=bits, **options)
    engine = Engine(model, perturbed(model, 0.02), spec=spec, config=EngineConfig(max_batch_size=3))
    outputs = engine.generate(PROMPTS, GREEDY)
    assert [output.token_ids for output in outputs] == expected
    assert engine.stats.acceptance_rate > 0.2


def test_an_encoder_decoder_draft():
    target, draft = random_t5(), random_t5(seed=1)
    plain = Engine(target).generate(PROMPTS, GREEDY)
    outputs = Engine(target, draft, spec={"draft_bits": 8}).generate(PROMPTS, GREEDY)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in plain]


def test_the_drafts_weights_are_packed_and_the_given_model_is_not_changed():
    draft = random_model("llama", hidden_size=64, head_dim=16)
    before = draft.lm_head.weight.clone()
    spec = SpecConfig("draft_model", draft_bits=8)
    engine = Engine(random_model("llama", hidden_size=64, head_dim=16), draft, spec=spec)
    own = draft_model_of(engine).runner.paged_model.model
    hidden = before[:3]
    packed, plain = own.lm_head(hidden), draft.lm_head(hidden)
    assert 1e-4 < (packed - plain).norm() / plain.norm() < 0.02
    assert plain.equal(hidden @ before.T)


@pytest.mark.parametrize(("method", "options"), [("draft_model", {}), ("tree", {"tree_nodes": 4})])
def test_sampled_output_has_the_targets_distribution(method, options):
    model = small_model()
    spec = SpecConfig(method, 2, draft_bits=4, **options)
    counts = drawn_counts((model, perturbed(model, 0.3)), FILTERED, spec)
    assert chi_square(counts, exact_distribution(model, FILTERED)) > ALPHA


def test_a_draft_that_is_enabled_later_is_packed_too():
    target = random_model("llama", hidden_size=64)
    engine = Engine(target, target, spec=SpecConfig("draft_model", 3, draft_bits=4))
    engine.enable_spec_dec(target, n_spec_tokens=3)
    engine.generate(PROMPTS, GREEDY)
    assert 0.2 < engine.stats.acceptance_rate < 1.0


def test_what_cannot_be_packed_is_refused(tmp_path):
    target = random_model("llama", num_hidden_layers=6)
    write_folder(eagle := tmp_path / "eagle", target)
    glide = often_right(target)
    for draft, kind in ((eagle, "EAGLE"), (glide, "GLIDE")):
        for spec in ({"draft_bits": 8}, SpecConfig("tree", draft_bits=8)):
            named = rf"^draft_bits: packs plain draft models, not {kind} drafts, got 8"
            with pytest.raises(ValueError, match=named):
                Engine(target, draft, spec=spec)
    with pytest.raises(ValueError, match=r"^draft_bits: not for method 'eagle3', got 8"):
        SpecConfig("eagle3", draft_bits=8)
    with pytest.raises(ValueError, match=r"^drafter: draft_bits \(method 'quantized' copies"):
        Engine(target, spec={"draft_bits": 8})
    with pytest.raises(ValueError, match=r"^draft_bits: not with a Drafter object"):
        Engine(target, PromptLookupDrafter(1, 2), spec={"draft_bits": 8})
    with pytest.raises(ValueError, match=r"^drafter: method 'draft_model' needs a draft model"):
        Engine(target, spec=SpecConfig("draft_model", draft_bits=8))
    with pytest.raises(ValueError, match=r"^draft_bits: has kernels for CPUs only, Llama.*triton"):
        Engine(target, target, spec={"draft_bits": 8}, config=EngineConfig(backend="triton"))
