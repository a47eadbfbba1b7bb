"""The engine's CUDA graphs on a GPU: the same results as without, and one wait per round."""

import pytest
import torch

from fastspec import Engine, EngineConfig, SamplingParams, SpecConfig
from fastspec.models import graphs
from fastspec.models.layout import Span
from fastspec.models.paged_model import PagedModel
from fastspec.models.runner import ModelRunner
from tests.engine.test_graphed_drafts import draft_of
from tests.gpu.backends import needs_gpu
from tests.models import VOCAB_SIZE, perturbed, random_model

pytestmark = [pytest.mark.gpu, needs_gpu]

PASSES = [[(9, 1)], [(9, 1), (3, 1), (20, 1)], [(9, 6), (3, 6)], [(9, 2), (3, 1), (20, 6)]]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=18),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, seed=4, max_tokens=9),
    SamplingParams(seed=5, max_tokens=13),
]
PROMPTS = [[5, 6, 7], [8] * 20, [40, 41]]


@pytest.fixture(autouse=True)
def _own_graphs(monkeypatch):
    """Every size, and prompts, have graphs of their own when they first occur."""
    monkeypatch.setattr(graphs, "RARE_TIMES", 0)
    monkeypatch.setattr(graphs, "PROMPT_TIMES", 0)


def spans_of(shapes):
    free = torch.randperm(40).tolist()
    spans = []
    for start, count in shapes:
        needed = -(-(start + count) // 16)
        spans.append(Span(free[:needed], start, count))
        free = free[needed:]
    return spans


def runner_of(model, cuda_graphs):
    config = EngineConfig(block_size=16, prefill_chunk_size=64, cuda_graphs=cuda_graphs)
    runner = ModelRunner(PagedModel(model, "auto"), 40, config)
    generator = torch.Generator("cuda").manual_seed(5)
    for caches in runner.caches.values():
        for cache in caches:
            cache.normal_(generator=generator)
    return runner


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen3", "gemma2", "gemma3", "gpt2"])
def test_replays_give_what_eager_passes_give(architecture, dtype):
    model = random_model(architecture).to("cuda", dtype)
    eager, graphed = runner_of(model, "off"), runner_of(model, "on")
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    for shapes in PASSES * 3:
        spans = spans_of(shapes)
        ids = torch.randint(VOCAB_SIZE, (sum(span.count for span in spans),), device="cuda")
        expected, logits = eager.forward(ids, spans), graphed.forward(ids, spans)
        torch.testing.assert_close(logits, expected, atol=tolerance, rtol=tolerance)


@torch.inference_mode()
def test_replays_of_trees():
    model = random_model("llama").cuda()
    eager, graphed = runner_of(model, "off"), runner_of(model, "on")
    parents = torch.tensor([[-1, 0, 0, 1, 1], [-1, 0, 1, 2, 2], [-1, 0, 0, 0, -1]]).int().cuda()
    for _ in range(3):
        spans = spans_of([(9, 5), (3, 5), (14, 4)])
        ids = torch.randint(VOCAB_SIZE, (14,), device="cuda")
        expected = eager.forward(ids, spans, parents=parents)
        logits = graphed.forward(ids, spans, parents=parents)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_a_capture_that_fails_leaves_the_stream():
    before, number = torch.cuda.current_stream(), torch.ones(1, device="cuda")
    with pytest.raises(RuntimeError):
        graphs.CudaCapture(number.device)(number.item)  # waits, which it may not in a capture
    assert torch.cuda.current_stream() == before
    assert number.item() == 1


METHODS = ["none", "draft_model", "prompt_lookup", "mag", "tree", "eagle3", "glide"]


@pytest.mark.parametrize("method", METHODS)
def test_a_round_waits_once(monkeypatch, tmp_path, method):
    """To read what was committed; anything else that waits is an error. Graphs exist by then."""
    model = random_model("llama", num_hidden_layers=6).cuda()
    drafter, spec = perturbed(model, 0.3).cuda(), SpecConfig(method, num_speculative_tokens=4)
    if method in ("eagle3", "glide"):
        drafter, spec = draft_of(method, model, tmp_path)
        drafter = drafter.cuda() if method == "glide" else drafter
    elif method not in ("draft_model", "tree"):
        drafter = None
    engine = Engine(model, drafter, spec=spec, config=EngineConfig(cuda_graphs="on"))
    expected = [output.token_ids for output in engine.generate(PROMPTS, PARAMS)]
    read, readings = torch.Tensor.tolist, []

    def tolist(tensor):
        readings.append(tuple(tensor.shape))
        torch.cuda.set_sync_debug_mode("default")
        try:
            return read(tensor)
        finally:
            torch.cuda.set_sync_debug_mode("error")

    for prompt, params in zip(PROMPTS, PARAMS, strict=True):
        engine.add_request(prompt, params)
    monkeypatch.setattr(torch.Tensor, "tolist", tolist)
    token_ids, num_steps = {}, 0
    torch.cuda.set_sync_debug_mode("error")
    try:
        while engine.has_unfinished:
            for event in engine.step():
                if event.output is not None:
                    token_ids[len(event.output.prompt_token_ids)] = event.output.token_ids
            num_steps += 1
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(readings) == num_steps
    assert [token_ids[len(prompt)] for prompt in PROMPTS] == expected
