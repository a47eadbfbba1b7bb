"""Times attention, the cache ops and decoder layers, each verified first."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

import fastspec_kernels as ops
from benchmarks import cuda_timing, harness, measuring
from benchmarks.gpu import options, predict
from benchmarks.gpu.bench import Progress
from benchmarks.gpu.resource_model import MACHINES
from benchmarks.gpu.steps import UNFINISHED
from benchmarks.harness import Timing
from benchmarks.inputs import binary_tree, layer_weights
from fastspec_kernels import LayerWeights
from fastspec_kernels.backend import backends_of

OPS = ("tree_attention", "cross_attention", "store_kv", "compact_kv", "decoder_layers")
BLOCK = 16
SLOWEST_CASE = 15.0  # seconds
SETS_BYTES = 1 << 30  # of caches of all input sets together
TOLERANCE = {"atol": 3e-2, "rtol": 3e-2}
TINY = {"context": 64, "layers": 2, "E": 32}  # of a dry run
# Layers of Llama 3.1 8B: a token, a verification, both for many, and one after a long context.
OF_LAYERS = (
    {"B": 1, "tokens": 1, "context": 512},
    {"B": 1, "tokens": 5, "context": 512},
    {"B": 16, "tokens": 1, "context": 512},
    {"B": 16, "tokens": 5, "context": 512},
    {"B": 1, "tokens": 5, "context": 8192},
)
WHOLE = {"layers": 8, "E": 4096}


@dataclass
class Call:
    """A function of the number of an input set, and a check that raises AssertionError."""

    run: Callable[[int], object]
    check: Callable[[], None]


def attention(op: str, shape: dict, backend: str, device: str, num_sets: int) -> Call:
    """Caches whose blocks lie anywhere; sequences of equal length, binary trees."""
    batch, tokens, context = shape["B"], shape["tokens"], shape["context"]
    blocks = context // BLOCK
    size = (num_sets, 2, batch * blocks, BLOCK, predict.KV_HEADS, predict.HEAD_SIZE)
    caches = torch.empty(size, dtype=torch.bfloat16, device=device).normal_()
    table = torch.randperm(batch * blocks, device=device).view(batch, blocks).int()
    query = torch.randn(batch * tokens, predict.HEADS, predict.HEAD_SIZE, device=device).bfloat16()
    lengths = torch.full((batch,), context, dtype=torch.int32, device=device)
    cu_rows = torch.arange(batch + 1, dtype=torch.int32, device=device) * tokens
    extra = {}
    if op == "tree_attention":
        parents = binary_tree(tokens).repeat(batch, 1).to(device)
        extra["ancestor_mask"] = ops.build_tree(parents, backend="reference")[1]

    def run(i: int) -> Tensor:
        paged = (*caches[i], table, lengths, cu_rows)
        return getattr(ops, op)(query, *paged, **extra, backend=backend)

    def check() -> None:
        """The last sequence alone; the reference runs where we do, as a CPU takes minutes."""
        rows = slice((batch - 1) * tokens, None)
        keys, values = caches[0][:, table[-1].long()]
        order = torch.arange(blocks, dtype=torch.int32, device=device)[None]
        own = (query[rows], keys, values, order, lengths[-1:], cu_rows[:2])
        mask = {name: value[-1:] for name, value in extra.items()}
        expected = getattr(ops, op)(*own, **mask, backend="reference")
        torch.testing.assert_close(run(0)[rows], expected, **TOLERANCE)

    return Call(run, check)


def store_kv(op: str, shape: dict, backend: str, device: str, num_sets: int) -> Call:
    """Rotated keys, into slots anywhere in the cache."""
    tokens = shape["B"] * shape["tokens"]
    heads = (predict.KV_HEADS, predict.HEAD_SIZE)
    new = torch.randn(num_sets, 2, tokens, *heads, device=device).bfloat16()
    size = (2, -(-tokens * num_sets // BLOCK), BLOCK, *heads)
    key_cache, value_cache = torch.zeros(size, dtype=torch.bfloat16, device=device)
    slots = torch.randperm(tokens * num_sets, device=device).view(num_sets, tokens)
    cos, sin = torch.rand(2, tokens, shape["rotated"], device=device)

    def run(i: int) -> None:
        ops.store_kv(*new[i], key_cache, value_cache, slots[i], cos=cos, sin=sin, backend=backend)

    def check() -> None:
        expected = torch.zeros(2, *key_cache.shape, dtype=torch.bfloat16)
        factors = {"cos": cos.cpu(), "sin": sin.cpu()}
        ops.store_kv(*new[0].cpu(), *expected, slots[0].cpu(), **factors, backend="reference")
        run(0)
        for part, wanted in zip((key_cache, value_cache), expected, strict=True):
            torch.testing.assert_close(part.cpu(), wanted)

    return Call(run, check)


def compact_kv(op: str, shape: dict, backend: str, device: str, num_sets: int) -> Call:
    """An accepted path of every third node of a tree; each set has its own caches."""
    batch, moves = shape["B"], shape["moves"]
    blocks = 2 * batch
    size = (2, shape["layers"], blocks, BLOCK, predict.KV_HEADS, predict.HEAD_SIZE)
    caches = [torch.randn(size, device=device).bfloat16() for _ in range(num_sets)]
    table = torch.randperm(blocks, device=device).view(batch, 2).int()
    ones = torch.ones(batch, dtype=torch.int32, device=device)
    path = (torch.arange(moves, dtype=torch.int32, device=device) * 3 + 3).repeat(batch, 1)
    indices = (table, 9 * ones, path, moves * ones)

    def run(i: int) -> None:
        ops.compact_kv(*caches[i], *indices, backend=backend)

    def check() -> None:
        expected = caches[0].to("cpu", copy=True)
        on_cpu = (part.cpu() for part in indices)
        ops.compact_kv(*expected, *on_cpu, backend="reference")
        run(0)
        assert torch.equal(caches[0].cpu(), expected), "entries differ"

    return Call(run, check)


def decoder_layers(op: str, shape: dict, backend: str, device: str, num_sets: int) -> Call:
    """Layers of one model, their projections next to each other as the engine loads them.

    All sets are the same: the weights of a pass are many times the L2.
    """
    batch, tokens, size = shape["B"], shape["tokens"], shape["E"]
    sizes = size, size * 7 // 2, predict.HEADS, predict.KV_HEADS, predict.HEAD_SIZE

    def random(*lengths: int) -> Tensor:
        weight = torch.empty(lengths, dtype=torch.bfloat16, device=device).normal_()
        return weight.div_(lengths[-1] ** 0.5)

    layers = []
    for _ in range(shape["layers"]):
        weights = layer_weights(sizes, random)
        for names in (("query", "key", "value"), ("gate", "up")):
            keys = [f"{name}_weight" for name in names]
            parts = [weights[key] for key in keys]
            joined = torch.cat(parts).split([len(part) for part in parts])
            weights |= dict(zip(keys, joined, strict=True))
        layers.append(LayerWeights(**weights))
    blocks = shape["context"] // BLOCK
    shape_of_caches = (2, shape["layers"], batch * blocks, BLOCK, *sizes[3:])
    caches = torch.empty(shape_of_caches, dtype=torch.bfloat16, device=device).normal_()
    table = torch.randperm(batch * blocks, device=device).view(batch, blocks).int()
    places = torch.arange(shape["context"] - tokens, shape["context"], device=device)
    angles = torch.randn(batch * tokens, predict.HEAD_SIZE, device=device)
    pages = {
        "slot_mapping": (table[:, places // BLOCK].long() * BLOCK + places % BLOCK).flatten(),
        "block_table": table,
        "context_lens": torch.full((batch,), shape["context"], dtype=torch.int32, device=device),
        "cu_rows": torch.arange(batch + 1, dtype=torch.int32, device=device) * tokens,
        "cos": angles.cos(),
        "sin": angles.sin(),
    }
    hidden = torch.randn(batch * tokens, size, device=device)

    def results(number: int, name: str) -> Tensor:
        keys, values = (list(part[:number]) for part in caches)
        return ops.decoder_layers(
            hidden, layers[:number], keys, values, **pages, eps=1e-5, backend=name
        )

    def check() -> None:
        torch.testing.assert_close(results(1, backend), results(1, "reference"), **TOLERANCE)

    return Call(lambda i: results(len(layers), backend), check)


def bytes_of_layers(shape: dict) -> float:
    """Of one read of the weights, and of each sequence's keys and values."""
    size, num_keys = shape["E"], shape["B"] * shape["context"]
    rows = 2 * (predict.HEADS + predict.KV_HEADS) * predict.HEAD_SIZE + 3 * (size * 7 // 2)
    return shape["layers"] * (rows * size * predict.ITEM + 2 * num_keys * predict.SLOT)


MAKERS = {"store_kv": store_kv, "compact_kv": compact_kv, "decoder_layers": decoder_layers}


def plan(device: str, memory: int) -> Iterator[tuple[str, dict, float, str]]:
    """Op, shape, bytes of the floor and backend of each case that fits; attention first."""
    found = [(case.op, case.shape, case.floor_bytes) for case in predict.cases(MACHINES[0])]
    shapes = [shape | WHOLE for shape in OF_LAYERS]
    found += [("decoder_layers", shape, bytes_of_layers(shape)) for shape in shapes]
    found = [case for case in found if case[0] in OPS]
    for op, shape, num_bytes in sorted(found, key=lambda case: (OPS.index(case[0]), case[2])):
        if 2 * num_bytes > memory:
            continue
        for backend in backends_of(op, torch.device(device)):
            if backend != "reference":
                yield op, shape, num_bytes, backend


def tiny_plan() -> Iterator[tuple[str, dict, float, str]]:
    """One sequence of each op, small, by the reference where a CPU has no kernel."""
    seen = set()
    for op, shape, num_bytes, backend in plan("cpu", 1 << 40):
        if op not in seen and shape["B"] == 1:
            seen.add(op)
            small = {name: TINY.get(name, value) for name, value in shape.items()}
            yield op, small, num_bytes, backend


def measure(op: str, shape: dict, num_bytes: float, backend: str, device: str) -> dict:
    num_sets = max(1, min(measuring.NUM_SETS, int(SETS_BYTES / num_bytes)))
    if device == "cpu":
        num_sets = 1
    call = MAKERS.get(op, attention)(op, shape, backend, device, num_sets)
    call.check()
    fields = {"op": op, "backend": backend, "shape": shape, "logits": "-", "dtype": "bfloat16"}
    fields["floor_bytes"] = int(num_bytes)
    if device == "cpu":
        timings = harness.time_interleaved({"ours": partial(call.run, 0)}, seconds=0)
        timings["floor"] = timings["ours"]
        return harness.record_of(fields, timings, device)
    timings = cuda_timing.time_cold({"ours": call.run}, num_sets)
    floor = round(num_bytes / cuda_timing.copy_bandwidth() * 1e6, 6)
    timings["floor"] = Timing(floor, floor, floor)
    fields["warm_us"] = cuda_timing.time_warm(call.run).median_us
    return harness.record_of(fields, timings, device)


def main() -> int:
    arguments = options.parser(__doc__).parse_args()
    device = "cpu" if arguments.dry_run else "cuda"
    if arguments.dry_run:
        cases = list(tiny_plan())
    else:
        memory = torch.cuda.get_device_properties(0).total_memory
        cases = list(plan(device, memory // 2))
    progress, failed = Progress(arguments.out / "caches.progress"), []
    named = {
        "-".join([op, *(f"{key}{value}" for key, value in shape.items()), backend]): case
        for case in cases
        for op, shape, _, backend in [case]
    }
    for name in progress.in_turn(named, lambda: options.seconds_left(arguments) >= SLOWEST_CASE):
        op, shape, num_bytes, backend = named[name]
        try:
            record = measure(op, shape, num_bytes, backend, device)
        except AssertionError as error:
            failed.append(name)
            progress.note(name, f"wrong: {error}"[:300])
            print(f"{name}: {error}", flush=True)
            continue
        harness.append("kernels", record, arguments.out)
        progress.note(name, "done")
        print(f"{name}: {record['median_us']} µs", flush=True)
    if len(progress.status) < len(named):
        print(f"{len(progress.status)} of {len(named)} cases", flush=True)
        return UNFINISHED
    print(f"{len(named)} cases, {len(failed)} wrong", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
