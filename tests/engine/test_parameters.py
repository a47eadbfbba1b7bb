"""Every sampling parameter on every verified row: with any drafter the text of plain decoding."""

import json
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch

from fastspec import Engine, EngineConfig, SamplingParams, SpecConfig
from fastspec.drafters.grammar import LlguidanceGrammar
from fastspec_kernels.testing import chi_square

from .. import differential
from ..models import EOS_ID, byte_tokenizer, perturbed, random_model
from .helpers import ALPHA, PLAIN, drawn_counts, exact_distribution, finish, small_pair
from .probes import READER

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["a", "b"]},
        "on": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["name", "on"],
    "additionalProperties": False,
}
FORMS = [
    ({"json": SCHEMA}, lambda text: set(json.loads(text)) == {"name", "on"}),
    ({"json": json.dumps(SCHEMA)}, lambda text: set(json.loads(text)) == {"name", "on"}),
    ({"regex": "[xyz]{3}(1|2)"}, lambda text: len(text) == 4 and text[3] in "12"),
    ({"choice": ["yes", "no"]}, lambda text: text in ("yes", "no")),
    ({"grammar": 'root ::= "x" [01] [01]'}, lambda text: text[0] == "x" and len(text) == 3),
    ({"grammar": 'start: "<" /[ab]{2}/ ">"'}, lambda text: text[0] == "<" and text[3] == ">"),
]


@pytest.fixture(scope="module")
def target():
    return random_model("llama")


@pytest.fixture(scope="module")
def expected(target):
    return differential.expected_cases(40, 3, target, byte_tokenizer())


@pytest.mark.parametrize("method", differential.METHODS)
def test_unlike_requests_equal_plain_decoding(target, expected, method):
    """Greedy ones that of transformers, see tests/differential.py."""
    engine = differential.engine_of(method, target, byte_tokenizer(), seed=1)
    assert not differential.run(engine, expected, differential.random.Random(1))
    assert engine.stats.num_accepted_tokens > 20


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_forms_hold_with_every_method(target, temperature):
    """The text of a form is that of plain decoding, and complete."""
    params = [
        SamplingParams(temperature=temperature, seed=7, max_tokens=60, structured_outputs=form)
        for form, _ in FORMS
    ]
    prompts = [[40 + i, 50, 60] for i in range(len(FORMS))]
    texts = []
    for method in ("none", *differential.METHODS):
        engine = differential.engine_of(method, target, byte_tokenizer(), seed=1)
        outputs = engine.generate(prompts, params)
        texts.append([output.text for output in outputs])
        assert {output.finish_reason for output in outputs} == {"stop"}
        assert texts[-1] == texts[0]
    for text, (_, fits) in zip(texts[0], FORMS, strict=True):
        assert fits(text), text


def test_forms_that_are_none_are_refused(target):
    engine = Engine(target, tokenizer=byte_tokenizer(), spec="none")
    endless = {"json": {"$ref": "#"}}
    for form in ({"regex": "("}, {"json": {"type": "nothing"}}, {"grammar": "strt: x"}, endless):
        with pytest.raises(ValueError, match=r"^structured_outputs: ") as error:
            engine.add_request([1], SamplingParams(structured_outputs=form))
        assert "<state>" not in str(error.value)
    with pytest.raises(ValueError, match=r"^bad_words: 'utf-8' codec"):
        engine.add_request([1], SamplingParams(bad_words=["\ud800"]))
    bare = Engine(target, spec="none")
    with pytest.raises(ValueError, match=r"^structured_outputs: .* fast tokenizer"):
        bare.add_request([1], SamplingParams(structured_outputs={"regex": "a"}))
    small = Engine(random_model("llama", vocab_size=100), tokenizer=byte_tokenizer(), spec="none")
    with pytest.raises(ValueError, match=r"^structured_outputs: .* 100 vs 257"):
        small.add_request([1], SamplingParams(structured_outputs={"regex": "a"}))
    for field, value in [
        ("logit_bias", {263: 1.0}),
        ("allowed_token_ids", [263]),
        ("bad_words", [[263]]),
    ]:
        with pytest.raises(ValueError, match=rf"^{field}: 263 is not in"):
            bare.add_request([1], SamplingParams(**{field: value}))
    with pytest.raises(ValueError, match=r"^bad_words: texts need a tokenizer"):
        bare.add_request([1], SamplingParams(bad_words=["a"]))
    only = {"allowed_token_ids": [7, 8], "bad_words": [[8], [7, 7]], "stop_token_ids": [7]}
    with pytest.raises(ValueError, match=r"^allowed_token_ids: with bad_words and min_tokens, no "):
        bare.add_request([1], SamplingParams(**only, min_tokens=1))
    bare.abort(bare.add_request([1], SamplingParams(**only)))
    assert not bare.has_unfinished


@pytest.mark.parametrize(
    "rules",
    [
        {"repetition_penalty": 1.6, "frequency_penalty": 0.6, "presence_penalty": -1.0},
        {"logit_bias": {2: 1.5, 4: -float("inf")}, "min_tokens": 2, "stop_token_ids": [3]},
        {"bad_words": [[1], [2, 5]]},
        {"logits_processors": [lambda ids, scores: scores * (1 + ids[0, -1] / 4)]},
    ],
    ids=lambda rules: next(iter(rules)),
)
def test_the_law_is_that_of_the_changed_logits(rules):
    """Drafts drawn under the same rules are judged under them: nothing else would be exact."""
    models = small_pair()
    spec = SpecConfig(num_speculative_tokens=2)
    plain = drawn_counts(models, {**PLAIN, **rules}, SpecConfig("none"), num_draws=3_500)
    drafted = drawn_counts(models, {**PLAIN, **rules}, spec, num_draws=3_500)
    distribution = (plain + drafted) / (plain + drafted).sum()
    assert chi_square(drafted, distribution) > ALPHA
    assert chi_square(drafted, exact_distribution(models[0], PLAIN)) < ALPHA


def test_a_broken_rule_is_caught(monkeypatch, target, expected):
    """The comparison fails when the verifier forgets the rules of rows after the first."""
    original = READER.apply_rules

    def forgetful(texts, rules, logits, rows, backend):
        first = rows._replace(nodes=[0] * len(rows.nodes))
        return original(texts, rules, logits, first, backend)

    monkeypatch.setattr(READER, "apply_rules", forgetful)
    engine = differential.engine_of("draft_model", target, byte_tokenizer(), seed=1)
    assert differential.run(engine, expected, differential.random.Random(1))


def test_a_processor_that_raises_ends_its_request_alone(target):
    def raises(input_ids, scores):
        if input_ids.shape[1] > 6:
            raise RuntimeError("no more")
        return scores

    broken = [raises, lambda ids, scores: scores[0], lambda ids, scores: None]
    given = [SamplingParams(temperature=0, max_tokens=12, logits_processors=[b]) for b in broken]
    params = [*given, SamplingParams(temperature=0, max_tokens=12)]
    for method in ("none", "draft_model", "tree"):
        engine = differential.engine_of(method, target, byte_tokenizer(), seed=1)
        *failed, healthy = engine.generate([[1, 2, 3]] * 4, params)
        assert [output.finish_reason for output in failed] == ["error"] * 3
        assert "RuntimeError('no more')" in failed[0].error
        assert not failed[0].is_request_error
        assert len(failed[0].token_ids) == 4
        assert "expected scores of shape (1, 263)" in failed[1].error
        (alone,) = Engine(target, spec="none").generate([[1, 2, 3]], params[3])
        assert healthy.token_ids == alone.token_ids


@pytest.mark.parametrize("method", ["draft_model", "prompt_lookup", "tree", "cape", "cascade"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_fails_after_a_draft_fails_as_plain_decoding_does(target, method, temperature):
    """Whether a row raises or has nothing left must not matter before the text gets there."""

    def raises_after(input_ids, scores):
        scores[0, 65:70] = -torch.inf
        if input_ids.shape[1] > 20 or int(input_ids[0, -1]) in range(65, 70):
            raise KeyError("no state")
        return scores

    def dead_after(input_ids, scores):
        scores[0, 65:70] = -torch.inf
        last = int(input_ids[0, -1])
        return scores - torch.inf if last in range(65, 70) or last % 29 == 3 else scores

    words = [[65, 10], [65, 11], [66, 10], [66, 11]]
    given = [
        {"logits_processors": [raises_after]},
        {"logits_processors": [dead_after]},
        {"allowed_token_ids": [10, 11], "bad_words": words},
    ]
    shared = {"temperature": temperature, "max_tokens": 24, "ignore_eos": True, "logprobs": 1}
    params = [SamplingParams(**shared, seed=3, **each) for each in given]
    prompts = [[65, 66, 10, 65, 66, 12]] * 3
    plain = differential.engine_of("ngram", target, byte_tokenizer(), seed=1)
    plain.disable_spec_dec()
    engine = differential.engine_of(method, target, byte_tokenizer(), seed=1)
    expected, outputs = plain.generate(prompts, params), engine.generate(prompts, params)
    assert expected[0].finish_reason == "error"
    assert expected[2].finish_reason == "length"
    for one, other in zip(outputs, expected, strict=True):
        assert (one.token_ids, one.finish_reason) == (other.token_ids, other.finish_reason)
        assert len(one.logprobs) == len(one.top_logprobs) == len(one.token_ids)


@pytest.mark.parametrize("method", ["prompt_lookup", "suffix"])
def test_nothing_is_accepted_after_a_place_that_fails(target, method):
    """A row without a distribution is zeros, whose likeliest token, 0, is the next of the copy."""

    def only_42_after_41(input_ids, scores):
        last = int(input_ids[0, -1])
        if last == 42:
            raise KeyError("no state")
        others = torch.arange(scores.shape[1]) != 42
        return scores.masked_fill(others, -torch.inf) if last == 41 else scores

    params = SamplingParams(temperature=0, max_tokens=9, logits_processors=[only_42_after_41])
    prompt = [9, 41, 42, 0, 0, 9, 41]
    spec = SpecConfig(method, 3, **({"prompt_lookup_min": 1} if method == "prompt_lookup" else {}))
    engine = Engine(target, spec=spec)
    (output,) = engine.generate([prompt], params)
    assert engine.stats.num_draft_tokens > 0
    assert (output.token_ids, output.finish_reason) == ((42,), "error")


def test_processors_see_the_vocabulary_of_the_target(target):
    """Also where a draft model has fewer tokens, and in batches of bfloat16."""
    draft = random_model("llama", vocab_size=250)
    bias = torch.linspace(-2, 2, 263)
    given = {"max_tokens": 12, "seed": 1, "ignore_eos": True}
    params = [
        SamplingParams(**given, logits_processors=[lambda ids, scores: scores + bias]),
        SamplingParams(**given),
    ]
    spec = SpecConfig("draft_model", rejection_sample_method="coupled")
    plain = Engine(target, spec=SpecConfig("none", rejection_sample_method="coupled"))
    expected = plain.generate([[1, 2, 3]] * 2, params)
    outputs = Engine(target, draft, spec=spec).generate([[1, 2, 3]] * 2, params)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
    half = random_model("llama").bfloat16()
    engine = Engine(half, perturbed(random_model("llama"), 0.1).bfloat16())
    several = [SamplingParams(**given, num_speculative_tokens=1, repetition_penalty=1.2)]
    outputs = engine.generate([[1, 2]] * 3, [*several, params[1], params[1]])
    assert {output.finish_reason for output in outputs} == {"length"}


def test_a_grammar_that_breaks_is_an_error(target, monkeypatch):
    """llguidance may give up on a pattern: then it says that it has stopped, as at its end."""
    advance = LlguidanceGrammar.advance

    def breaks(self, token_id):
        goes_on = advance(self, token_id)
        if len(taken) == 3:
            monkeypatch.setattr(self, "matcher", broken)
        taken.append(token_id)
        return goes_on

    broken = Mock(
        is_stopped=lambda: True,
        is_error=lambda: True,
        compute_bitmask=lambda: bytes(36),
        get_error=lambda: "too many states",
    )
    taken = []
    monkeypatch.setattr(LlguidanceGrammar, "advance", breaks)
    engine = Engine(target, tokenizer=byte_tokenizer(), spec="none")
    params = SamplingParams(structured_outputs={"regex": "[a-z]+"}, max_tokens=20, seed=1)
    (output,) = engine.generate([[70]], params)
    assert (output.finish_reason, len(output.token_ids)) == ("error", 4)
    assert output.error == "structured_outputs: too many states"
    assert output.is_request_error


@pytest.mark.parametrize("max_tokens", [2, 3])
@pytest.mark.parametrize("method", ["none", "draft_model"])
def test_a_grammar_that_breaks_along_a_draft_frees_no_token(target, method, max_tokens):
    """What is written until then does not depend on how far drafts were checked."""
    engine = Engine(target, None if method == "none" else target, byte_tokenizer(), method)
    form = {"regex": "(a{1000}){1000}"}  # too large for llguidance once it has begun
    params = SamplingParams(temperature=0, max_tokens=max_tokens, structured_outputs=form)
    (output,) = engine.generate([[70]], params)
    assert (output.text, output.finish_reason) == ("a", "error")
    assert output.error == "structured_outputs: lexer error: too many expressions constructed"


A, B = (byte_tokenizer().encode(letter)[0] for letter in "ab")
BAN = -float("inf")


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ({"allowed_token_ids": [5], "logit_bias": {5: BAN}}, "allowed_token_ids: with logit_bias"),
        (
            {"allowed_token_ids": [5], "logit_bias": {5: -3e38}, "repetition_penalty": 2},
            "allowed_token_ids: with logit_bias",
        ),
        ({"logit_bias": dict.fromkeys(range(263), BAN)}, "logit_bias: "),
        ({"bad_words": [[i] for i in range(263)]}, "bad_words: "),
        (
            {"structured_outputs": {"regex": "ab"}, "allowed_token_ids": [B]},
            "structured_outputs: with allowed_token_ids",
        ),
        (
            {"structured_outputs": {"choice": ["a"]}, "bad_words": ["a"]},
            "structured_outputs: with bad_words",
        ),
        (
            {"allowed_token_ids": [A], "bad_words": [[70, A]], "logit_bias": {B: 9.0}},
            "allowed_token_ids: with bad_words, ",
        ),
    ],
)
def test_options_that_leave_no_token_are_refused_by_name(target, options, fields):
    engine = Engine(target, tokenizer=byte_tokenizer(), spec="none")
    with pytest.raises(ValueError, match=f"^{fields}.*no token is left to write$"):
        engine.generate([[70]], SamplingParams(**options))
    assert not engine.has_unfinished


@pytest.mark.parametrize("method", ["none", "prompt_lookup"])
@pytest.mark.parametrize(
    ("options", "fields", "place"),
    [
        (
            {"structured_outputs": {"regex": "aab"}, "allowed_token_ids": [A]},
            "structured_outputs: with allowed_token_ids",
            2,
        ),
        (
            {"allowed_token_ids": [A], "bad_words": [[A, A]]},
            "allowed_token_ids: with bad_words",
            1,
        ),
        (
            {"allowed_token_ids": [A, 256], "bad_words": [[A, A]], "min_tokens": 3},
            "allowed_token_ids: with bad_words and min_tokens",
            1,
        ),
    ],
)
def test_options_that_leave_no_token_later_fail_the_request_by_name(
    target, options, fields, place, method
):
    engine = Engine(target, tokenizer=byte_tokenizer(), spec=method)
    (output,) = engine.generate([[A, B]], SamplingParams(**options))
    where = f"no token is left to write after token {place} of the output"
    assert (output.finish_reason, output.error) == ("error", f"{fields}, {where}")
    assert output.is_request_error


def test_biases_that_a_penalty_takes_beyond_float32_are_refused():
    SamplingParams(logit_bias={5: 3e38, 6: BAN}, repetition_penalty=2)
    with pytest.raises(ValueError, match=r"^logit_bias: .* by 0\.5, the repetition_penalty"):
        SamplingParams(logit_bias={5: 3e38}, repetition_penalty=0.5)


def test_a_bias_that_bans_nothing_leaves_its_token(target):
    options = {"allowed_token_ids": [5], "logit_bias": {5: -3e38}, "repetition_penalty": 1.1}
    params = SamplingParams(**options, max_tokens=3, ignore_eos=True)
    (output,) = Engine(target).generate([[5]], params)
    assert output.token_ids == (5, 5, 5)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_logprobs_are_those_of_the_distribution_drawn_from(target, temperature):
    given = {"temperature": temperature, "max_tokens": 10, "seed": 3, "logprobs": 4}
    params = SamplingParams(**given, prompt_logprobs=2, repetition_penalty=1.3)
    prompt = [7, 30, 31, 7, 30]
    engine = Engine(target, perturbed(target, 0.2), config=EngineConfig(prefill_chunk_size=2))
    (output,) = engine.generate([prompt], params)
    text = torch.tensor([prompt + list(output.token_ids)])
    logits = target(text).logits[0].detach()
    raw = logits.log_softmax(-1)
    assert output.prompt_logprobs[0] is None
    for place, row in enumerate(output.prompt_logprobs[1:], start=1):
        best = raw[place - 1].topk(2)
        assert list(row)[:2] == best.indices.tolist()
        assert row[prompt[place]] == pytest.approx(float(raw[place - 1, prompt[place]]), abs=1e-4)
    for place, (value, top) in enumerate(zip(output.logprobs, output.top_logprobs, strict=True)):
        end = len(prompt) + place
        row, seen = logits[end - 1].clone(), text[0, :end].unique()
        row[seen] = torch.where(row[seen] > 0, row[seen] / 1.3, row[seen] * 1.3)
        row = (row / (temperature or 1.0)).log_softmax(-1)
        assert value == pytest.approx(float(row[output.token_ids[place]]), abs=1e-4)
        assert list(top)[:4] == row.topk(4).indices.tolist()
        assert top[output.token_ids[place]] == value
    events = list(engine.stream(prompt, params))
    assert output.cumulative_logprob == sum(output.logprobs)
    assert [event.logprob for event in events[:-1]] == list(output.logprobs)
    assert [event.top_logprobs for event in events[:-1]] == list(output.top_logprobs)


def test_prompt_logprobs_with_cached_prefixes_samples_and_preemption(target):
    config = EngineConfig(prefix_caching=True, num_blocks=12, max_model_len=96)
    prompt = [10 + i % 50 for i in range(60)]
    engine = Engine(target, perturbed(target, 0.2), config=config)
    want = SamplingParams(temperature=0, max_tokens=20, prompt_logprobs=0, ignore_eos=True)
    (cold,) = engine.generate([prompt], want)
    warm, other = engine.generate([prompt, prompt[::-1]], want)
    assert warm.prompt_logprobs == cold.prompt_logprobs
    assert len(other.prompt_logprobs) == len(prompt)
    (several,) = engine.generate([prompt[:5]], SamplingParams(n=2, prompt_logprobs=1, max_tokens=2))
    assert len(several.prompt_logprobs) == 5
    assert several.outputs[1].prompt_logprobs is None


def test_min_tokens_puts_off_stop_strings_and_end_tokens(target):
    tokenizer = byte_tokenizer()
    (free,) = Engine(target, tokenizer=tokenizer, spec="none").generate(
        [[1, 2, 3]], SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    )
    stop = next(c for c in free.text if c.isascii() and c.isprintable())
    first = free.text.index(stop)
    given = {"temperature": 0, "max_tokens": 24, "ignore_eos": True, "stop": [stop]}
    for method in ("none", "draft_model"):
        engine = differential.engine_of(method, target, tokenizer, seed=1)
        (soon,) = engine.generate([[1, 2, 3]], SamplingParams(**given))
        (late,) = engine.generate([[1, 2, 3]], SamplingParams(**given, min_tokens=20))
        assert soon.text == free.text[:first]
        assert len(late.token_ids) >= 20
        assert free.token_ids[: len(late.token_ids)] == late.token_ids


def test_bad_words_as_texts_are_never_written(target):
    tokenizer = byte_tokenizer()
    for method in ("none", "draft_model", "tree"):
        engine = differential.engine_of(method, target, tokenizer, seed=1)
        params = SamplingParams(temperature=0, max_tokens=40, bad_words=["a", "bc"])
        (output,) = engine.generate([[70, 71, 72]], params)
        assert "a" not in output.text
        assert "bc" not in output.text


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_seed_is_a_text_whatever_goes_on_beside_it(target, backend):
    """By coupled draws also whatever drafts: alone, in a batch, preempted, with cached prefixes."""
    rules = {"temperature": 1.0, "repetition_penalty": 1.2, "max_tokens": 24, "ignore_eos": True}
    params = [SamplingParams(**rules, seed=seed) for seed in range(5)]
    prompts = [[seed + 1, 9, 9, 4] * 4 for seed in range(5)]
    spec = SpecConfig("none", rejection_sample_method="coupled")
    alone = Engine(target, spec=spec, config=EngineConfig(backend=backend))
    texts = [alone.generate([p], one)[0].token_ids for p, one in zip(prompts, params, strict=True)]
    for method in ("draft_model", "ngram", "tree") if backend == "cpu" else ("tree",):
        for config in (
            EngineConfig(backend=backend, num_blocks=10, max_model_len=64),
            EngineConfig(backend=backend, prefix_caching=True),
        ):
            draft = perturbed(target, 0.2) if method != "ngram" else None
            given = SpecConfig(method, rejection_sample_method="coupled", num_speculative_tokens=3)
            engine = Engine(target, draft, spec=given, config=config)
            for order in ([0, 1, 2, 3, 4], [3, 1, 4, 0, 2]):
                ids = {i: engine.add_request(prompts[i], params[i]) for i in order}
                outputs = finish(engine)
                assert [outputs[ids[i]].token_ids for i in range(5)] == texts


def test_end_of_sequence_completes_a_form(target):
    """Where a text may go on or end, the end-of-sequence token is among what is allowed."""
    engine = Engine(target, tokenizer=byte_tokenizer(), spec="none")
    given = {"structured_outputs": {"regex": "a+"}, "logit_bias": {EOS_ID: 50.0}}
    (output,) = engine.generate([[1]], SamplingParams(temperature=0, max_tokens=9, **given))
    assert (output.text, output.token_ids[-1], output.finish_reason) == ("a", EOS_ID, "stop")


def test_bad_words_ban_what_they_say(target):
    """A line break bans no space, and a word after one does not ban the word elsewhere."""
    tokenizer = byte_tokenizer()
    engine = Engine(target, tokenizer=tokenizer, spec="none")

    def ids(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    for word, after, is_banned in (
        ("\n", " ", False),
        ("\nab", "cab", False),
        ("\nab", "\nab", True),
        ("ab", "cab", True),
        (" ab", "cab", True),
        (" ", " ", True),
    ):
        *prompt, last = ids("x" + after)
        params = SamplingParams(
            temperature=0,
            max_tokens=1,
            allowed_token_ids=[last, *ids("?")],
            logit_bias={last: 99.0},
        )
        (free,) = engine.generate([prompt], params)
        (output,) = engine.generate([prompt], replace(params, bad_words=word))
        assert [*free.token_ids] == [last]
        assert ([*output.token_ids] != [last]) == is_banned, (word, after)


def test_more_tokens_than_there_is_room_for_cannot_be_promised(target):
    engine = Engine(target, spec="none")
    most = engine.max_model_len - 3
    params = SamplingParams(temperature=0, min_tokens=most + 1, max_tokens=2 * most)
    with pytest.raises(ValueError, match=f"^min_tokens: expected at most {most}, "):
        engine.generate([[1, 2, 3]], params)
