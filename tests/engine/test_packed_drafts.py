"""Draft models with weights of 4 or 8 bits: same output, and drafts near those they would give."""

import pytest
import torch

from fastspec import Engine, EngineConfig, SpecConfig
from fastspec.drafters import PromptLookupDrafter
from fastspec.models.layout import Span

from ..models import perturbed, random_model, random_t5
from .eagle1_models import write_folder as write_eagle1
from .eagle3_models import write_folder as write_eagle3
from .glide_models import often_right
from .helpers import ALPHA, FILTERED, GREEDY, PROMPTS, hugging_face_greedy, p_value, small_model
from .probes import draft_model_of, runners_of, target_runner


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
    assert p_value((model, perturbed(model, 0.3)), FILTERED, spec) > ALPHA


def test_a_draft_that_is_enabled_later_is_packed_too():
    target = random_model("llama", hidden_size=64)
    engine = Engine(target, target, spec=SpecConfig("draft_model", 3, draft_bits=4))
    engine.enable_spec_dec(target, n_spec_tokens=3)
    engine.generate(PROMPTS, GREEDY)
    assert 0.2 < engine.stats.acceptance_rate < 1.0


def of_eagle3(folder, target):
    write_eagle3(folder, target, num_known=60)
    return folder


def of_eagle1(folder, target):
    write_eagle1(folder, target)
    return folder


READERS = {
    "eagle3": (of_eagle3, "eagle3", {}),
    "eagle3 tree": (of_eagle3, "eagle3", {"tree_nodes": 5}),
    "eagle1": (of_eagle1, "eagle3", {"suffix_tokens": 6}),
    "glide": (lambda folder, target: often_right(target), "glide", {}),
}


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("case", READERS)
def test_drafts_that_read_their_target_are_packed_as_a_whole(case, bits, tmp_path):
    make, method, options = READERS[case]
    target = random_model("llama", num_hidden_layers=6)
    draft = make(tmp_path / "draft", target)
    expected = [hugging_face_greedy(target, prompt, GREEDY.max_tokens) for prompt in PROMPTS]
    spec = SpecConfig(method, 3, draft_bits=bits, **options)
    engine = Engine(target, draft, spec=spec, config=EngineConfig(max_batch_size=3))
    outputs = engine.generate(PROMPTS, GREEDY)
    assert [output.token_ids for output in outputs] == expected
    assert engine.stats.num_drafts > 0


@pytest.mark.parametrize("case", ["eagle3", "eagle1", "glide"])
@torch.inference_mode()
def test_packed_drafts_of_readers_are_near_those_of_their_weights(case, tmp_path):
    """And none of its own weights is read, which are NaN by then."""
    make, method, _ = READERS[case]
    target = random_model("llama", num_hidden_layers=6)
    draft = make(tmp_path / "draft", target)
    logits = {}
    for bits in (None, 8):
        engine = Engine(target, draft, spec=SpecConfig(method, 3, draft_bits=bits))
        target_runner(engine).prefill([[*range(19)]], [Span([*range(8)], 0, 19)])
        _, reader = runners_of(engine)
        if bits is not None:
            for module in reader.paged_model.model.modules():
                if type(module) is torch.nn.Linear:
                    module.weight.fill_(torch.nan)
        reader.prefill([[*range(19)]], [Span([*range(8)], 0, 19, target_len=19)])
        span = Span([*range(8)], 19, 3, target_len=19)
        logits[bits] = reader.forward(torch.tensor([60, 61, 62]), [span])
    packed, plain = logits[8], logits[None]
    known = plain.isfinite()
    assert torch.equal(known, packed.isfinite())
    error = (packed - plain)[known].norm() / plain[known].norm()
    assert 1e-5 < error < 0.05


def test_what_cannot_be_packed_is_refused(tmp_path):
    target, deep = (random_model("llama", num_hidden_layers=count) for count in (1, 6))
    eagle, on_gpus = of_eagle3(tmp_path / "eagle", deep), EngineConfig(backend="triton")
    for large, draft, method in ((deep, eagle, "eagle3"), (target, often_right(target), "glide")):
        spec = SpecConfig(method, draft_bits=8)
        with pytest.raises(ValueError, match=r"^draft_bits: has kernels for CPUs only, .*triton"):
            Engine(large, draft, spec=spec, config=on_gpus)
    with pytest.raises(ValueError, match=r"^draft_bits: not for method 'early_exit', got 8"):
        SpecConfig("early_exit", exit_layer=2, draft_bits=8)
    with pytest.raises(ValueError, match=r"^drafter: draft_bits \(method 'quantized' copies"):
        Engine(target, spec={"draft_bits": 8})
    with pytest.raises(ValueError, match=r"^draft_bits: not with a Drafter object"):
        Engine(target, PromptLookupDrafter(1, 2), spec={"draft_bits": 8})
    with pytest.raises(ValueError, match=r"^drafter: method 'draft_model' needs a draft model"):
        Engine(target, spec=SpecConfig("draft_model", draft_bits=8))
    with pytest.raises(ValueError, match=r"^draft_bits: has kernels for CPUs only, Llama.*triton"):
        Engine(target, target, spec={"draft_bits": 8}, config=on_gpus)
