"""A drafter or schedule that raises, or proposes nonsense, harms no request and is heard once."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fastspec import Engine, SamplingParams, SpecConfig
from fastspec.drafters import Proposal
from fastspec.drafters.base import DRAFT_STREAM, Branch
from fastspec_kernels.testing import chi_square

from ..models import perturbed
from .helpers import ALPHA, small_model
from .probes import assert_blocks_came_back, take_error, target_runner

GREEDY = SamplingParams(temperature=0, max_tokens=10)
PROMPTS = [[3, 5, 7, 11 + i] for i in range(3)]
K = 3
SPEC = SpecConfig(num_speculative_tokens=K)


class Boom(Exception):
    """What the drafters here raise."""


class Scripted:
    """Proposes the target's own text, or what `change` makes of that; raises where told to."""

    name = "scripted"

    def __init__(self, texts, failing=(), when=lambda call: True, change=lambda proposal: proposal):
        self.texts, self.failing, self.when, self.change = texts, failing, when, change
        self.calls = dict.fromkeys(("propose", "commit", "release", "on_target_logits"), 0)

    def _enter(self, method):
        self.calls[method] += 1
        if method in self.failing and self.when(self.calls[method]):
            raise Boom(method)

    def propose(self, batch):
        self._enter("propose")
        rows = []
        for request in batch.requests:
            text = self.texts[request.token_ids[3]]
            done = len(request.token_ids)
            rows.append((text[done : done + K] + [-1] * K)[:K])
        token_ids = torch.tensor(rows, dtype=torch.int32)
        on_target_logits = (
            (lambda *_: self._enter("on_target_logits"))
            if "on_target_logits" in self.failing
            else None
        )
        return self.change(Proposal(token_ids, on_target_logits=on_target_logits))

    def commit(self, batch, accepted):
        self._enter("commit")

    def release(self, request):
        self._enter("release")


@pytest.fixture(scope="module")
def expected(model):
    return [output.token_ids for output in Engine(model).generate(PROMPTS, GREEDY)]


@pytest.fixture(scope="module")
def texts(expected):
    return {p[3]: [*p, *ids] for p, ids in zip(PROMPTS, expected, strict=True)}


def run(engine):
    """Outputs by step(), in the order of PROMPTS, and what was raised on the way."""
    ids = [engine.add_request(prompt, GREEDY) for prompt in PROMPTS]
    outputs, errors = {}, []
    for _ in range(200):
        if not engine.has_unfinished:
            break
        try:
            events = engine.step()
        except (Exception, KeyboardInterrupt) as error:  # the loop of a server goes on
            errors.append(error)
            continue
        outputs |= {event.request_id: event.output for event in events if event.output}
    assert not engine.has_unfinished
    assert_blocks_came_back(engine)
    return [outputs[request_id] for request_id in ids], errors


class Remembers:
    """Keeps what it was told of each request until that is released."""

    name = "remembers"

    def __init__(self):
        self.lengths = {}

    def propose(self, batch):
        shape = len(batch.requests), batch.num_speculative_tokens
        return Proposal(torch.full(shape, 3, dtype=torch.int32))

    def commit(self, batch, accepted):
        self.lengths |= {request.request_id: len(request.token_ids) for request in batch.requests}

    def release(self, request):
        self.lengths.pop(request.request_id, None)


def test_it_is_told_nothing_of_a_request_after_its_release(model, expected):
    drafter = Remembers()
    outputs, _ = run(Engine(model, drafter, spec=SPEC))
    assert [output.token_ids for output in outputs] == expected
    assert drafter.lengths == {}


@pytest.mark.parametrize("method", ["propose", "commit", "release", "on_target_logits"])
@pytest.mark.parametrize("when", [lambda call: call == 2, lambda call: True], ids=["2nd", "all"])
def test_no_request_is_lost_and_the_error_is_raised_once(model, expected, texts, method, when):
    drafter = Scripted(texts, {method}, when)
    engine = Engine(model, drafter, spec=SPEC)
    outputs, errors = run(engine)
    assert [output.token_ids for output in outputs] == expected
    assert {output.finish_reason for output in outputs} == {"length"}
    assert all(isinstance(error, Boom) for error in errors)
    if when(1):
        assert errors
    else:
        assert len(errors) == 1
        assert engine.stats.num_accepted_tokens > 0  # the drafter was asked again afterwards
    take_error(engine)
    drafter.failing = ()
    assert [output.token_ids for output in engine.generate(PROMPTS, GREEDY)] == expected


@pytest.mark.parametrize("method", ["propose", "commit", "release", "on_target_logits"])
def test_generate_completes_and_then_raises(model, expected, texts, method):
    drafter = Scripted(texts, {method}, lambda call: call == 1)
    engine = Engine(model, drafter, spec=SPEC)
    with pytest.raises(Boom) as raised:
        engine.generate(PROMPTS, GREEDY)
    assert [output.token_ids for output in raised.value.outputs] == expected
    assert [output.token_ids for output in engine.generate(PROMPTS, GREEDY)] == expected


def test_stream_delivers_everything_and_then_raises(model, expected, texts):
    engine = Engine(model, Scripted(texts, {"propose"}))
    stream = engine.stream(PROMPTS[0], GREEDY)
    while (event := next(stream)).output is None:
        pass
    assert event.output.token_ids == expected[0]
    with pytest.raises(Boom):
        next(stream)


def test_switching_off_works_and_reports_a_failing_release(model, expected, texts):
    drafter = Scripted(texts, {"release"})
    engine = Engine(model, drafter, spec=SPEC)
    engine.add_request(PROMPTS[0], GREEDY)
    engine.step()
    with pytest.raises(Boom):
        engine.disable_spec_dec()
    assert not engine.is_speculative
    outputs, errors = run(engine)
    assert not errors
    assert [output.token_ids for output in outputs] == expected


def _short_writers(proposal):
    return replace(proposal, writers=[["a"]] * len(proposal.token_ids))


def _logits(proposal, *shape, dtype=torch.float32):
    return replace(proposal, draft_logits=torch.zeros(shape, dtype=dtype))


def _tree(proposal, parents=(0, 1, 2), sibling_rule="target_only", **fields):
    parents = torch.tensor([parents] * len(proposal.token_ids), dtype=torch.int32)
    return replace(proposal, parents=parents, sibling_rule=sibling_rule, **fields)


WRONG = {
    "None": (lambda p: None, "propose"),
    "tokens as a list": (lambda p: replace(p, token_ids=p.token_ids.tolist()), "token_ids"),
    "int64": (lambda p: replace(p, token_ids=p.token_ids.long()), "token_ids"),
    "more than K": (lambda p: replace(p, token_ids=p.token_ids.repeat(1, 2)), "token_ids"),
    "too few rows": (lambda p: replace(p, token_ids=p.token_ids[:1]), "token_ids"),
    "one row": (lambda p: replace(p, token_ids=p.token_ids[0]), "token_ids"),
    "a number": (lambda p: replace(p, token_ids=p.token_ids[0, 0]), "token_ids"),
    "no tensor of rows": (lambda p: replace(p, token_ids=p.token_ids.to_sparse()), "token_ids"),
    "logits that are a number": (_logits, "draft_logits"),
    "rows of unequal tokens and logits": (
        lambda p: replace(_logits(p, 3, K, 8), token_ids=p.token_ids[:, :1]),
        "draft_logits",
    ),
    "short writers": (_short_writers, "writers"),
    "writers of too few": (lambda p: replace(p, writers=[["a"] * K]), "writers"),
    "short counts": (lambda p: replace(p, num_tokens=[1]), "num_tokens"),
    "negative counts": (lambda p: replace(p, num_tokens=[-3] * 3), "num_tokens"),
    "passes of too few": (lambda p: replace(p, passes=[{}]), "passes"),
    "passes that are numbers": (lambda p: replace(p, passes=[3] * 3), "passes"),
    "drawn without logits": (
        lambda p: _tree(p, sibling_rule="without_replacement"),
        "draft_logits",
    ),
    "a parent that comes later": (lambda p: _tree(p, parents=(2, 0, 1)), "parents"),
    "a branch of tokens": (lambda p: _tree(p, branch=Branch("a", [5] * 3)), "branch"),
    "asked of too few": (lambda p: replace(p, num_asked=[1]), "num_asked"),
    "asked for less than none": (lambda p: replace(p, num_asked=[-1] * 3), "num_asked"),
    "logits of one row": (lambda p: _logits(p, 3, 1, 263), "draft_logits"),
    "logits of another vocabulary": (lambda p: _logits(p, 3, K, 999), "draft_logits"),
    "integer logits": (lambda p: _logits(p, 3, K, 263, dtype=torch.int32), "draft_logits"),
    "parents of another shape": (
        lambda p: replace(p, parents=p.token_ids[:, :1], sibling_rule="target_only"),
        "parents",
    ),
    "an unknown rule": (
        lambda p: replace(p, parents=p.token_ids, sibling_rule="guess"),
        "sibling_rule",
    ),
    "another device": (lambda p: replace(p, token_ids=p.token_ids.to("meta")), "token_ids"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_proposal_is_checked_before_anything_is_committed(model, expected, texts, name):
    change, field = WRONG[name]
    engine = Engine(
        model, Scripted(texts, change=change), spec=SpecConfig(num_speculative_tokens=K)
    )
    outputs, errors = run(engine)
    assert [output.token_ids for output in outputs] == expected
    assert errors
    assert all(str(error).startswith(f"{field}:") for error in errors), errors[0]
    assert all(isinstance(error, ValueError) for error in errors)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("is_tree", [False, True], ids=["chain", "tree"])
def test_draft_logits_that_say_nothing_are_the_drafters_fault(
    model, expected, texts, value, is_tree
):
    """Of one request: it decodes plainly, and the error names what was wrong. Greedy requests do
    not need them."""
    is_spoilt = True

    def change(proposal):
        num = len(proposal.token_ids)
        logits = torch.zeros(num, K + is_tree, 263)
        if is_spoilt:
            logits[1:2] = value
        if not is_tree:
            return replace(proposal, draft_logits=logits)
        parents = torch.arange(K, dtype=torch.int32).expand(num, K).contiguous()
        chosen = {"parents": parents, "sibling_rule": "without_replacement"}
        return replace(proposal, draft_logits=logits, **chosen)

    class Drafter(Scripted):
        if is_tree:

            def max_nodes(self, num_speculative_tokens):
                return num_speculative_tokens

    engine = Engine(model, Drafter(texts, change=change), spec=SPEC)
    assert [output.token_ids for output in engine.generate(PROMPTS, GREEDY)] == expected
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=10)
    with pytest.raises(ValueError, match="draft_logits: those of drafter scripted") as raised:
        engine.generate(PROMPTS, params)
    outputs = raised.value.outputs
    assert {output.finish_reason for output in outputs} == {"length"}
    assert_blocks_came_back(engine)
    is_spoilt = False
    alone = [engine.generate([PROMPTS[i]], params)[0].token_ids for i in (0, 2)]
    assert [outputs[i].token_ids for i in (0, 2)] == alone  # the others draw what they drew


def test_a_schedule_learns_of_good_drafts_beside_spoilt_ones(model, texts):
    """What it wants next selects random numbers, so a seed's text would depend on the others."""

    def change(proposal):
        logits = torch.zeros(len(proposal.token_ids), K, 263)
        logits[1:2] = torch.nan  # of the second request, if there is one
        return replace(proposal, draft_logits=logits)

    spec = replace(SPEC, schedule="adaptive", step_costs=[1.0, 1.1, 1.2, 1.3])
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=30, ignore_eos=True)
    engines = [Engine(model, Scripted(texts, change=change), spec=spec) for _ in range(2)]
    (alone,) = engines[0].generate([PROMPTS[0]], params)
    with pytest.raises(ValueError, match="draft_logits: those of drafter scripted") as raised:
        engines[1].generate(PROMPTS, params)
    assert raised.value.outputs[0].token_ids == alone.token_ids


class SpoiltAfterOne:
    """Draws each token from the same distribution, but knows nothing after token 1."""

    name = "spoilt"
    probs = torch.tensor([0.1, 0.4, 0.2, 0.1, 0.1, 0.1])

    def __init__(self, is_tree):
        self._is_tree = is_tree
        if is_tree:
            self.max_nodes = lambda num: num

    def propose(self, batch):
        num, most = len(batch.requests), batch.num_speculative_tokens
        at_temperature = 1.3 * self.probs.log()
        logits = at_temperature.expand(num, most + self._is_tree, 6).clone()
        draws = torch.searchsorted(self.probs.cumsum(0), batch.uniforms(most, DRAFT_STREAM))
        token_ids = draws.clamp(max=5).int()
        for place in range(1, most):
            logits[token_ids[:, place - 1] == 1, place:] = torch.nan
        if not self._is_tree:
            return Proposal(token_ids, draft_logits=logits)
        parents = torch.arange(most, dtype=torch.int32).expand(num, most).contiguous()
        rule = "without_replacement"
        return Proposal(token_ids, parents, draft_logits=logits, sibling_rule=rule)

    def commit(self, batch, accepted):
        pass

    def release(self, request):
        pass


@pytest.mark.parametrize("method", ["standard", "block", "tree"])
def test_draft_logits_that_are_spoilt_after_a_token_bend_no_distribution(method):
    target, num = small_model(), 6000
    rule = "standard" if method == "tree" else method
    spec = SpecConfig(num_speculative_tokens=3, rejection_sample_method=rule)
    drafter = SpoiltAfterOne(is_tree=method == "tree")
    engine = Engine(target, drafter, spec=spec, config={"max_batch_size": 512})
    params = [
        SamplingParams(temperature=1.3, seed=seed, max_tokens=3, ignore_eos=True)
        for seed in range(num)
    ]
    with pytest.raises(ValueError, match="draft_logits") as raised:
        engine.generate([[1, 4, 2]] * num, params)
    counts = np.bincount([output.token_ids[0] for output in raised.value.outputs], minlength=6)
    probs = target(torch.tensor([[1, 4, 2]])).logits[0, -1].double().div(1.3).softmax(-1)
    assert chi_square(counts, probs.detach().numpy()) > ALPHA
    assert engine.stats.num_accepted_tokens > 0


@pytest.mark.parametrize("method", ["standard", "coupled"])
@pytest.mark.parametrize(("row", "num_spoilt", "reason"), [(1, 1, "length"), (0, 1, "error")])
def test_what_is_the_targets_fault_is_not_the_drafters(
    model, expected, texts, method, row, num_spoilt, reason
):
    """NaN after a draft costs the drafts, NaN after the text that is judged without ends it."""
    for has_logits in (False, True):

        def change(proposal, has_logits=has_logits):
            num = len(proposal.token_ids)
            return (
                replace(proposal, draft_logits=torch.zeros(num, K, 263)) if has_logits else proposal
            )

        spec = SpecConfig(num_speculative_tokens=K, rejection_sample_method=method)
        engine = Engine(model, Scripted(texts, change=change), spec=spec)
        forward = target_runner(engine).forward

        passes = []

        def spoilt(*args, forward=forward, passes=passes, **kwargs):
            logits = forward(*args, **kwargs)
            if len(logits) > 1 or passes:
                if len(passes) < num_spoilt:
                    logits[row] = torch.nan  # of the first request
                passes.append(logits)
            return logits

        target_runner(engine).forward = spoilt
        params = SamplingParams(temperature=0 if method == "coupled" else 0.8, seed=1, max_tokens=9)
        outputs = engine.generate(PROMPTS, params)
        assert outputs[0].finish_reason == reason
        if reason == "length" and params.temperature == 0:
            assert outputs[0].token_ids == expected[0][:9]
        assert {output.finish_reason for output in outputs[1:]} == {"length"}
        assert not engine.take_drafter_errors()


@pytest.mark.parametrize(
    "spec",
    [
        {"method": "draft_model"},
        {"method": "draft_model", "rejection_sample_method": "block"},
        {"method": "draft_model", "rejection_sample_method": "coupled"},
        {"method": "tree"},
    ],
    ids=lambda spec: "_".join(spec.values()),
)
def test_rows_of_nan_behind_drafts_bend_no_distribution(spec):
    """A token that leads to NaN is drawn as often as without a drafter, and ends the text then."""
    target, draft = small_model(), perturbed(small_model(), 0.05)
    first_distribution = target(torch.tensor([[1, 4, 2]])).logits[0, -1].div(1.3).softmax(-1)
    with torch.no_grad():
        target.get_input_embeddings().weight[3] = torch.nan
    num = 1500
    params = [SamplingParams(temperature=1.3, seed=seed, max_tokens=3) for seed in range(num)]
    config = {"max_batch_size": 512}
    spec = SpecConfig(num_speculative_tokens=2, **spec)
    outputs = Engine(target, draft, spec=spec, config=config).generate([[1, 4, 2]] * num, params)
    assert all(
        (output.token_ids[-1] == 3) == (output.finish_reason == "error")
        for output in outputs
        if len(output.token_ids) < 3
    )
    if spec.rejection_sample_method == "coupled":
        plain = SpecConfig("none", rejection_sample_method="coupled")
        expected = Engine(target, spec=plain, config=config).generate([[1, 4, 2]] * num, params)
        assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
        assert [o.finish_reason for o in outputs] == [o.finish_reason for o in expected]
        return
    counts = torch.bincount(torch.tensor([o.token_ids[0] for o in outputs]), minlength=6)
    deviations = (counts - num * first_distribution) / (
        num * first_distribution * (1 - first_distribution)
    ).sqrt()
    assert deviations.abs().max() < 4, counts


@pytest.mark.parametrize("options", [{"allowed_token_ids": [1, 2, 3, 5]}, {"logprobs": 2}], ids=str)
@pytest.mark.parametrize("method", ["draft_model", "tree"])
def test_rows_of_nan_behind_drafts_and_what_else_reads_rows(method, options):
    target, draft = small_model(), perturbed(small_model(), 0.05)
    with torch.no_grad():
        target.get_input_embeddings().weight[3] = torch.nan
    params = [SamplingParams(temperature=1.3, seed=n, max_tokens=5, **options) for n in range(60)]
    results = []
    for drafter, spec in (
        (draft, SpecConfig(method, 2, rejection_sample_method="coupled")),
        (None, SpecConfig("none", rejection_sample_method="coupled")),
    ):
        outputs = Engine(target, drafter, spec=spec).generate([[1, 4, 2]] * len(params), params)
        assert all(len(o.logprobs or o.token_ids) == len(o.token_ids) for o in outputs)
        results.append([(o.token_ids, o.finish_reason) for o in outputs])
    assert results[0] == results[1]
    assert any(reason == "error" and ids[-1] == 3 for ids, reason in results[0])


@pytest.mark.parametrize("token", [-7, 263, 10**6, 2**31 - 1])
def test_ids_outside_the_vocabulary_are_rejected_as_others_are(model, expected, texts, token):
    def change(proposal):
        return replace(proposal, token_ids=torch.full_like(proposal.token_ids, token))

    engine = Engine(
        model, Scripted(texts, change=change), spec=SpecConfig(num_speculative_tokens=K)
    )
    outputs, errors = run(engine)
    assert not errors
    assert [output.token_ids for output in outputs] == expected


@pytest.mark.parametrize("wanted", [-1, 1.5, None, "2"])
def test_a_schedule_that_answers_nonsense_is_off_and_named(model, expected, texts, wanted):
    class Schedule:
        def num_draft_tokens(self, request):
            return wanted

        def record(self, request, step): ...

    engine = Engine(model, Scripted(texts), spec=SpecConfig(schedule=Schedule()))
    outputs, errors = run(engine)
    assert [output.token_ids for output in outputs] == expected
    assert errors
    assert all("num_draft_tokens" in str(error) for error in errors)


@pytest.mark.parametrize("kind", [Boom, KeyboardInterrupt])
def test_what_fails_after_a_pass_lets_the_drafter_forget_all_of_it(model, expected, texts, kind):
    class Schedule:
        def num_draft_tokens(self, request):
            return K

        def record(self, request, step):
            if request.token_ids[3] == PROMPTS[0][3]:
                raise kind("record")

    class Noting(Scripted):
        def __init__(self, texts):
            super().__init__(texts)
            self.open = set()  # requests of proposals that it has heard no more of

        def propose(self, batch):
            assert not self.open
            self.open = {request.request_id for request in batch.requests}
            return super().propose(batch)

        def commit(self, batch, accepted):
            self.open.clear()

        def release(self, request):
            self.open.discard(request.request_id)

    spec = SpecConfig(num_speculative_tokens=K, schedule=Schedule())
    engine = Engine(model, Noting(texts), spec=spec)
    outputs, errors = run(engine)
    assert [output.token_ids for output in outputs] == expected
    assert errors
    assert {type(error) for error in errors} == {kind}, errors


def test_turning_on_what_cannot_be_measured_changes_nothing(model, drafter):
    spec = SpecConfig(num_speculative_tokens=3, schedule="adaptive", step_costs=[4, 5, 6, 7])
    engine = Engine(model, drafter, spec=spec)
    engine.disable_spec_dec()
    with pytest.raises(ValueError, match="step_costs"):
        engine.enable_spec_dec(n_spec_tokens=7)
    assert not engine.is_speculative
    engine.enable_spec_dec(n_spec_tokens=3)
    assert engine.is_speculative
    with pytest.raises(ValueError, match="step_costs"):
        engine.enable_spec_dec(drafter, n_spec_tokens=9)
    output = engine.generate([PROMPTS[0]], GREEDY)[0]
    assert len(output.stats.acceptance_histogram) <= 4
