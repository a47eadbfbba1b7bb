"""CUDA graphs replayed with other inputs, two streams at once, offsets beyond 32 bits."""

import pytest
import torch

import fastspec_kernels as ops
from benchmarks.gpu import small_shapes
from fastspec.models.transfer import StaticIntegers
from tests.gpu.backends import each_backend, needs_gpu, require

pytestmark = [pytest.mark.gpu, needs_gpu]
VOCAB = 8193
OPS = ["verify_chain", "verify_tree"]


def changed(tensors: tuple) -> tuple:
    """The same problem with its sequences' logits and uniform numbers turned around."""
    target, *rest, uniform = tensors
    return (target.flip(0), *rest, uniform.flip(0))


@each_backend
@pytest.mark.parametrize("op", OPS)
def test_graph_replays_with_changed_inputs(op, backend):
    require(backend, op)
    run, args, kwargs = small_shapes.call_of(op, VOCAB, torch.float32, backend)
    others = changed(args)
    expected = [run(values, kwargs) for values in (args, others)]
    static = tuple(value.clone() for value in args)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(static, kwargs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run(static, kwargs)
    for _ in range(2):  # a counter that a replay leaves behind would show in the second round
        for values, wanted in zip((args, others), expected, strict=True):
            for place, value in zip(static, values, strict=True):
                place.copy_(value)
            for output in outputs:
                output.fill_(7)
            graph.replay()
            for output, want in zip(outputs, wanted, strict=True):
                assert torch.equal(output, want)


def test_static_integers_are_replaced_in_order():
    """While the GPU is busy, later values do not overwrite those that it has yet to copy."""
    given, seen = StaticIntegers(1000, 500, torch.device("cuda")), []
    for number in range(6):
        torch.cuda._sleep(10**7)
        given.replace([number] * 1000, [-number] * 500)
        seen.append((given.wide.clone(), given.narrow.clone()))
    for number, (wide, narrow) in enumerate(seen):
        assert (wide == number).all()
        assert (narrow == -number).all()


@each_backend
@pytest.mark.parametrize("op", OPS)
def test_two_streams_at_once(op, backend):
    require(backend, op)
    run, args, kwargs = small_shapes.call_of(op, VOCAB, torch.float32, backend)
    problems = (args, changed(args))
    expected = [run(values, kwargs) for values in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    results = []
    for _ in range(20):
        for values, stream in zip(problems, streams, strict=True):
            with torch.cuda.stream(stream):
                results.append(run(values, kwargs))
    torch.cuda.synchronize()
    for i, result in enumerate(results):
        for part, want in zip(result, expected[i % 2], strict=True):
            assert torch.equal(part, want)


@each_backend
@pytest.mark.parametrize("op", ["row_stats", "sample", *OPS])
def test_offsets_beyond_32_bits(op, backend):
    """Two rows further apart than 2**31 elements."""
    require(backend, op)
    stride = 2**31 + 64
    needed = (stride + VOCAB) * 2
    if torch.cuda.mem_get_info()[0] < needed + (1 << 30):
        pytest.skip(f"needs {needed >> 30} GiB of free GPU memory")
    buffer = torch.empty(stride + VOCAB, dtype=torch.bfloat16, device="cuda")
    rows = buffer.as_strided((2, VOCAB), (stride, 1))
    rows.copy_(torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(0)))
    near = rows.clone()
    uniform = torch.tensor([[0.0, 0.5, 0.5]], device="cuda")  # the first row accepts its token
    cu_rows = torch.tensor([0, 2], dtype=torch.int32, device="cuda")
    tokens = torch.tensor([[0, 3]], dtype=torch.int32, device="cuda")
    parents = torch.tensor([[-1, 0]], dtype=torch.int32, device="cuda")
    arguments, options = {
        "row_stats": ((), {}),
        "sample": ((uniform[0, :2],), {}),
        "verify_chain": ((cu_rows, tokens[:, 1:], uniform[:, :2]), {}),
        "verify_tree": ((cu_rows, tokens, parents, uniform), {"sibling_rule": "target_only"}),
    }[op]
    results = [
        getattr(ops, op)(logits, *arguments, **options, backend=backend) for logits in (rows, near)
    ]
    for far, expected in zip(*results, strict=True):
        assert torch.equal(far, expected)
