"""Cascades whose first level is the target's own copy with few bits, which reviews other drafts."""

import pytest

from fastspec import Engine, EngineConfig, SamplingParams, SpecConfig
from fastspec.tools.simulate import Simulator

from ..models import VOCAB_SIZE, random_model
from .helpers import (
    ALPHA,
    FILTERED,
    GREEDY,
    PROMPTS,
    drafter_for,
    hugging_face_greedy,
    p_value,
    small_model,
)
from .probes import count_preemptions, drafter_of, target_runner

LOWER = ["eagle3", "glide", "draft_model", None]  # None = MaG


def spec_of(bits=8, matrix=((4, 0), (0, 2)), **options):
    return SpecConfig("cascade", draft_bits=bits, k_matrix=matrix, **options)


def lower_draft(kind, model, tmp_path):
    return None if kind is None else drafter_for(kind, model, tmp_path)


@pytest.mark.parametrize("kind", LOWER)
@pytest.mark.parametrize("config", [{"num_blocks": 30}, {"prefix_caching": True}])
def test_greedy_output_is_that_of_plain_decoding(kind, config, tmp_path):
    model = random_model("llama", hidden_size=64)
    draft = lower_draft(kind, model, tmp_path)
    config = EngineConfig(block_size=4, max_batch_size=3, **config)
    engine = Engine(model, draft, spec=spec_of(4), config=config)
    expected = [hugging_face_greedy(model, prompt) for prompt in PROMPTS]
    for _ in range(2):
        outputs = engine.generate(PROMPTS, GREEDY)
        assert [output.token_ids for output in outputs] == expected
    assert engine.stats.acceptance_rate > 0.3
    writers = {writer for output in outputs for writer in output.drafters}
    assert writers >= {None, "quantized"}


@pytest.mark.parametrize("kind", LOWER)
def test_sampled_output_has_the_targets_distribution(kind, tmp_path):
    model = small_model()
    draft = lower_draft(kind, model, tmp_path)
    assert p_value((model, draft), FILTERED, spec_of(4, ((2, 0), (0, 1))), num_more=3) > ALPHA


@pytest.mark.parametrize("kind", LOWER)
def test_a_seeds_text_does_not_depend_on_the_batch_or_preemption(kind, tmp_path):
    """What a draft read from the copy must not outlive the step in which it did."""
    model = random_model("llama", hidden_size=64)
    draft = lower_draft(kind, model, tmp_path)
    params = [SamplingParams(temperature=1, seed=seed, max_tokens=28) for seed in range(4)]
    roomy = Engine(model, draft, spec=spec_of(4), config=EngineConfig(block_size=4))
    alone = [
        roomy.generate([prompt], one)[0].token_ids
        for prompt, one in zip(PROMPTS, params, strict=True)
    ]
    narrow = EngineConfig(block_size=4, num_blocks=24)
    engine = Engine(model, draft, spec=spec_of(4), config=narrow)
    preempted = count_preemptions(engine)
    together = [output.token_ids for output in engine.generate(PROMPTS, params)]
    assert together == alone
    assert preempted[0] > 0


def test_a_lower_draft_reads_what_the_copy_computed(tmp_path):
    model = random_model("llama", hidden_size=64)
    engine = Engine(model, drafter_for("eagle3", model, tmp_path), spec=spec_of(8))
    copy, eagle = (level.model for level in drafter_of(engine)._levels)
    assert copy.runner.inputs is target_runner(engine).inputs
    forward, write, spans = eagle.runner.forward, eagle._single_call.write, []

    def recorded(run):
        def call(input_ids, given, *args, **options):
            spans.extend(given)
            return run(input_ids, given, *args, **options)

        return call

    eagle.runner.forward, eagle._single_call.write = recorded(forward), recorded(write)
    engine.add_request(PROMPTS[1], GREEDY)
    engine.step()
    spans.clear()
    engine.step()
    length = spans[0].settled_len  # committed tokens
    known = [span.target_len for span in spans]
    assert known[0] == length - 1
    assert max(known) > length  # in later passes, drafts that the copy has read


@pytest.mark.parametrize(
    "matrix", [((2, 2, 0), (0, 0, 0), (0, 0, 0)), ((4, 0, 0), (0, 2, 1), (0, 0, 2))]
)
@pytest.mark.parametrize("kind", ["glide", "draft_model"])
def test_a_lower_draft_may_know_fewer_tokens_than_the_target(kind, matrix):
    """As models of one family do, whose vocabularies are padded to different sizes."""
    model = random_model("llama", hidden_size=64)
    draft = drafter_for(kind, model, None)
    draft.resize_token_embeddings(100)
    engine = Engine(model, draft, spec=spec_of(4, matrix))
    prompts = [[1, 2, 200, 201] * 6, PROMPTS[1]]  # MaG copies what the draft does not know
    outputs = engine.generate(prompts, GREEDY)
    assert [out.token_ids for out in outputs] == [hugging_face_greedy(model, p) for p in prompts]
    params = [SamplingParams(temperature=1, seed=seed, max_tokens=28) for seed in range(8)]
    together = [output.token_ids for output in engine.generate(prompts * 4, params)]
    pairs = zip(prompts * 4, params, strict=True)
    assert together == [engine.generate([p], one)[0].token_ids for p, one in pairs]
    lenient = Engine(model, draft, spec=spec_of(4, matrix, lenience=2.0))
    outputs = lenient.generate(prompts, GREEDY)
    assert [out.token_ids for out in outputs] == [hugging_face_greedy(model, p) for p in prompts]


def test_drafts_of_one_kind_are_told_apart(tmp_path):
    model = random_model("llama", hidden_size=64)
    drafts = [drafter_for("eagle3", model, tmp_path)] * 2
    engine = Engine(model, drafts, spec=spec_of(4, ((4, 0, 0), (0, 2, 1), (0, 0, 2))))
    engine.generate(PROMPTS, GREEDY)
    assert {*engine.stats.num_draft_passes} == {"quantized", "eagle3_1", "eagle3_2"}


def test_drafts_that_review_read_no_states_of_other_requests(tmp_path):
    """They read several tokens in one pass, which knows the state before the first one only."""
    model = random_model("llama", hidden_size=64)
    drafts = [drafter_for("eagle3", model, tmp_path)] * 2
    config = EngineConfig(block_size=4, num_blocks=200)
    spec = spec_of(4, ((4, 0, 0), (0, 4, 1), (0, 0, 4)))
    engine = Engine(model, drafts, spec=spec, config=config)
    prompts = [[1, 2, 200, 201] * 6, PROMPTS[1]] * 4
    params = [SamplingParams(temperature=1, seed=seed, max_tokens=28) for seed in range(8)]
    together = [output.token_ids for output in engine.generate(prompts, params)]
    pairs = zip(prompts, params, strict=True)
    assert together == [engine.generate([p], one)[0].token_ids for p, one in pairs]


def test_a_draft_that_is_enabled_replaces_the_cascade_and_says_so(caplog):
    model = random_model()
    engine = Engine(model, spec=SpecConfig("cascade", draft_bits=8))
    engine.disable_spec_dec()
    engine.enable_spec_dec()
    assert engine.drafter.name == "cascade"
    assert "cascade" not in caplog.text
    engine.enable_spec_dec(drafter_for("draft_model", model, None))
    assert engine.drafter.name == "draft_model"
    assert "drafter: it drafts alone, without the cascade" in caplog.text


def test_options():
    spec = SpecConfig("cascade", draft_bits=8)
    assert spec.cascade_matrix == ((4, 0), (0, 1))
    assert SpecConfig("cascade").cascade_matrix == ((1, 14), (0, 0))
    model = random_model()
    engine = Engine(model, spec=spec)  # the copy and MaG
    [output] = engine.generate([PROMPTS[2]], GREEDY)
    assert output.token_ids == hugging_face_greedy(model, PROMPTS[2])
    with pytest.raises(ValueError, match=r"^drafter: method 'cascade' needs a draft model"):
        Engine(model, spec="cascade")
    with pytest.raises(ValueError, match=r"^drafter: heterogeneous_vocab needs a draft model"):
        Engine(model, spec=SpecConfig("cascade", draft_bits=8, heterogeneous_vocab="intersection"))
    with pytest.raises(ValueError, match=r"^k_matrix: it is 3 x 3, but the cascade has 1 levels"):
        Engine(model, spec=spec_of(matrix=((1, 2, 3), (0, 1, 2), (0, 0, 1))))
    with pytest.raises(ValueError, match=r"^method: 'cascade' reads the target's weights"):
        Simulator("tiny", None, VOCAB_SIZE, spec=spec)
    with pytest.raises(ValueError, match=r"^method: 'quantized' needs a plain decoder"):
        Engine(random_model("mamba2"), spec=spec)
    glide = drafter_for("glide", model, None)
    with pytest.raises(ValueError, match=r"^drafter: a GLIDE model needs method 'glide'"):
        Engine(model, glide, spec="cascade")
