"""Drafts as CUDA graphs: whole chains, and passes that read the target.

On the CPU a stand-in for the capture runs the same function on the same static buffers.
"""

import gc
import weakref
from dataclasses import replace

import pytest
import torch

from fastspec import Engine, EngineConfig, SamplingParams, SpecConfig
from fastspec.drafters import graphed_drafts
from fastspec.drafters.draft_model import DraftModelDrafter
from fastspec.drafters.graphed_drafts import GraphedDrafts
from fastspec.models import graphs
from fastspec.models.blocks import Blocks
from fastspec.models.graphs import RecentGraphs
from fastspec.models.layout import Span
from fastspec.models.reduced_vocabulary import DraftVocabulary

from ..models import VOCAB_SIZE, perturbed, random_model
from .eagle1_models import write_folder as write_eagle1
from .eagle3_models import write_folder as write_eagle3
from .glide_models import random_glide
from .probes import (
    CountingCapture,
    count_preemptions,
    draft_model_of,
    request_of,
    runners_of,
    use_graphs,
)
from .test_graphs import BLOCK_SIZE, NUM_BLOCKS, FailingCapture, runner_of, same_caches
from .waiting import NoWaiting


@pytest.mark.parametrize("num_prompts", [1, 3, 5])
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0},
        {"temperature": 0.7, "top_k": 20},
        {"temperature": 1.0, "top_p": 0.9, "min_p": 0.01},
    ],
    ids=str,
)
@pytest.mark.parametrize("rule", ["standard", "coupled"])
def test_a_draft_is_one_graph(rule, options, num_prompts):
    """The same texts in as many steps as pass by pass; requests end at different times."""
    model = random_model("llama")
    draft = perturbed(model, 0.3)
    prompts = [[5, 6, 7], [*range(8, 40)], [40], [41, 42], [43]][:num_prompts]
    params = [SamplingParams(seed=b, max_tokens=9 + 5 * b, **options) for b in range(num_prompts)]
    spec = SpecConfig("draft_model", num_speculative_tokens=4, rejection_sample_method=rule)

    def run(capture):
        engine = Engine(model, draft, spec=spec, config=EngineConfig(block_size=BLOCK_SIZE))
        if capture is not None:
            use_graphs(draft_model_of(engine).runner, capture)
        results = []
        for _ in range(2):  # what occurs once is no graph
            outputs = engine.generate(prompts, params)
            results.append([(output.token_ids, output.stats.num_steps) for output in outputs])
        return results, draft_model_of(engine)._graphed._chains

    expected, no_chains = run(None)
    results, chains = run(CountingCapture())
    assert results == expected
    assert not no_chains
    assert any(chain is not None for chain in chains.values())


def draft_of(method, target, folder):
    """Return a drafter for the target, and its SpecConfig."""
    drafter, fields = None, {}
    if method == "draft_model":
        drafter = perturbed(target, 0.3)
    elif method == "eagle3":
        write_eagle3(folder, target, num_known=50)
        drafter = folder
    elif method == "eagle":
        write_eagle1(folder, target)
        drafter, method = folder, "eagle3"
    elif method == "glide":
        drafter = random_glide(target, num_layers=2)
    elif method == "early_exit":
        fields = {"exit_layer": 3}
    elif method == "eagle3 copies":
        write_eagle3(folder, target, num_known=50)
        drafter, method, fields = folder, "eagle3", {"suffix_tokens": 2}
    return drafter, SpecConfig(method, num_speculative_tokens=3, **fields)


def write_draft(method, target, folder):
    """Write a draft model for the target, and return its SpecConfig."""
    drafter, spec = draft_of(method, target, folder)
    if drafter is not folder:
        drafter.save_pretrained(folder)
    return spec


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("method", ["eagle3", "eagle3 copies", "eagle", "glide", "early_exit"])
def test_drafts_that_read_their_target_are_one_graph(tmp_path, monkeypatch, method, temperature):
    """The same texts in as many steps as pass by pass, with prompts of all lengths, preemption
    and shared prefixes."""
    target = random_model("llama", num_hidden_layers=6)
    drafter, spec = draft_of(method, target, tmp_path)
    shared = [*range(30, 47)]
    prompts = [[5, 6, 7], shared, [40], [*shared, 8, 9], [41, 42]]
    params = [
        SamplingParams(temperature=temperature, seed=b, max_tokens=12 + 5 * b) for b in range(5)
    ]
    config = EngineConfig(
        block_size=4, num_blocks=18, max_batch_size=4, prefill_chunk_size=8, prefix_caching=True
    )
    write, replayed = GraphedDrafts.write, []

    def counted(*args):
        drafts = write(*args)
        replayed.append(drafts is not None)
        return drafts

    monkeypatch.setattr(GraphedDrafts, "write", counted)

    def run(capture):
        engine = Engine(target, drafter, spec=spec, config=config)
        preemptions = count_preemptions(engine)
        if capture is not None:
            use_graphs(draft_model_of(engine).runner, capture)
        results = []
        for _ in range(2):  # what occurs once is no graph
            replayed.clear()
            outputs = engine.generate(prompts, params)
            results.append([(output.token_ids, output.stats.num_steps) for output in outputs])
        assert preemptions[0]
        return results

    expected = run(None)
    assert not any(replayed)
    assert run(CountingCapture()) == expected
    # The rest are the first tokens of a text, and drafts behind copies the target has not read.
    assert sum(replayed) > (0.1 if "copies" in method else 0.8) * len(replayed)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize(
    ("method", "is_tree"),
    [("eagle3", False), ("eagle3", True), ("eagle", False), ("eagle", True), ("glide", False)],
)
def test_passes_that_read_their_target_with_graphs(
    tmp_path, monkeypatch, method, is_tree, temperature
):
    """One by one, as for trees and drafts that may end early; prompts and trees of all sizes."""
    monkeypatch.setattr(graphs, "RARE_TIMES", 0)  # more sizes have graphs of their own
    monkeypatch.setattr(graphs, "PROMPT_TIMES", 0)
    target = random_model("llama", num_hidden_layers=6)
    drafter, spec = draft_of(method, target, tmp_path)
    fields = {"tree_nodes": 9, "tree_width": 2} if is_tree else {"confidence_threshold": 1e-4}
    spec = replace(spec, **fields)
    prompts = [[5, 6, 7], [*range(30, 47)], [40], [41, 42]]
    params = [
        SamplingParams(temperature=temperature, seed=b, max_tokens=7 + 4 * b) for b in range(4)
    ]

    def run(capture):
        engine = Engine(target, drafter, spec=spec, config=EngineConfig(block_size=4))
        if capture is not None:
            for runner in runners_of(engine):
                use_graphs(runner, capture)
        outputs = engine.generate(prompts, params)
        return [(output.token_ids, output.stats.num_steps) for output in outputs]

    capture = CountingCapture()
    assert run(capture) == run(None)
    assert capture.num_captured >= 3


def test_eagle_drafts_of_which_tokens_are_graphs(tmp_path):
    """Those whose target has read what comes before each token that the first pass reads."""
    target = random_model("llama", num_hidden_layers=6)
    drafter, spec = draft_of("eagle3", target, tmp_path)
    runner = draft_model_of(Engine(target, drafter, spec=spec)).runner
    read = Span([0, 1], 5, 2, target_len=6)
    assert runner.drafting_spans([read]) == [read.part(4, 2)]
    assert runner.drafting_spans([read, read.part(5, 3)]) is None
    assert runner.drafting_spans([Span([0, 1], 0, 2, target_len=1)]) is None


class AllSeen(RecentGraphs):
    """As if every combination of sizes had occurred before."""

    def __contains__(self, key):
        return True


@torch.inference_mode()
@pytest.mark.parametrize("keeps_logits", [False, True])
@pytest.mark.parametrize("rule", ["standard", "coupled"])
def test_drafts_of_different_lengths(rule, keeps_logits):
    """Tokens, logits and pages bit for bit; requests without drafts stay out of it."""
    model = random_model("llama")
    requests = [request_of([*range(5, 5 + n)], str(n)) for n in (3, 9, 1, 4)]
    texts, counts = [request.token_ids for request in requests], [4, 0, 1, 3]
    sampling = {"temperature": torch.tensor([0.0, 1.0, 1.0, 0.7]), "top_k": None}
    sampling |= {"top_p": torch.tensor([1.0, 0.9, 0.8, 0.9]), "min_p": None}
    uniforms = torch.rand(4, 4, generator=torch.Generator().manual_seed(0))
    keys = torch.tensor([[1, 2, 3, 4], [3, 9, 1, 4]]) if rule == "coupled" else None
    written, pages = [], []
    for capture in (None, CountingCapture(), CountingCapture()):
        runner = runner_of(model, capture)
        drafter = DraftModelDrafter(runner, Blocks(NUM_BLOCKS, BLOCK_SIZE), VOCAB_SIZE, True)
        drafter._graphed._chains = chains = AllSeen()
        tables = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(1)).tolist()
        for place, request in enumerate(requests):
            request.block_table[:] = tables[4 * place : 4 * place + 4]
        given = requests, texts, counts, sampling, uniforms, keeps_logits, keys
        token_ids, logits, lengths = drafter.write(*given)
        assert lengths == counts
        assert len(chains) == (capture is not None)
        within = torch.arange(4) < torch.tensor(counts)[:, None]
        assert torch.equal(token_ids < 0, ~within)
        assert (logits is not None) == keeps_logits
        written.append((token_ids, None if logits is None else logits[within]))
        pages.append(runner)
    for (token_ids, logits), runner in zip(written[1:], pages[1:], strict=True):
        assert torch.equal(token_ids, written[0][0])
        assert logits is None or torch.equal(logits, written[0][1])
        assert same_caches(runner, pages[0])


@torch.inference_mode()
@pytest.mark.parametrize("counts", [[3, 1, 2], [4, 0, 4, 3], [3]])
@pytest.mark.parametrize("rule", ["standard", "coupled"])
def test_drafts_take_the_graph_of_somewhat_larger_ones(rule, counts):
    """Tokens, logits and pages bit for bit, where four drafts of five tokens were captured."""
    model = random_model("llama")

    def run(capture):
        runner = runner_of(model, capture)
        drafter = DraftModelDrafter(runner, Blocks(NUM_BLOCKS, BLOCK_SIZE), VOCAB_SIZE, True)
        texts = [[*range(5, 6 + b)] for b in range(4)]
        requests = [request_of(text, str(b)) for b, text in enumerate(texts)]
        written = []
        for place, request in enumerate(requests):
            request.block_table[:] = [*range(4 * place, 4 * place + 4)]
        for each in ([5] * 4, [5] * 4, counts):
            num, generator = len(each), torch.Generator().manual_seed(len(written))
            uniforms = torch.rand(num, max(each), generator=generator)
            sampling = {"temperature": torch.full((num,), 0.8), "top_k": None}
            sampling |= {"top_p": torch.full((num,), 0.9), "min_p": None}
            keys = torch.arange(2 * num).view(2, num) if rule == "coupled" else None
            for request in requests:
                drafter.release(request)
            inputs = requests[:num], texts[:num], each, sampling, uniforms, True, keys
            token_ids, logits, _ = drafter.write(*inputs)
            written.append((token_ids.clone(), logits[token_ids >= 0]))
        return written, runner, drafter._graphed._chains

    expected, pages, _ = run(None)
    written, other_pages, chains = run(CountingCapture())
    captured = [key[1] for key, chain in chains.items() if chain is not None]
    assert captured == [5]  # the last call is the first of its sizes
    for one, other in zip(written, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert same_caches(pages, other_pages)


@torch.inference_mode()
@pytest.mark.parametrize("method", ["draft_model", "eagle3", "eagle", "glide", "early_exit"])
def test_the_graph_of_a_draft_makes_the_host_wait_for_nothing(tmp_path, monkeypatch, method):
    """Nor does it copy anything from the host, as that would be gone when it is replayed."""
    target = random_model("llama", num_hidden_layers=6)
    drafter, spec = draft_of(method, target, tmp_path)
    engine = Engine(target, drafter, spec=spec)
    use_graphs(draft_model_of(engine).runner, CountingCapture())
    params = SamplingParams(temperature=0.7, top_k=9, seed=3, max_tokens=40)
    engine.add_request([*range(5, 25)], params)
    for _ in range(6):
        engine.step()
    chains = [*filter(None, draft_model_of(engine)._graphed._chains.values())]
    assert chains

    def refuse(*args, **options):
        raise AssertionError("a captured pass makes a tensor on the host")

    monkeypatch.setattr(torch, "tensor", refuse)
    for chain in chains:
        with NoWaiting():
            chain.replay()


def test_a_draft_model_that_cannot_be_captured_runs_without():
    model = random_model("llama")
    draft = perturbed(model, 0.3)
    params = SamplingParams(temperature=0, max_tokens=20)
    expected = Engine(model, draft).generate([[5, 6, 7]], params)[0].token_ids
    engine = Engine(model, draft)
    runner = draft_model_of(engine).runner
    use_graphs(runner, FailingCapture())
    runner.graphs.must = False
    assert engine.generate([[5, 6, 7]], params)[0].token_ids == expected
    assert runner.graphs.capture is None
    engine = Engine(model, draft)
    use_graphs(draft_model_of(engine).runner, FailingCapture())
    with pytest.raises(ValueError, match=r"^cuda_graphs: 'on', but LlamaForCausalLM cannot be"):
        engine.generate([[5, 6, 7]], params)


@torch.inference_mode()
def test_few_graphs_of_drafts_are_kept(monkeypatch):
    """The least recently used one goes; large drafts and those with many logits are no graphs."""
    model = random_model("llama")
    runner = runner_of(model, CountingCapture())
    monkeypatch.setattr(graphed_drafts, "MAX_CHAINS", 3)
    monkeypatch.setattr(graphed_drafts, "RARE_TIMES", 2)
    drafts = GraphedDrafts(runner, DraftVocabulary(VOCAB_SIZE), VOCAB_SIZE)
    sampling = {"temperature": None, "top_k": None, "top_p": None, "min_p": None}

    def write(num_steps, batch=1, keeps_logits=False, token_id=0):
        spans = [Span([b], 0, 1) for b in range(batch)]
        numbers = {"uniforms": torch.rand(batch, 9)}
        ids, counts = torch.full((batch,), token_id), [num_steps] * batch
        return drafts.write(ids, spans, counts, sampling, numbers, None, keeps_logits)

    assert [write(n) is not None for n in (1, 2, 3, 1, 4)] == [False] * 3 + [True, False]
    assert [key[1] for key in drafts._chains] == [1]
    assert write(1)[0].shape == (1, 1)
    assert write(3)[0].shape == (1, 3)
    assert write(2)[0].shape == (1, 2)  # by the graph of three steps
    assert [key[1] for key in drafts._chains] == [1, 3]
    assert write(2)[0].shape == (1, 2)  # no longer rare
    assert [key[1] for key in drafts._chains] == [1, 3, 2]
    assert write(4)[0].shape == (1, 4)
    assert [key[1] for key in drafts._chains] == [3, 2, 4]
    assert write(1)[0].shape == (1, 1)  # went, and is rare again
    assert [key[1] for key in drafts._chains] == [3, 4, 2]
    monkeypatch.setattr(graphed_drafts, "MAX_REQUESTS", 2)
    for _ in range(2):
        assert write(1, batch=3) is None
    assert len(drafts._chains) == 3
    monkeypatch.setattr(graphed_drafts, "MAX_LOGIT_BYTES", 3 * 4 * VOCAB_SIZE)
    for _ in range(2):
        assert write(4, keeps_logits=True) is None
    assert write(3, keeps_logits=True) is None
    logits = write(3, keeps_logits=True)[1]
    assert logits.shape == (1, 3, VOCAB_SIZE)
    before = logits.clone()
    write(3, keeps_logits=True, token_id=7)
    assert torch.equal(logits, before)  # a cascade writes twice before its logits are read


def test_a_drafter_that_goes_takes_its_graphs_along():
    """No cycle keeps pages until the next garbage collection."""
    model = random_model("llama")
    engine = Engine(model, perturbed(model, 0.3))
    use_graphs(draft_model_of(engine).runner, CountingCapture())
    engine.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=30))
    drafts = draft_model_of(engine)._graphed
    assert any(drafts._chains.values())
    pages = weakref.ref(next(iter(drafts.runner.caches.values()))[0])
    captured = [*filter(None, drafts._chains.values()), *drafts.runner.graphs._passes.values()]
    for static in captured:
        static.replay = None  # the stand-in's is a method of the object itself
    gc.disable()
    try:
        del engine, drafts, captured, static
        assert pages() is None
    finally:
        gc.enable()
