"""A request's prediction: drafters copy from it, and it changes nothing else."""

import pytest

from fastspec import Engine, EngineConfig, SamplingParams, SpecConfig
from fastspec.drafters.prompt_lookup import PromptLookupDrafter
from fastspec.drafters.suffix import SuffixDrafter, SuffixIndex
from fastspec.drafters.texts import TextStore
from fastspec_kernels.testing import chi_square

from ..models import T5_CONFIGS, byte_tokenizer, perturbed, random_model, random_t5
from .helpers import ALPHA, FILTERED, GREEDY, PROMPTS, drawn_counts, exact_distribution, small_model
from .probes import batch_of, request_of

COPIES = {"suffix_tokens": 6, "suffix_max_spec_factor": 3.0}
TREE = {"tree_nodes": 8, "tree_width": 2, "draft_sample_method": "greedy"}
METHODS = [
    ("prompt_lookup", 6, {"prompt_lookup_min": 2}),
    ("ngram", 4, {"ngram_size": 3}),
    ("suffix", 6, {}),
    ("mag", 6, {}),
    ("suffix", 6, {"tree_nodes": 12}),
    ("draft_model", 2, COPIES),
    ("tree", 4, {**TREE, "tree_prompt_lookup": True}),
    ("tree", 2, {**TREE, "tree_suffix": 6}),
    ("cascade", 6, {"k_matrix": [[0, 6], [0, 0]]}),
]


def engine_of(target, method, num, options, **config):
    needs_draft = method in ("draft_model", "tree", "cascade")
    drafter = perturbed(target, 0.5) if needs_draft else None
    spec = SpecConfig(method, num, **options)
    return Engine(target, drafter, spec=spec, config=EngineConfig(max_batch_size=3, **config))


def predicting(*predictions):
    return [SamplingParams(**(vars(GREEDY) | {"prediction": each})) for each in predictions]


@pytest.mark.parametrize(("method", "num", "options"), METHODS, ids=str)
def test_a_right_prediction_saves_steps_and_a_wrong_one_changes_nothing(method, num, options):
    engine = engine_of(random_model("llama"), method, num, options)
    plain = engine.generate(PROMPTS, GREEDY)
    texts = [output.token_ids for output in plain]
    right = engine.generate(PROMPTS, predicting(*texts))
    wrong = engine.generate(PROMPTS, predicting([3] * 9, (), range(90), texts[0]))
    assert [output.token_ids for output in right] == texts
    assert [output.token_ids for output in wrong] == texts
    for before, after in zip(plain, right, strict=True):
        assert after.stats.num_steps < before.stats.num_steps
        assert after.prompt_token_ids == before.prompt_token_ids
    assert sum(output.stats.num_steps for output in right) < 12 * len(PROMPTS)


def test_the_first_step_copies_its_beginning():
    """It finds the prompt's end before the prediction, however short the prompt."""
    engine = engine_of(random_model("llama"), "prompt_lookup", 8, {"prompt_lookup_min": 1})
    for prompt in PROMPTS[0], PROMPTS[3]:
        (output,) = engine.generate([prompt], GREEDY)
        (again,) = engine.generate([prompt], predicting(output.token_ids))
        assert again.sources[:8] == ("draft",) * 8
        assert again.stats.num_steps < output.stats.num_steps / 2


def test_a_prediction_comes_before_the_prompt_where_both_match():
    """Where a file is changed, the old one is in the prompt and the new one is the prediction."""
    old, new = [list(range(20, 60, 2)), list(range(20, 60, 2))]
    new[5] = new[11] = 77
    request = request_of([*old, 1])
    request.prediction = [*new, 2]
    request.token_ids += [*new[:4]]
    texts = TextStore().update(batch_of(request))
    draft = PromptLookupDrafter(2, 8).copy(texts, 3).tolist()
    assert draft == [new[4:7]]
    assert request.prompt_to_copy == [*old, 1, *new, 2, *old[-15:], 1]
    assert texts.token_ids[0].tolist() == request.prompt_to_copy + new[:4]


def test_an_interrupt_leaves_the_beginning_of_what_is_read():
    request = request_of([1, 2, 3])
    request.prediction = list(range(5, 40))
    drafter = SuffixDrafter(4.0, 0.0, 1000)
    index = drafter._own[request] = SuffixIndex()
    index.add([1, 2, 3, 5, 6])  # as far as it came
    drafter.draft(request, 3, 3, False)
    assert [*index.end(len(index))] == [1, 2, 3, *range(5, 40), 1, 2, 3]


def test_samples_share_it_and_preempted_ones_keep_it():
    model = random_model("llama")
    options = {"prompt_lookup_min": 2}
    engine = engine_of(model, "prompt_lookup", 4, options, block_size=4, num_blocks=20)
    params = {"temperature": 0.8, "seed": 3, "max_tokens": 24, "ignore_eos": True, "n": 2}
    (free,) = engine_of(model, "prompt_lookup", 4, options).generate(
        [PROMPTS[1]], SamplingParams(**params, prediction=range(5, 60))
    )
    jobs = [SamplingParams(**params, prediction=range(5, 60))] * 3
    outputs = engine.generate([PROMPTS[1]] * 3, jobs)
    assert engine.stats.num_preemptions > 0
    for output in outputs:
        assert [each.token_ids for each in output.outputs] == [
            each.token_ids for each in free.outputs
        ]


@pytest.mark.parametrize("method", ["prompt_lookup", "suffix"])
def test_sampled_output_has_the_targets_distribution(method):
    model, prompt = small_model(), [1, 4, 2]
    sampling = {**FILTERED, "prediction": (1, 4, 3, 2, 4, 2, 3, 3, 5)}
    options = {"prompt_lookup_min": 1} if method == "prompt_lookup" else {}
    spec = SpecConfig(method, 2, **options)
    counts = drawn_counts((model, None), sampling, spec, prompt=prompt)
    assert chi_square(counts, exact_distribution(model, FILTERED, prompt)) > ALPHA


def test_encoder_decoders():
    model = random_t5(next(iter(T5_CONFIGS)))
    engine = Engine(model, spec=SpecConfig("prompt_lookup", 6, prompt_lookup_min=1))
    prompt = [5, 6, 7, 1]
    (output,) = engine.generate([prompt], GREEDY)
    (again,) = engine.generate([prompt], predicting(output.token_ids))
    assert again.token_ids == output.token_ids
    assert again.stats.num_steps <= output.stats.num_steps


def test_texts():
    tokenizer = byte_tokenizer()
    model = random_model("llama", vocab_size=len(tokenizer))
    spec = SpecConfig("prompt_lookup", 8, prompt_lookup_min=2)
    engine = Engine(model, tokenizer=tokenizer, spec=spec)
    (output,) = engine.generate(["ab"], GREEDY)
    (again,) = engine.generate(["ab"], predicting(list(output.token_ids)))
    (text,) = engine.generate(["ab"], predicting("ab" * 20))
    assert again.token_ids == text.token_ids == output.token_ids
    with pytest.raises(ValueError, match=r"^prediction: .*surrogate|^prediction: .*Unicode"):
        engine.generate(["ab"], predicting("\ud800"))


@pytest.mark.parametrize(
    "wrong", [3, [1.5], [-1], {1}, {"type": "content"}, b"ab", bytearray(b"a")]
)
def test_wrong_values(wrong):
    with pytest.raises(ValueError, match=r"^prediction: expected a text or a list of ints >= 0"):
        SamplingParams(prediction=wrong)


def test_what_an_engine_refuses(model, drafter):
    engine = Engine(model, spec=SpecConfig("prompt_lookup", 4))
    with pytest.raises(ValueError, match=r"^prediction: token id 100000 is not in"):
        engine.generate([[1]], predicting([100_000]))
    with pytest.raises(ValueError, match=r"^prediction: a text needs a tokenizer"):
        engine.generate([[1]], predicting("a"))
    with pytest.raises(ValueError, match=r"^prediction: has 9000 tokens; the limit is"):
        engine.generate([[1]], predicting([2] * 9000))
    shared = SpecConfig("ngram", 4, ngram_store="engine", rejection_sample_method="coupled")
    with pytest.raises(ValueError, match=r"^prediction: drafter 'ngram' does not copy"):
        Engine(model, spec=shared).generate([[1]], predicting([2]))
    for engine, name in (Engine(model, drafter), "draft_model"), (Engine(model), "none"):
        with pytest.raises(ValueError, match=rf"^prediction: drafter '{name}' does not copy"):
            engine.generate([[1]], predicting([2]))
