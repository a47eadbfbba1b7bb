"""Processes that share a target, as threads over whole models: rank 0 decides, none goes astray.

Rank 1's models are others than rank 0's, so whatever it decided by itself would show.
"""

import threading
from queue import SimpleQueue
from types import SimpleNamespace

import pytest
import torch

from fastspec import Engine, SamplingParams, SpecConfig
from fastspec.drafters import Proposal
from fastspec.drafters.base import NoDrafter
from fastspec.engine import ranks as engine_ranks
from fastspec.models import paged_model
from fastspec.models.sharded import Ranks

from ..models import VOCAB_SIZE, perturbed, random_model
from .glide_models import random_glide
from .probes import before_passes, blocks, draft_model_of, running

PROMPTS = [[1, 2, 3] * 5, [7, 8, 9], [40, 7] * 9]
CONFIG = {"num_blocks": 8, "max_batch_size": 2}  # requests wait, and lose their blocks
HERE = threading.local()


class ThreadRanks(Ranks):
    """Two ranks that are threads: what one has it puts into the queue of the other."""

    def __init__(self, rank, queues):
        self.rank, self.size = rank, len(queues)
        self._device, self._failure = torch.device("cpu"), None
        self._own, self._other = queues[rank], queues[1 - rank]

    def all_reduce_min_(self, values):
        return torch.stack(self._alike(values)).amin(0)

    def all_gather(self, values, dim):
        return torch.cat(self.all_gather_objects(values.clone()), dim)

    def broadcast(self, values):
        return self._alike(values)[0]

    def all_gather_objects(self, value):
        self._other.put(value)
        other = self._own.get(timeout=60)
        if other is None:
            self._own.put(None)
            raise RuntimeError("connection lost")
        return [other, value] if self.rank else [value, other]

    def _alike(self, values):
        values = self.all_gather_objects(values.clone())
        assert values[0].shape == values[1].shape  # a real group would not notice
        return values

    def leave(self):
        """As a process that ends."""
        self._other.put(None)


@pytest.fixture
def both(monkeypatch):
    """Runs a function on two ranks, each with its own target and draft; what each returned."""
    models = []
    for seed in range(2):
        target = random_model("llama", seed, num_hidden_layers=2)
        models.append((target, perturbed(target, 0.05)))

    def ranks_of(model):
        weights = model.get_input_embeddings().weight  # shared by the target's first layers
        is_split = HERE.target and weights is HERE.target.get_input_embeddings().weight
        return HERE.ranks if is_split else None

    monkeypatch.setattr(engine_ranks, "ranks_of", ranks_of)
    monkeypatch.setattr(paged_model, "ranks_of", ranks_of)

    def run(function):
        queues = SimpleQueue(), SimpleQueue()
        results: list = [None, None]

        def run_one(rank):
            HERE.target, draft = models[rank]
            HERE.ranks = ThreadRanks(rank, queues)
            try:
                results[rank] = function(
                    SimpleNamespace(rank=rank, target=HERE.target, draft=draft)
                )
            except Exception as error:
                results[rank] = error
            finally:
                HERE.ranks.leave()

        threads = [threading.Thread(target=run_one, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results

    run.models = models[0]
    return run


def params(temperature):
    fields = {"temperature": temperature, "max_tokens": 20, "ignore_eos": True}
    return [SamplingParams(**fields, seed=seed) for seed in range(len(PROMPTS))]


def texts(engine, temperature):
    outputs = engine.generate(PROMPTS, params(temperature))
    return [output.token_ids for output in outputs]


class Moody:
    """A schedule that goes by something else on each rank."""

    def __init__(self, most):
        self._most = most
        self.steps = []

    def num_draft_tokens(self, request):
        return len(request.token_ids) % (self._most + 1)

    def record(self, request, step):
        self.steps.append(step)


def copies(schedule, method="draft_model", **options):
    return SpecConfig(method, 3, suffix_tokens=6, schedule=schedule, **options)


SPECS = {
    "none": lambda rank: SpecConfig("none"),
    "draft_model": lambda rank: SpecConfig("draft_model", 3),
    "coupled": lambda rank: SpecConfig("draft_model", 3, rejection_sample_method="coupled"),
    "unsure": lambda rank: SpecConfig("draft_model", 4, confidence_threshold=0.3),
    "cascade": lambda rank: SpecConfig("cascade"),
    "tree": lambda rank: SpecConfig("tree", 3),
    "cape": lambda rank: SpecConfig("draft_model", 3, cape=True),
    "ngram": lambda rank: SpecConfig("ngram"),
    "copies": lambda rank: SpecConfig("draft_model", 3, suffix_tokens=6),
    "early_exit": lambda rank: SpecConfig("early_exit", 3, exit_layer=1),
    "unsure exit": lambda rank: SpecConfig(
        "early_exit", 4, exit_layer=1, confidence_threshold=0.02
    ),
    "cape exit": lambda rank: SpecConfig("early_exit", 3, exit_layer=1, cape=True),
    "exit or copies": lambda rank: SpecConfig("early_exit", 3, exit_layer=1, suffix_tokens=6),
    "moody exit": lambda rank: SpecConfig("early_exit", 3, exit_layer=1, schedule=Moody(rank + 2)),
    "moody": lambda rank: SpecConfig("draft_model", 3, schedule=Moody(rank + 2)),
    "adaptive copies": lambda rank: copies("adaptive"),
    "heuristic copies": lambda rank: copies("heuristic"),
    "moody copies": lambda rank: copies(Moody(rank + 2)),
    "adaptive exit or copies": lambda rank: copies("adaptive", "early_exit", exit_layer=1),
    "moody exit or copies": lambda rank: copies(Moody(rank + 2), "early_exit", exit_layer=1),
}


class Failing(NoDrafter):
    """Proposes ones; on one rank the third proposal fails."""

    name = "failing"

    def __init__(self, fails):
        self._fails, self._count = fails, 0

    def propose(self, batch):
        self._count += 1
        if self._fails and self._count == 3:
            raise ArithmeticError("the third")
        shape = len(batch.requests), batch.num_speculative_tokens
        return Proposal(torch.ones(shape, dtype=torch.int32))


class Narrow(Failing):
    """Proposes its token twice, in `width` columns."""

    def __init__(self, width, token_id):
        self._width, self._token_id = width, token_id

    def propose(self, batch):
        token_ids = torch.full((len(batch.requests), self._width), -1, dtype=torch.int32)
        token_ids[:, :2] = self._token_id
        return Proposal(token_ids)


@pytest.mark.parametrize(("widths", "token_ids"), [((2, 4), (1, 1)), ((2, 2), (1, 2))])
def test_proposals_have_the_columns_of_rank_0(both, widths, token_ids):
    def run(here):
        drafter = Narrow(widths[here.rank], token_ids[here.rank])
        spec = SpecConfig(num_speculative_tokens=4)
        engine = Engine(here.target, drafter, spec=spec, config=CONFIG)
        return [texts(engine, temperature) for temperature in (0.0, 0.9)]

    first, second = both(run)
    assert first == second
    assert isinstance(first, list), first


@pytest.mark.parametrize("name", SPECS)
def test_all_ranks_write_what_rank_0_decides(both, name):
    def run(here):
        spec = SPECS[name](here.rank)
        engine = Engine(here.target, _draft(spec, here.draft), spec=spec, config=CONFIG)
        return [texts(engine, temperature) for temperature in (0.0, 0.9)]

    results = both(run)
    target, draft = both.models
    HERE.target = None
    spec = SPECS[name](0)
    alone = Engine(target, _draft(spec, draft), spec=spec, config=CONFIG)
    expected = [texts(alone, temperature) for temperature in (0.0, 0.9)]
    assert results == [expected, expected]


@pytest.mark.parametrize("options", [{}, {"method": "early_exit", "exit_layer": 1}])
def test_schedules_hear_of_the_same_steps(both, options):
    """Those of rank 0, also where it copied, which a schedule is not told of."""

    def run(here):
        spec = copies(Moody(3), **options)
        engine = Engine(here.target, _draft(spec, here.draft), spec=spec, config=CONFIG)
        for temperature in (0.0, 0.9):
            texts(engine, temperature)
        return spec.schedule.steps

    first, second = both(run)
    assert first == second
    assert any(step.accepted for step in first)


def test_page_tables_are_the_same(both):
    def run(here):
        engine = Engine(here.target, here.draft, spec=SpecConfig("tree", 3), config=CONFIG)
        for prompt, each in zip(PROMPTS, params(0.9), strict=True):
            engine.add_request(prompt, each)
        tables = []
        while engine.has_unfinished:
            engine.step()
            tables.append([(r.request_id, [*r.block_table]) for r in running(engine)])
        return tables

    first, second = both(run)
    assert first == second
    assert len(first) > 5


def test_what_fails_on_one_rank_costs_all_of_them_its_drafts(both):
    def run(here):
        engine = Engine(here.target, Failing(here.rank == 1), config=CONFIG)
        kind = ArithmeticError if here.rank else RuntimeError
        with pytest.raises(kind) as raised:
            texts(engine, 0.0)
        return [output.token_ids for output in raised.value.outputs]

    first, second = both(run)
    HERE.target = None
    assert first == second == texts(Engine(both.models[0], config=CONFIG), 0.0)


class Spoilt(Failing):
    """Gives logits beside its proposals, on one rank NaN with the third."""

    def propose(self, batch):
        self._count += 1
        shape = len(batch.requests), batch.num_speculative_tokens
        value = float("nan") if self._fails and self._count == 3 else 0.0
        logits = torch.full((*shape, VOCAB_SIZE), value)
        return Proposal(torch.ones(shape, dtype=torch.int32), draft_logits=logits)


@pytest.mark.parametrize("spoilt_rank", [0, 1])
def test_draft_logits_that_are_spoilt_on_rank_0_count_on_all(both, spoilt_rank):
    def run(here):
        engine = Engine(here.target, Spoilt(here.rank == spoilt_rank), config=CONFIG)
        requests = zip(PROMPTS, params(0.9), strict=True)
        ids = [engine.add_request(prompt, each) for prompt, each in requests]
        ended, errors = {}, []
        while engine.has_unfinished:
            ended |= {e.request_id: e.output for e in engine.step() if e.output}
            errors += map(str, engine.take_drafter_errors())
        return [ended[name].token_ids for name in ids], errors

    first, second = both(run)
    assert first == second
    assert [len(ids) for ids in first[0]] == [20] * len(PROMPTS)
    assert len(first[1]) == (spoilt_rank == 0)


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_rules_that_fail_on_one_rank_are_those_of_rank_0(both, failing_rank):
    def run(here):
        def rule(ids, logits):
            if ids.shape[1] == 6 and here.rank == failing_rank:
                raise ArithmeticError("six")
            return logits

        given = SamplingParams(temperature=0, max_tokens=9, logits_processors=[rule])
        engine = Engine(here.target, here.draft, config=CONFIG)
        (output,) = engine.generate([PROMPTS[1]], given)
        return output.token_ids, output.finish_reason

    first, second = both(run)
    assert first == second
    assert first[1] == ("length" if failing_rank else "error")


def test_requests_of_one_rank_alone_are_refused_on_all(both):
    def run(here):
        engine = Engine(here.target, config=CONFIG)
        engine.add_request(PROMPTS[0], params(0.0)[0])
        engine.step()
        if here.rank:
            engine.add_request(PROMPTS[1], params(0.0)[1], "own")
        with pytest.raises(RuntimeError, match=r"'waiting' differs: rank 0 has \[\].*'own'"):
            engine.step()
        engine.abort("own")  # nothing has been run, so nothing is lost
        while engine.has_unfinished:
            engine.step()
        return engine.stats.num_output_tokens

    assert both(run) == [20, 20]


@pytest.mark.parametrize(
    ("part", "values"),
    [
        ("spec", [{"spec": "ngram"}, {"spec": "mag"}]),
        ("config", [{}, {"config": {"prefill_chunk_size": 7}}]),
    ],
)
def test_engines_of_unlike_options_are_refused(both, part, values):
    errors = both(lambda here: Engine(here.target, **values[here.rank]))
    assert all(f"{part!r} differs: rank 0 has" in str(error) for error in errors)


def test_other_tokens_of_a_prompt_are_seen(both):
    errors = both(lambda here: Engine(here.target).generate([[1, 2, 3 + here.rank]]))
    assert all("'waiting' differs" in str(error) for error in errors)


def test_other_calls_are_seen(both):
    def run(here):
        engine = Engine(here.target, here.draft, config=CONFIG)
        if here.rank:
            engine.enable_spec_dec(n_spec_tokens=2)
        else:
            engine.generate(PROMPTS, params(0.0))

    errors = both(run)
    assert all("'call' differs: rank 0 has 'step'" in str(error) for error in errors)


def test_a_rank_that_fails_in_a_pass_ends_the_others(both):
    def fail():
        raise MemoryError("too little")

    def run(here):
        engine = Engine(here.target, config=CONFIG)
        if here.rank:
            before_passes(engine, fail)
        with pytest.raises(MemoryError if here.rank else RuntimeError) as first:
            engine.generate(PROMPTS, params(0.0))
        if here.rank:
            HERE.ranks.leave()
        with pytest.raises(RuntimeError, match=f"rank {here.rank} of 2 cannot continue") as later:
            engine.generate(PROMPTS, params(0.0))
        return str(first.value), str(later.value)

    (first, later), (_, own) = both(run)
    assert first == later
    assert "another rank has ended" in first
    assert "MemoryError: too little" in own


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_a_schedule_that_fails_before_common_drafts_costs_all_ranks_theirs(both, failing_rank):
    class Sometimes(Moody):
        def num_draft_tokens(self, request):
            if self._most and len(request.token_ids) > 12:
                raise ArithmeticError("long")
            return 3

    def run(here):
        schedule = Sometimes(here.rank == failing_rank)
        spec = SpecConfig("early_exit", 3, exit_layer=1, schedule=schedule)
        engine = Engine(here.target, spec=spec, config=CONFIG)
        with pytest.raises(ArithmeticError if schedule._most else RuntimeError) as raised:
            texts(engine, 0.0)
        return [output.token_ids for output in raised.value.outputs]

    first, second = both(run)
    HERE.target = None
    assert first == second == texts(Engine(both.models[0], config=CONFIG), 0.0)


def test_what_fails_between_common_drafts_ends_all_ranks(both):
    def run(here):
        spec = SpecConfig("early_exit", 3, exit_layer=1)
        engine = Engine(here.target, spec=spec, config=CONFIG)
        runner = draft_model_of(engine).runner
        forward = runner.forward

        def failing(*args, **kwargs):
            if here.rank:
                raise ArithmeticError("no more")
            return HERE.ranks.all_reduce_min_(forward(*args, **kwargs))  # as a split pass waits

        runner.forward = failing
        with pytest.raises(ArithmeticError if here.rank else RuntimeError) as raised:
            texts(engine, 0.0)
        if here.rank:
            HERE.ranks.leave()
        with pytest.raises(RuntimeError, match=f"rank {here.rank} of 2 cannot continue"):
            texts(engine, 0.0)
        return str(raised.value)

    first, second = both(run)
    assert "another rank has ended" in first
    assert second == "no more"


def test_a_corpus_of_one_rank_alone_is_refused(both):
    def run(here):
        engine = Engine(here.target, spec="suffix", config=CONFIG)
        calls = [lambda: texts(engine, 0.0), lambda: engine.add_corpus([[1, 2, 3]])]
        calls[here.rank]()

    errors = both(run)
    assert all("'call' differs: rank 0 has 'step'" in str(error) for error in errors)


def test_what_glide_reads_of_all_heads_takes_room(both):
    glide, config = random_glide(both.models[0]), {"kv_cache_memory": 2**18}

    def run(here):
        return blocks(Engine(here.target, glide, spec="glide", config=config)).num_blocks

    first, second = both(run)
    HERE.target = None
    alone = Engine(both.models[0], glide, spec="glide", config=config)
    assert first == second < blocks(alone).num_blocks


def test_seeds_that_nobody_gives_are_the_same(both):
    def run(here):
        engine = Engine(here.target, config=CONFIG)
        given = SamplingParams(max_tokens=20, ignore_eos=True)
        return [engine.generate(PROMPTS[1], given)[0].token_ids for _ in range(2)]

    first, second = both(run)
    assert first == second
    assert first[0] != first[1]


def _draft(spec, draft):
    needs_draft = spec.method in ("draft_model", "cascade", "tree")
    return draft if needs_draft else None
