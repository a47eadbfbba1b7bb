"""CUDA graphs: which sizes a pass is padded to, and that padding changes nothing. On the CPU a
stand-in for the capture runs the same function on the same static buffers."""

import logging
from math import nan

import pytest
import torch

from fastspec import Engine, EngineConfig, SamplingParams
from fastspec.models import graphs
from fastspec.models.graphs import bucket, capture_for, is_near
from fastspec.models.layout import PassShape, Span, lay_out
from fastspec.models.paged_model import PagedModel
from fastspec.models.runner import ModelRunner
from fastspec.models.transfer import StaticIntegers

from ..models import VOCAB_SIZE, random_model
from .probes import CountingCapture, runners_of, use_graphs
from .waiting import NoWaiting

BLOCK_SIZE = 4
NUM_BLOCKS = 60
CONFIG = EngineConfig(block_size=BLOCK_SIZE, prefill_chunk_size=64)


class FailingCapture:
    """As a model does that waits for the device."""

    def __call__(self, run):
        raise RuntimeError("operation not permitted when stream is capturing\nmore lines")


def spans_of(shapes):
    """A span for each (start, count), over blocks of its own."""
    free = torch.randperm(NUM_BLOCKS).tolist()
    spans = []
    for start, count in shapes:
        needed = -(-(start + count) // BLOCK_SIZE)
        spans.append(Span(free[:needed], start, count))
        free = free[needed:]
    return spans


def ids_for(spans):
    return torch.randint(VOCAB_SIZE, (sum(span.count for span in spans),))


def runner_of(model, capture=None, must=False):
    """A runner whose cache holds numbers everywhere, the same for every runner."""
    runner = ModelRunner(PagedModel(model, "auto"), NUM_BLOCKS, CONFIG)
    generator = torch.Generator().manual_seed(5)
    for caches in runner.caches.values():
        for cache in caches:
            cache.normal_(generator=generator)
    if capture is not None:
        runner.capture_with(capture, must)
    return runner


def same_caches(one, other):
    return all(
        torch.equal(a, b)
        for layer in one.caches
        for a, b in zip(one.caches[layer], other.caches[layer], strict=True)
    )


@pytest.mark.parametrize("num_nodes", [0, 7])
@pytest.mark.parametrize("batch", [1, 3, 32])
def test_bucket(batch, num_nodes):
    """Large enough, little more than asked for, with room for all that is added."""
    for num_tokens in range(batch, 513):
        asked = PassShape(batch, num_tokens, batch if num_tokens % 2 else 0, 5)
        shape = bucket(asked, BLOCK_SIZE, num_nodes)
        most = 1.5 if num_tokens <= 128 else 1.25
        assert asked.num_tokens <= shape.num_tokens <= most * num_tokens
        added = shape.num_tokens - num_tokens
        most_tokens = min(num_nodes or shape.num_tokens, shape.width * BLOCK_SIZE)
        assert added <= (shape.batch - batch) * most_tokens
        assert shape.num_rows >= asked.num_rows
        assert (shape.num_rows == 0) == (asked.num_rows == 0)
        assert shape.width == 64
        assert bucket(shape, BLOCK_SIZE, num_nodes) == shape  # padded sizes stay


def test_few_buckets():
    """The decode and verify passes of 1 to 32 sequences with 5 proposals need few graphs."""
    shapes = {
        bucket(PassShape(batch, batch * count, rows, 10), 16, 0)
        for batch in range(1, 33)
        for count, rows in ((1, 0), (6, 0), (2, batch))
    }
    assert len(shapes) <= 3 * 14


@pytest.mark.parametrize("num_tokens", [0, 513])
def test_passes_that_are_not_captured(num_tokens):
    assert bucket(PassShape(1, num_tokens, 0, 5), BLOCK_SIZE, 0) is None


def test_padded_layout():
    spans, rows = [Span([3, 8], 5, 2), Span([1], 0, 1, first_read_len=4)], [1, 2]
    assert PassShape.of(spans, rows, BLOCK_SIZE) == (2, 3, 2, 2)
    wide, narrow = lay_out(spans, rows, BLOCK_SIZE)
    assert wide == [5, 6, 0, 33, 34, 4, 1, 2]
    assert narrow == [7, 1, 0, 2, 3, 0, 4, 3, 8, 1, -1]
    shape = PassShape(4, 6, 4, 3)
    wide, narrow = lay_out(spans, rows, BLOCK_SIZE, shape, 2)
    assert wide == [5, 6, 0, 0, 0, 0, 33, 34, 4, -1, -1, -1, 1, 2, 0, 0]
    tables = [3, 8, -1, 1, -1, -1, 0, 0, 0, 0, 0, 0]
    assert narrow == [7, 1, 2, 1, 0, 2, 3, 5, 6, 0, 4, 0, 0, *tables]
    assert len(wide) == shape.wide_size
    assert len(narrow) == shape.narrow_size
    assert rows == [1, 2]
    with pytest.raises(ValueError, match=r"^padded: 1 of 3"):
        lay_out(spans, rows, BLOCK_SIZE, shape, 1)


PASSES = [  # (start, count) of each sequence, kept rows
    ([(9, 1)], None),
    ([(9, 1), (3, 1), (20, 1)], None),
    ([(9, 1), (3, 1), (20, 1)], [0, 1, 2]),
    ([(9, 6), (3, 6), (20, 6)], None),
    ([(9, 2), (3, 1), (20, 6)], None),
    ([(9, 2), (3, 1), (20, 2)], [1, 2, 4]),
    ([(0, 4), (11, 5)], [3]),
]


@torch.inference_mode()
@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma2", "gpt_oss", "gpt2"])
def test_padding_changes_nothing(architecture):
    """Logits and caches bit for bit, whatever ran before in the same buffers."""
    model = random_model(architecture)
    capture = CountingCapture()
    plain, graphed = runner_of(model), runner_of(model, capture)
    for shapes, rows in PASSES * 2:
        spans = spans_of(shapes)
        ids = ids_for(spans)
        expected = plain.forward(ids, spans, rows)
        logits = graphed.forward(ids, spans, rows)
        torch.testing.assert_close(logits, expected, atol=2e-6, rtol=2e-5)
        assert logits.shape == expected.shape
        if architecture == "llama":  # all of whose rows are independent on the CPU
            assert torch.equal(logits, expected)
            assert same_caches(plain, graphed)
    assert 0 < capture.num_captured <= len(PASSES)


@torch.inference_mode()
@pytest.mark.parametrize(
    ("shapes", "rows", "num_captured"),
    [
        ([(9, 4), (3, 4), (20, 4)], None, 1),
        ([(9, 2), (3, 4), (20, 2)], None, 1),
        ([(9, 5), (2, 3)], None, 1),
        ([(9, 2), (3, 3), (20, 2), (5, 1)], None, 2),  # no sequence for what is added
        ([(9, 1), (3, 1), (20, 1)], None, 2),  # less than half as many
        ([(9, 5), (3, 5), (20, 5), (2, 3)], None, 2),  # more
        ([(9, 4), (3, 4), (20, 4)], [3], 2),  # others are all wanted
    ],
)
def test_passes_take_the_graph_of_somewhat_larger_ones(monkeypatch, shapes, rows, num_captured):
    """Bit for bit what the pass gives without one."""
    monkeypatch.setattr(graphs, "RARE_TIMES", 0)
    model = random_model("llama")
    capture = CountingCapture()
    plain, graphed = runner_of(model), runner_of(model, capture)
    for sizes, kept in ([(9, 4), (3, 4), (20, 4), (1, 4)], None), (shapes, rows):
        spans = spans_of(sizes)
        ids = ids_for(spans)
        expected = plain.forward(ids, spans, kept)
        assert torch.equal(graphed.forward(ids, spans, kept), expected)
        assert same_caches(plain, graphed)
    assert capture.num_captured == num_captured


@torch.inference_mode()
def test_rare_sizes_take_the_graph_of_larger_ones(monkeypatch):
    """Bit for bit what the pass gives without one, until they are no longer rare."""
    monkeypatch.setattr(graphs, "RARE_TIMES", 2)
    model = random_model("llama")
    capture = CountingCapture()
    plain, graphed = runner_of(model), runner_of(model, capture)
    for count, num_captured in ((5, 1), (1, 1), (2, 1), (1, 1), (1, 2), (5, 2), (1, 2), (17, 3)):
        spans = spans_of([(9, count)])
        ids = ids_for(spans)
        assert torch.equal(graphed.forward(ids, spans), plain.forward(ids, spans))
        assert same_caches(plain, graphed)
        assert capture.num_captured == num_captured, count


@pytest.mark.parametrize(
    ("shape", "larger", "expected"),
    [
        ((4, 9, 0, 64), (4, 16, 0, 64), True),
        ((4, 12, 0, 64), (4, 24, 0, 64), False),  # torch's products, of more than 16 rows
        ((16, 32, 12, 64), (16, 32, 24, 64), False),
        ((32, 70, 0, 64), (32, 128, 0, 64), True),
        ((32, 100, 0, 64), (32, 160, 0, 64), False),  # tokens that take time
        ((32, 256, 100, 64), (32, 256, 160, 64), False),
        ((32, 160, 0, 64), (64, 160, 0, 128), True),
        ((32, 160, 4, 64), (32, 160, 0, 64), False),  # the logits of all
        ((32, 160, 0, 64), (32, 160, 4, 64), False),
    ],
)
def test_near_sizes(shape, larger, expected):
    assert is_near(PassShape(*larger), PassShape(*shape)) == expected


@pytest.mark.parametrize(
    ("shape", "larger", "expected"),
    [
        ((1, 1, 1, 64), (8, 8, 8, 64), True),
        ((1, 1, 1, 64), (16, 16, 16, 64), False),
        ((2, 10, 10, 64), (16, 80, 80, 64), False),  # torch's products
        ((4, 20, 0, 64), (16, 80, 0, 64), True),
        ((4, 20, 0, 64), (16, 160, 0, 64), False),  # tokens that take time
        ((4, 20, 20, 64), (16, 160, 0, 64), False),
        ((64, 130, 0, 64), (64, 160, 0, 64), False),
    ],
)
def test_near_rare_sizes(shape, larger, expected):
    assert is_near(PassShape(*larger), PassShape(*shape), is_rare=True) == expected


@torch.inference_mode()
def test_prompts_are_read_by_graphs_once_their_sizes_are_common(monkeypatch):
    """Bit for bit as without, several at once, and in chunks."""
    monkeypatch.setattr(graphs, "PROMPT_TIMES", 2)
    monkeypatch.setattr(graphs, "RARE_TIMES", 0)
    model = random_model("llama")
    capture = CountingCapture()
    plain, graphed = runner_of(model), runner_of(model, capture)
    texts = [
        ([(0, 60)], 0), ([(0, 61)], 0), ([(0, 63)], 1), ([(9, 64)], 1), ([(0, 30), (4, 17)], 1),
        ([(0, 150)], 1), ([(0, 150)], 1), ([(0, 150)], 2), ([(0, 40)], 2),
    ]  # fmt: skip
    for shapes, num_captured in texts:
        spans = spans_of(shapes)
        ids = [torch.randint(VOCAB_SIZE, (span.count,)).tolist() for span in spans]
        for runner in (plain, graphed):
            runner.prefill(ids, spans)
        assert same_caches(plain, graphed)
        assert capture.num_captured == num_captured, shapes
    # Where the first tokens or drafts are verified at once.
    sizes = [(20, 1, 2), (30, 4, 2), (30, 4, 2), (30, 4, 3), (3, 2, 4)]
    for count, num_rows, num_captured in sizes:
        spans, rows = spans_of([(0, count)]), [*range(count - num_rows, count)]
        ids = torch.randint(VOCAB_SIZE, (count,)).tolist()
        both = [runner.forward(ids, spans, rows, None, count > 3) for runner in (plain, graphed)]
        assert torch.equal(*both)
        assert same_caches(plain, graphed)
        assert capture.num_captured == num_captured, (count, num_rows)


@torch.inference_mode()
def test_a_prompt_that_cannot_be_captured_leaves_other_graphs(monkeypatch):
    """Even where graphs must be used: those are for decoding."""
    monkeypatch.setattr(graphs, "PROMPT_TIMES", 0)
    model = random_model("llama")
    plain, graphed = runner_of(model), runner_of(model, FailingCapture(), must=True)
    spans = spans_of([(0, 20)])
    for _ in range(2):
        for runner in (plain, graphed):
            runner.prefill([[*range(20)]], spans)
        assert same_caches(plain, graphed)
    both = [
        runner.forward([*range(20)], spans, [18, 19], None, True) for runner in (plain, graphed)
    ]
    assert torch.equal(*both)
    graphed.graphs.capture = capture = CountingCapture()
    for _ in range(2):
        graphed.prefill([[*range(20)]], spans)
    assert capture.num_captured == 0
    spans = spans_of([(9, 1)])
    graphed.forward(ids_for(spans), spans)
    assert capture.num_captured == 1


@torch.inference_mode()
def test_few_graphs_of_passes_are_kept(monkeypatch):
    """The least recently used one goes."""
    monkeypatch.setattr(graphs, "MAX_PASSES", 2)
    capture = CountingCapture()
    runner = runner_of(random_model("llama"), capture)
    for count, num_captured in ((1, 1), (4, 2), (1, 2), (16, 3), (1, 3), (4, 4), (16, 5)):
        spans = spans_of([(9, count)])
        runner.forward(ids_for(spans), spans)
        assert capture.num_captured == num_captured, count


class ScaledByAll(torch.nn.Module):
    """A linear layer in 8 bits with one scale for all tokens, as torchao's by default."""

    def __init__(self, linear):
        super().__init__()
        self.linear = linear

    def forward(self, x):
        scale = x.abs().amax() / 448
        return self.linear((x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale)


@torch.inference_mode()
def test_padding_sees_no_uninitialised_memory(monkeypatch):
    model = random_model("llama")
    for layer in model.model.layers:
        layer.mlp.down_proj = ScaledByAll(layer.mlp.down_proj)
    paged_model, empty = PagedModel(model, "auto"), torch.empty
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", lambda *sizes, **options: empty(*sizes, **options).fill_(nan))
        runner = ModelRunner(paged_model, NUM_BLOCKS, CONFIG)
    runner.capture_with(CountingCapture(), must=True)
    spans = [Span([3, 4], 0, 5)]
    assert runner.forward(ids_for(spans), spans).isfinite().all()


@torch.inference_mode()
def test_padding_of_trees_changes_nothing():
    model, capture = random_model("llama"), CountingCapture()
    plain, graphed = runner_of(model), runner_of(model, capture)
    parents = torch.tensor([[-1, 0, 0, 1, 1], [-1, 0, 1, 2, 2], [-1, 0, 0, 0, -1]]).repeat(2, 1)
    for shapes in ([(9, 3), (3, 3), (14, 4), (1, 2), (7, 3)], [(2, 3), (9, 3), (3, 2)]) * 2:
        spans = spans_of(shapes)
        ids, of_each = ids_for(spans), parents[: len(shapes)].int()
        expected = plain.forward(ids, spans, parents=of_each)
        assert torch.equal(graphed.forward(ids, spans, parents=of_each), expected)
        assert same_caches(plain, graphed)
    assert capture.num_captured == 1


@torch.inference_mode()
def test_logits_outlive_the_next_replay():
    runner = runner_of(random_model("llama"), CountingCapture())
    spans = spans_of([(9, 1)])
    first = runner.forward(torch.tensor([5]), spans)
    kept = first.clone()
    runner.forward(torch.tensor([77]), spans)
    assert torch.equal(first, kept)


@torch.inference_mode()
def test_a_model_that_cannot_be_captured_runs_without(caplog):
    model = random_model("llama")
    plain, graphed = runner_of(model), runner_of(model, FailingCapture())
    spans = spans_of([(9, 1)])
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            ids = ids_for(spans)
            assert torch.equal(graphed.forward(ids, spans), plain.forward(ids, spans))
    [record] = caplog.records
    assert "LlamaForCausalLM cannot be captured" in record.message
    assert "\n" not in record.message
    with pytest.raises(ValueError, match=r"^cuda_graphs: 'on', but LlamaForCausalLM"):
        runner_of(model, FailingCapture(), must=True).forward(ids_for(spans), spans)


def test_static_integers_stay_where_they_are():
    """All are replaced, at fixed addresses, by as many of their own widths."""
    given = StaticIntegers(3, 2, torch.device("cpu"))
    wide, narrow = given.wide, given.narrow
    assert wide.tolist() == [0, 0, 0]
    for step in (2**40, -1):
        given.replace([step, 2, 3], [step % 7, -5])
        assert wide.tolist() == [step, 2, 3]
        assert narrow.tolist() == [step % 7, -5]
    assert (wide.dtype, narrow.dtype) == (torch.int64, torch.int32)
    for wrong in ([[1, 2], [3, 4]], [[1, 2, 3], [4, 5, 6]]):
        with pytest.raises(ValueError, match="broadcast"):
            given.replace(*wrong)


class PretendedEvent:
    """Ends when told to; notes the streams that it was recorded on."""

    def __init__(self):
        self.is_over, self.streams = True, []

    def query(self):
        return self.is_over

    def record(self, stream):
        self.streams.append(stream)


def test_static_integers_leave_alone_what_is_being_copied(monkeypatch):
    """The event is of the device's own stream, which need not be the current device's."""
    given = StaticIntegers(3, 1, torch.device("cpu"))
    given._is_copied = event = PretendedEvent()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(torch, "empty_like", lambda x, pin_memory, **options: x.clone())
    used = []
    for event.is_over in (True, True, False, True):
        given.replace([1, 2, 3], [4])
        used.append(given._on_host)
    first, second, third, fourth = used
    assert first is second
    assert third is not second
    assert fourth is third
    assert event.streams == ["stream of cpu"] * 4


def test_static_integers_after_an_interrupt(monkeypatch):
    """A copy that was begun but not recorded keeps its buffer."""
    given = StaticIntegers(1, 1, torch.device("cpu"))
    given._is_copied = event = PretendedEvent()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch, "empty_like", lambda x, pin_memory, **options: x.clone())
    given.replace([1], [2])
    begun = given._on_host
    with monkeypatch.context() as context:
        context.setattr(event, "record", lambda stream: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            given.replace([3], [4])
    given.replace([5], [6])
    assert given._on_host is not begun
    assert begun.tolist() != given._on_host.tolist()
    assert (given.wide.tolist(), given.narrow.tolist()) == ([5], [6])


def test_settings():
    model = random_model("llama")
    with pytest.raises(ValueError, match=r"^cuda_graphs: 'on', but LlamaForCausalLM runs on cpu"):
        Engine(model, config=EngineConfig(cuda_graphs="on"))
    assert capture_for("auto", PagedModel(model, "auto")) is None
    assert capture_for("off", PagedModel(model, "auto")) is None


@torch.inference_mode()
@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen3", "gemma2", "gemma3", "gpt2"])
def test_a_pass_makes_the_host_wait_for_nothing(architecture):
    """What is known without a GPU of whether the models of transformers can be captured."""
    model = random_model(architecture)
    runner = runner_of(model, CountingCapture())
    spans = spans_of([(9, 3), (4, 2)])
    ids = ids_for(spans)
    runner.forward(ids, spans)
    with NoWaiting():
        runner.forward(ids, spans)


def test_the_engine_decodes_the_same_with_graphs():
    model, draft = random_model("llama"), random_model("llama", seed=1, num_hidden_layers=1)
    prompts = [[5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15, 16], [40]]
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=20)
    engine = Engine(model, draft)
    expected = [output.token_ids for output in engine.generate(prompts, params)]
    capture = CountingCapture()
    engine = Engine(model, draft)
    for runner in runners_of(engine):
        use_graphs(runner, capture)
    assert [output.token_ids for output in engine.generate(prompts, params)] == expected
    assert capture.num_captured > 2
