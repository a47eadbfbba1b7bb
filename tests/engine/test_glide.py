"""GLIDE drafts in the engine: same output, exact distribution, no published bugs."""

import pytest

from fastspec import Engine, EngineConfig, SamplingParams, SpecConfig

from ..models import byte_tokenizer, random_model
from .glide_models import often_right, random_glide
from .helpers import (
    ALPHA,
    FILTERED,
    GREEDY,
    PLAIN,
    PROMPTS,
    hugging_face_greedy,
    p_value,
    small_model,
)

GLIDE = SpecConfig(method="glide")


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("num_draft", [1, 3, 6])
def test_greedy_output_is_that_of_plain_decoding(num_layers, num_draft):
    target = random_model("llama")
    expected = [hugging_face_greedy(target, prompt) for prompt in PROMPTS]
    spec = SpecConfig("glide", num_draft)
    config = EngineConfig(max_batch_size=3, block_size=4, prefill_chunk_size=7)
    engine = Engine(target, random_glide(target, num_layers), spec=spec, config=config)
    outputs = engine.generate(PROMPTS, GREEDY)
    assert [output.token_ids for output in outputs] == expected


def test_a_good_draft_is_accepted_and_named():
    target = random_model("llama")
    expected = [hugging_face_greedy(target, prompt) for prompt in PROMPTS]
    engine = Engine(target, often_right(target), spec=GLIDE)
    outputs = engine.generate(PROMPTS, GREEDY)
    assert [output.token_ids for output in outputs] == expected
    assert 0.5 < engine.stats.acceptance_rate < 1
    assert {writer for output in outputs for writer in output.drafters} == {None, "glide"}


@pytest.mark.parametrize("spec", [SpecConfig("glide", 4, cape=True), SpecConfig("tree", 4)])
@pytest.mark.parametrize("num_layers", [1, 2])
def test_greedy_output_with_trees_over_glide(spec, num_layers):
    target = random_model("llama")
    expected = [hugging_face_greedy(target, prompt) for prompt in PROMPTS]
    config = EngineConfig(max_batch_size=3, block_size=4)
    for draft in (often_right(target), random_glide(target, num_layers)):
        engine = Engine(target, draft, spec=spec, config=config)
        outputs = engine.generate(PROMPTS, GREEDY)
        assert [output.token_ids for output in outputs] == expected


@pytest.mark.parametrize("architecture", ["mistral", "qwen3", "gpt_neox", "gemma3"])
def test_other_targets(architecture):
    target = random_model(architecture)
    expected = [hugging_face_greedy(target, prompt) for prompt in PROMPTS]
    engine = Engine(target, random_glide(target), spec=GLIDE)
    outputs = engine.generate(PROMPTS, GREEDY)
    assert [output.token_ids for output in outputs] == expected


def test_preemption_and_prefix_caching():
    target = random_model("llama")
    prompts = [[*range(5, 25), last] for last in (1, 2, 3)]
    expected = [hugging_face_greedy(target, prompt) for prompt in prompts]
    config = EngineConfig(block_size=4, num_blocks=36, prefix_caching=True)
    engine = Engine(target, often_right(target), spec=GLIDE, config=config)
    outputs = engine.generate(prompts, GREEDY)
    assert [output.token_ids for output in outputs] == expected


def test_text_ends_at_an_end_token_inside_a_draft():
    """An accepted end token is the last one: nothing is appended behind it."""
    target = random_model("llama")
    tokens = hugging_face_greedy(target, [1, 2, 3])
    stop = next(t for n, t in enumerate(tokens) if n >= 4 and tokens.index(t) == n)
    params = SamplingParams(temperature=0, max_tokens=40, stop_token_ids=[stop], ignore_eos=True)
    output = Engine(target, often_right(target), spec=GLIDE).generate([[1, 2, 3]], params)[0]
    assert output.token_ids == tokens[: tokens.index(stop) + 1]
    short = SamplingParams(temperature=0, max_tokens=7, ignore_eos=True)
    output = Engine(target, often_right(target), spec=GLIDE).generate([[1, 2, 3]], short)[0]
    assert output.token_ids == tokens[:7]


@pytest.mark.parametrize(
    ("sampling", "cape"),
    [(PLAIN, False), (FILTERED, False), (FILTERED, True)],
    ids=["plain", "filtered", "filtered-cape"],
)
def test_exact_distribution(sampling, cape):
    target = small_model()
    bins = [(0.4, 2), (1.0, 1)] if cape else None
    spec = SpecConfig("glide", 2, cape=cape, cape_bins=bins)
    assert p_value((target, random_glide(target)), sampling, spec) > ALPHA


def test_glide_is_remembered_when_speculation_is_switched():
    target = random_model("llama")
    expected = hugging_face_greedy(target, [1, 2, 3])
    engine = Engine(target)
    engine.enable_spec_dec(often_right(target), n_spec_tokens=1, use_glide_drafter=True)
    for use_glide_drafter in (False, True):
        engine.disable_spec_dec()
        assert engine.generate([[1, 2, 3]], GREEDY)[0].token_ids == expected
        engine.enable_spec_dec(n_spec_tokens=4, use_glide_drafter=use_glide_drafter)
        output = engine.generate([[1, 2, 3]], GREEDY)[0]
        assert output.token_ids == expected
        assert "glide" in output.drafters
    engine.clear_spec_dec()
    with pytest.raises(ValueError, match="drafter"):
        engine.enable_spec_dec(use_glide_drafter=True)
    engine.enable_spec_dec(target)
    with pytest.raises(ValueError, match="use_glide_drafter: the drafter to enable is not a GLIDE"):
        engine.enable_spec_dec(use_glide_drafter=True)


def test_glide_below_trees_is_remembered():
    target = random_model("llama")
    engine = Engine(target, often_right(target), spec=SpecConfig("glide", cape=True))
    engine.disable_spec_dec()
    engine.enable_spec_dec(n_spec_tokens=2, use_glide_drafter=True)
    assert "glide" in engine.generate([[1, 2, 3]], GREEDY)[0].drafters


def test_switching_on_in_the_middle_of_a_text():
    target = random_model("llama")
    expected = hugging_face_greedy(target, [1, 2, 3])
    engine = Engine(target, often_right(target), spec=GLIDE)
    engine.disable_spec_dec()
    engine.add_request([1, 2, 3], GREEDY)
    output = None
    for step in range(60):
        if step in (12, 30):
            engine.enable_spec_dec(n_spec_tokens=2)
        if step == 20:
            engine.disable_spec_dec()
        output = next((e.output for e in engine.step() if e.output is not None), output)
        if output is not None:
            break
    assert output is not None
    assert output.token_ids == expected


def test_a_glide_model_runs_as_glide_whatever_it_is_called(tmp_path):
    """It needs no flag where it says what it is; without cross-attention it would only be worse."""
    target = random_model("llama")
    draft = often_right(target)
    draft.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    for source in (draft, tmp_path):
        engine = Engine(target, source)
        assert "glide" in engine.generate([[1, 2, 3]], GREEDY)[0].drafters
