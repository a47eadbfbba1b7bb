"""What the tests see of the inside of an engine: when that changes, this module alone does."""

import torch

from fastspec import SamplingParams
from fastspec.drafters import draft_model
from fastspec.drafters.base import DRAFT_STREAM, Batch
from fastspec.engine import acceptance, verify
from fastspec.engine.request import EngineRequest

_GREEDY = SamplingParams(temperature=0)

READER = verify  # the module that looks up apply_rules
VERIFIER = acceptance  # the module that looks up verify_chain, verify_tree and VERIFY_STREAM


def target_runner(engine):
    return engine._runner


def drafter_of(engine):
    return engine._speculation.drafter


def noted_drafts(engine):
    """The drafts of an engine from now on, by the text before them."""
    drafts, drafter = {}, drafter_of(engine)
    propose = drafter.propose

    def noted(batch):
        proposal = propose(batch)
        for request, ids in zip(batch.requests, proposal.token_ids.tolist(), strict=True):
            drafts[tuple(request.token_ids)] = [token for token in ids if token >= 0]
        return proposal

    drafter.propose = noted
    return drafts


def draft_model_of(engine):
    """What runs the draft model and keeps its cache, also where it drafts a tree."""
    return draft_model.draft_model_of(drafter_of(engine))


def reviewers_of(engine):
    """The same for each model of a cascade, biggest first."""
    return [level.model for level in drafter_of(engine)._levels if level.can_review]


def runners_of(engine):
    """The passes of the target and of its draft model."""
    return [target_runner(engine), draft_model_of(engine).runner]


def model_of(engine):
    """The module tree that the target's passes run."""
    return target_runner(engine).paged_model.model


def flat_model_of(engine):
    """What runs the target's passes without its modules, if something does."""
    return target_runner(engine).paged_model.flat


def is_flat(paged_model):
    """Whether it runs passes without its modules."""
    return paged_model.flat is not None


def encoders_of(engine):
    return [runner.paged_model.model.encoder for runner in runners_of(engine)]


def num_encoder_blocks(engine):
    """How many blocks of encoded inputs the target and its draft model have in use."""
    caches = [runner.paged_model._encoder_cache for runner in runners_of(engine)]
    return [cache._num_blocks - len(cache._free) for cache in caches]


def fail_in_second_layer(engine, what):
    """Let the target's cache of encoded inputs fail once: as its "pages" grow, or at a
    "projection" onto them."""
    cache, num_calls = target_runner(engine).paged_model._encoder_cache, 0

    def called(function):
        def call(*args):
            nonlocal num_calls
            num_calls += 1
            if num_calls == 2:
                raise MemoryError
            return function(*args)

        return call

    if what == "pages":
        cache._empty = called(cache._empty)
    else:
        for layer in cache._layers:
            layer.k.forward = called(layer.k.forward)


def running(engine):
    return engine._scheduler.running


def waiting(engine):
    return engine._scheduler.waiting


@torch.inference_mode()
def schedule(engine):
    """Admit and read waiting requests, as the next step would."""
    engine._loop._schedule()


def take_error(engine):
    """What a drafter raised and nobody has been told yet."""
    error, engine._speculation.error = engine._speculation.error, None
    return error


# What a drafter, a schedule and the block manager are given


def request_of(token_ids, request_id="r", params=_GREEDY, max_len=1000, **fields):
    """A request that no engine runs."""
    of_run = {"seed": 0, "stop_ids": frozenset(), **fields}
    return EngineRequest(request_id, [*token_ids], params=params, max_len=max_len, **of_run)


def batch_of(*requests, wanted=4, num=None):
    """A step of these requests, each of which wants that many draft tokens."""
    most = [wanted] * len(requests)
    return Batch(list(requests), most, most, num or wanted, torch.device("cpu"))


# Blocks


def blocks(engine):
    return engine._scheduler.block_manager


def num_users(engine, block_ids):
    return [blocks(engine)._num_users[block_id] for block_id in block_ids]


def idle_blocks(engine):
    """In no table, but kept for who begins with the same tokens."""
    return set(blocks(engine)._idle)


def findable_blocks(engine):
    return set(blocks(engine)._index._content_of)


def assert_blocks_came_back(engine):
    """No block is in a table or lost, and none is kept that nobody could find."""
    manager = blocks(engine)
    assert manager.num_free == manager.num_blocks
    assert manager._num_users == [0] * manager.num_blocks
    assert sorted([*manager._free, *manager._idle]) == list(range(manager.num_blocks))
    assert idle_blocks(engine) == findable_blocks(engine)


# What a draft model and a store of n-grams remember


def cached_tokens(draft_model, request):
    """Of a request's text, how many the draft model's cache holds."""
    return draft_model._num_cached[request.request_id]


def remembers_nobody(draft_model):
    return draft_model._num_cached == {}


def filled_blocks(engine):
    """Blocks that hold what the draft model has read, for as long as their tenant stays."""
    manager = blocks(engine)
    filled = draft_model_of(engine)._filled
    return [block_id for block_id, when in filled.items() if when == manager.tenancy(block_id)]


def is_free_store(ngram_drafter):
    """Whether every row of the store may be given to the next request."""
    return len(ngram_drafter._rows) == len(ngram_drafter._num_learnt) == 0


# Calls


def before_passes(engine, call):
    """Call something before each forward pass of the target."""
    runner = target_runner(engine)
    forward = runner.forward

    def called(*args, **kwargs):
        call()
        return forward(*args, **kwargs)

    runner.forward = called


def record_passes(engine):
    """Spans and logits of each forward pass of the target from now on."""
    runner, passes = target_runner(engine), []
    forward = runner.forward

    def recorded(input_ids, spans, *args, **kwargs):
        logits = forward(input_ids, spans, *args, **kwargs)
        passes.append((spans, logits))
        return logits

    runner.forward = recorded
    return passes


def record_prefills(runner):
    """How many tokens each prefill from now on reads."""
    prefill, counts = runner.prefill, []

    def recorded(token_ids, spans):
        counts.append(sum(map(len, token_ids)))
        prefill(token_ids, spans)

    runner.prefill = recorded
    return counts


def record_reads(runner):
    """How many tokens each pass from now on reads without the logits after them."""
    forward, counts = runner.forward, []

    def recorded(input_ids, spans, rows=None, *args, **kwargs):
        counts.append(0 if rows is None else len(input_ids) - len(rows))
        return forward(input_ids, spans, rows, *args, **kwargs)

    runner.forward = recorded
    return counts


def record_releases(engine):
    """Ids of the requests that the drafter lets go from now on: ended, aborted or preempted."""
    drafter, request_ids = drafter_of(engine), []
    release = drafter.release

    def recorded(request):
        request_ids.append(request.request_id)
        release(request)

    drafter.release = recorded
    return request_ids


class CountingCapture:
    """A replay runs the function again; as on a GPU, it writes over what the last one returned."""

    def __init__(self):
        self.num_captured = 0

    def __call__(self, run):
        self.num_captured += 1
        first = run()

        def replay():
            outs = run()
            if isinstance(first, torch.Tensor):
                return first.copy_(outs)
            return tuple(x if x is None else x.copy_(y) for x, y in zip(first, outs, strict=True))

        return replay


def use_graphs(runner, capture):
    """Run passes as with CUDA graphs, captured by `capture`."""
    runner.capture_with(capture, must=True)


# Engines that are not exact


def share_numbers(monkeypatch):
    """Acceptance is decided by the numbers that the drafts were drawn with."""
    monkeypatch.setattr(VERIFIER, "VERIFY_STREAM", DRAFT_STREAM)


def flatten_draft_logits(monkeypatch):
    """Acceptance takes the drafts for drawn from a flatter distribution than they were."""

    def flattened(exact):
        def verify(*args, draft_logits, **kwargs):
            wrong = None if draft_logits is None else draft_logits / 3
            return exact(*args, draft_logits=wrong, **kwargs)

        return verify

    for name in ("verify_chain", "verify_tree"):
        monkeypatch.setattr(VERIFIER, name, flattened(getattr(VERIFIER, name)))


# Caches


def block_size_of(runner):
    return next(iter(runner.caches.values()))[0].shape[1]


def cached(runner, request, count):
    """Keys and values of the first `count` tokens of a request, one pair for each layer."""
    size = block_size_of(runner)
    slots = torch.tensor([request.block_table[t // size] * size + t % size for t in range(count)])
    return [
        tuple(cache.flatten(0, 1)[slots] for cache in pair)
        for _, pair in sorted(runner.caches.items())
    ]


def assert_cached(runner, request, count, model):
    """The pages hold what a fresh prefill of the first `count` tokens gives."""
    out = model(torch.tensor([request.token_ids[:count]]), use_cache=True)
    layers = out.past_key_values.layers
    for pair, layer in zip(cached(runner, request, count), layers, strict=True):
        for states, expected in zip(pair, (layer.keys, layer.values), strict=True):
            torch.testing.assert_close(states, expected[0].transpose(0, 1), atol=2e-5, rtol=1e-4)


@torch.no_grad()
def assert_caches(engine, model, drafter, behind=1):
    """Between steps both caches are those of a fresh prefill of the committed tokens.

    behind: by how many tokens the draft model may be late, None = by all but one.
    """
    target, draft = target_runner(engine), draft_model_of(engine)
    for request in running(engine):
        count = len(request.token_ids) - 1
        assert request.num_cached == count
        assert_cached(target, request, count, model)
        draft_count = cached_tokens(draft, request)
        assert (1 if behind is None else count - behind) <= draft_count <= count
        assert_cached(draft.runner, request, draft_count, drafter)


def num_sequences_with_states(engine):
    """Texts that the target's recurrent layers keep states of."""
    return len(target_runner(engine).paged_model.recurrent._kept)


def count_preemptions(engine):
    """A list of one number that counts them from now on."""
    scheduler, count = engine._scheduler, [0]
    preempt = scheduler._preempt

    def counted(request):
        count[0] += 1
        return preempt(request)

    scheduler._preempt = counted
    return count


def is_turn_of_caller(engine):
    """Whether this thread holds the engine, so that no other takes a step of it."""
    return engine._turn.is_mine
