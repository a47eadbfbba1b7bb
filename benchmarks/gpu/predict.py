"""Predicts times of ops on an H100 and an H200 from what the compiler made of their kernels.

`python -m benchmarks.gpu.predict` prints the table of docs/kernels.md. `python -m
tests.gpu.resources` compiles the kernels and writes that page and resources.json anew.
"""

import re
from collections.abc import Callable
from pathlib import Path

from benchmarks import cases as timed
from benchmarks.gpu.resource_model import MACHINES, Case, Launch, Machine, Model, Phase, load
from benchmarks.tables import table_head, table_row

VOCAB, ITEM = 128256, 2  # bfloat16 logits
ROW = VOCAB * ITEM
NUM_DRAFT, NUM_NODES, DEPTH = 4, 16, 4
HEADS, KV_HEADS, HEAD_SIZE, LAYERS = 32, 8, 128, 32
SLOT = KV_HEADS * HEAD_SIZE * ITEM  # bytes of a token's keys in one layer
UNIT = 8  # logits that a lane takes at a time, csrc/cuda/device.cuh


def plan_of(rows: int, machine: Machine) -> tuple[int, int]:
    """Blocks and threads of a cluster by choose_plan of csrc/cuda/plan.h, for rows that fit."""
    cluster = 1
    while cluster < 8 and rows * cluster < machine.multiprocessors:
        cluster *= 2
    if rows * cluster <= machine.multiprocessors:
        return cluster, 512
    while 2 * (ROW // cluster + TEAM_SHARED + 1024) > 228 << 10:
        cluster *= 2
    return cluster, 256


def shape_of(op: str, batch: int, **changes) -> dict:
    """As benchmarks/cases.py names it."""
    return timed.Case(op, VOCAB, batch, "zipf", "bfloat16", **changes).shape


TEAM_SHARED = 17 << 10
AHEAD = 4  # units of a lane that the first pass over a row has on their way


def found(cluster: int, threads: int) -> Phase:
    """One warp looks for the token in its stretch, on average half of it, 32 units at a time."""
    rounds = VOCAB / UNIT / (cluster * threads) / 2
    return Phase(rounds * 512, 512, cached=True)


def verify_tree(batch: int, machine: Machine) -> Case:
    """Siblings without replacement; of DEPTH + 1 nodes on the way, the last turns two children
    down."""
    nodes, (cluster, threads) = DEPTH + 1, plan_of(batch, machine)
    share = VOCAB / cluster
    first = Phase(ROW / cluster, AHEAD * 16 * threads, share, (("first", AHEAD * UNIT),))
    total = Phase(elements=share, regions=(("sum", UNIT),))
    flight = load()["kernels"]["verify_tree"]["regions"]["residual"]["loads"] // 2 * 16 * threads
    residual = Phase(ITEM * share, flight, share, (("residual", UNIT),), cached=True)
    phases = (*(first, total) * (2 * nodes), *(residual,) * 3, found(cluster, threads))
    launch = Launch(
        "verify_tree",
        batch * cluster,
        threads,
        phases,
        TEAM_SHARED + ROW // cluster,
        memory_accesses=nodes,
        cache_accesses=5 * nodes,
        barriers=4 * nodes + 6,
    )
    rule = "without_replacement"
    shape = shape_of("verify_tree", batch, num_nodes=NUM_NODES, rule=rule)
    return Case("verify_tree", batch, shape, batch * 2 * nodes * ROW, (launch,))


def small(
    op: str, batch: int, blocks: int, threads: int, moved: float, shape: dict, **waits
) -> Case:
    """A kernel that reads and writes little."""
    launch = Launch(op, blocks, threads, (Phase(moved / blocks),), **waits)
    return Case(op, batch, shape, moved, (launch,))


def penalize(batch: int, machine: Machine) -> Case:
    """Histories of 1024 tokens: a binary search each in the (empty) list of biases."""
    rows, known = batch * (NUM_DRAFT + 1), 1024
    moved = rows * known * (2 * ITEM + 8)
    shape = {"B": batch, "K": NUM_DRAFT, "history": known}
    rounds = known / 128
    return small(
        "penalize", batch, rows, 128, moved, shape, memory_accesses=3 + rounds, cache_accesses=2
    )


def build_tree(batch: int, machine: Machine) -> Case:
    blocks = -(-batch * NUM_NODES // 128)
    moved = batch * NUM_NODES * 16
    waits = {"memory_accesses": 1, "cache_accesses": 2 * DEPTH}
    return small(
        "build_tree",
        batch,
        blocks,
        128,
        moved,
        shape_of("build_tree", batch, num_nodes=NUM_NODES),
        **waits,
    )


def uniform(batch: int, machine: Machine) -> Case:
    blocks = -(-batch * 2 // 256)
    shape = shape_of("uniform", batch)
    return small("uniform", batch, blocks, 256, batch * 40, shape, memory_accesses=1)


def store_kv(batch: int, machine: Machine) -> Case:
    tokens = batch * (NUM_DRAFT + 1)
    moved = tokens * (4 * SLOT + 2 * HEAD_SIZE * 4)
    threads = 192  # 128 units of values, 64 pairs of keys
    shape = {"B": batch, "tokens": NUM_DRAFT + 1, "rotated": HEAD_SIZE}
    return small("store_kv", batch, tokens, threads, moved, shape, memory_accesses=1)


def compact_kv(batch: int, machine: Machine) -> Case:
    blocks = batch * LAYERS * 2
    moved = blocks * DEPTH * SLOT * 2
    shape = {"B": batch, "moves": DEPTH, "layers": LAYERS}
    return small("compact_kv", batch, blocks, 128, moved, shape, memory_accesses=3)


def match_suffix(batch: int, machine: Machine) -> Case:
    """Texts of 4096 tokens, ten of which match; one program goes over a text."""
    width, matched, tile = 4096, 10, 2048
    waits = {"memory_accesses": width / tile, "cache_accesses": 2 * matched * width / tile + 2}
    threads = 32 * load()["kernels"]["match_suffix"]["warps"]
    shape = {"B": batch, "tokens": width}
    return small("match_suffix", batch, batch, threads, batch * width * 4, shape, **waits)


def attention(op: str, batch: int, machine: Machine, tokens: int, context: int) -> Case:
    """As kernels/fastspec_kernels/triton/attention.py cuts it up; the context is as long as the
    block table."""
    group, run = HEADS // KV_HEADS, 1024
    few = tokens * group <= 32
    block_m, chunk = (32, 256) if few else (64, 512)
    wanted, least = 256 // KV_HEADS, batch * tokens * group // 64 + batch
    is_split = context > (8192 if least > wanted else 256)
    step = -(-batch * -(-tokens * group // 64) * (-(-context // 256)) // wanted) * 256
    unit = chunk if step < run else run
    parts = -(-context // (-(-step // unit) * unit)) if is_split else 1
    partials = -(-context // unit) if parts > 1 else 0
    kind, of = op.removesuffix("_attention"), "b1" if is_split else "b64"
    name = f"{kind} q{5 if few else 16} d128 {of} bf16"
    own = load()["kernels"][name]
    keys = context / parts
    read = keys * 2 * HEAD_SIZE * ITEM
    written = block_m * HEAD_SIZE * ITEM
    if parts > 1:
        written = block_m * HEAD_SIZE * 4 * partials / parts
    threads = 32 * own["warps"]
    step = 2 * own["block_n"] * HEAD_SIZE * ITEM
    phase = Phase(
        read + written,
        own["in_flight"] // 2 * step,
        keys,
        (("loop", own["block_n"] / threads),),
        2 * block_m * keys * HEAD_SIZE,
    )
    busy = batch * KV_HEADS * parts
    # A program reads all lengths twice before it knows what is its own.
    launches = [Launch(name, busy, threads, (phase,), 0, 2, 3 if is_split else 1)]
    if batch > 1 and not (few and kind == "tree"):  # one that leaves the sequences to the other
        idle = batch + (wanted if is_split else 0)
        idle += batch * tokens * group // 64 if few else 0
        launches.append(Launch(name, idle * KV_HEADS, threads, (), 0, 1))
    if is_split:
        rows = batch * tokens * HEADS
        # A warp for each head. Factors wait for peaks, and partials for factors; then 12 partials
        # are on their way while 4 are merged.
        merged = Phase(HEAD_SIZE * 4 * partials, 12 * HEAD_SIZE * 4, cached=True)
        launches.append(Launch("merge d128", rows, 32, (merged,), 0, 0, 5))
    floor = batch * (context * 2 * SLOT + tokens * HEADS * HEAD_SIZE * ITEM * 2)
    shape = {"B": batch, "tokens": tokens, "context": context}
    return Case(op, batch, shape, floor, tuple(launches))


OPS: tuple[Callable[[int, Machine], Case], ...] = (
    penalize,
    verify_tree,
    build_tree,
    uniform,
    match_suffix,
    store_kv,
    compact_kv,
)


def cases(machine: Machine) -> list[Case]:
    """Every op that is modelled, for one sequence and for 64."""
    batches = (1, 64)
    found = [op(batch, machine) for op in OPS for batch in batches]
    for batch in batches:
        for tokens in (5, 16):
            for context in (8192, 32768, 131072):
                found.append(attention("tree_attention", batch, machine, tokens, context))
    found += [attention("cross_attention", batch, machine, 5, 8192) for batch in batches]
    return found


def predicted(record: dict) -> float | None:
    """The time of a recorded case, where there is a prediction of it for its GPU."""
    for machine in MACHINES:
        if machine.name not in record.get("device", ""):
            continue
        for case in cases(machine):
            same = (case.op, case.backend, case.shape)
            if same == (record["op"], record["backend"], record["shape"]) and (
                record["dtype"] == "bfloat16" or "V" not in case.shape
            ):
                return Model(machine).time(case)
    return None


PAGE = Path(__file__).resolve().parents[2] / "docs" / "kernels.md"
TABLES = re.compile(r"(<!-- predicted: .*?-->\n)(.*?)(<!-- end of predicted -->)", re.DOTALL)


ASSUMPTIONS = """\
1. Memory has the bandwidth of a copy: {bandwidths}; the L2 has
   {l2:.1f} TB/s.
2. A memory access takes {memory} µs, an L2 access {cache} µs. Accesses that wait for each other (an
   index, then what it points to) are counted in the source and added up.
3. A kernel in a CUDA graph costs {launch} µs on top of its work, a cluster barrier {barrier} µs.
4. There are {processors} multiprocessors at {clock} MHz. In one cycle, each issues {lanes}
   single-thread instructions and {converters} exponentials, logarithms or conversions, and takes in
   {port} bytes; it multiplies at half of the peak of its tensor cores. The number of instructions
   per logit or key is counted in the machine code, along the path through the loop that does the
   work.
5. Registers, shared memory and threads decide how many blocks share a multiprocessor. Each block
   has in flight what its code loads before it waits. A phase takes the longest of three times: its
   bytes at the bandwidth, its instructions on the busiest multiprocessor, and its loads one after
   another for every wave of blocks.
6. The phases of a block, separated by barriers, run one after another. Where a multiprocessor holds
   a single block, no other block can use the time it spends waiting, so its waits count once per
   wave.
7. Inputs are not in the L2. `verify_tree` draws siblings without replacement, accepts four nodes
   and rejects two children of the last. Logits are bfloat16, {vocab} per row. Attention has 32
   heads of size 128 on 8 KV heads, and all sequences have the same length.
"""


def assumptions() -> str:
    machine = MACHINES[0]
    bandwidths = " and ".join(f"{m.bandwidth / 1e6:.1f} TB/s on an {m.name}" for m in MACHINES)
    return ASSUMPTIONS.format(
        bandwidths=bandwidths,
        l2=machine.l2_bandwidth / 1e6,
        memory=machine.memory,
        cache=machine.cache,
        launch=machine.launch,
        barrier=machine.barrier,
        processors=machine.multiprocessors,
        clock=round(machine.clock),
        lanes=machine.lanes,
        converters=machine.converters,
        port=machine.port,
        vocab=VOCAB,
    )


def text_of_page() -> str:
    """The part of docs/kernels.md that is not written by hand."""
    return "\n\n".join((assumptions().rstrip(), resources_table(), times_table())) + "\n"


def updated(page: str) -> str:
    return TABLES.sub(lambda match: match[1] + text_of_page() + match[3], page)


def resources_table() -> str:
    """Of every kernel with what its largest case launches of it; then of those without a model."""
    found = load()
    lines = [
        f"From nvcc {found['nvcc']} and Triton {found['triton']} for {found['architecture']}.",
        "",
        *table_head("kernel", "registers", "spills", "threads", "shared bytes", "blocks per SM"),
    ]
    model = Model(MACHINES[0])
    largest = {part.kernel: part for case in cases(MACHINES[0]) for part in case.launches}
    for name, part in sorted(largest.items()):
        own = found["kernels"][name]
        shared = own["shared"] + part.shared
        cells = (own["registers"], own["spills"], part.threads, shared, model.resident(part))
        lines.append(table_row(f"`{name}`", *map(str, cells)))
    for name, own in sorted(found["others"].items()):
        threads = 32 * own["warps"]
        blocks = MACHINES[0].resident(own["registers"], threads, own["shared"])
        cells = (own["registers"], own["spills"], threads, own["shared"], blocks)
        lines.append(table_row(f"`{name}`", *map(str, cells)))
    return "\n".join(lines)


def times_table() -> str:
    heads = ("op", "B", "shape", "launches", "blocks in flight", "MB moved")
    columns = [f"{m.name} {what}" for m in MACHINES for what in ("floor", "predicted", "/ goal")]
    lines = table_head(*heads, *columns)
    models = [Model(machine) for machine in MACHINES]
    for same in zip(*(cases(machine) for machine in MACHINES), strict=True):
        case, cells = same[0], []
        for model, own in zip(models, same, strict=True):
            floor, time, goal = own.floor(model.machine), model.time(own), own.goal(model.machine)
            cells += [f"{floor:.3g}", f"{time:.3g}", verdict(time, goal)]
        blocks = "+".join(str(models[0].in_flight(part)) for part in case.launches)
        hidden = ("B", "V", "sampling")
        sizes = (f"{name}={value}" for name, value in case.shape.items() if name not in hidden)
        first = (f"`{case.op}`", str(case.batch), ", ".join(sizes), str(len(case.launches)), blocks)
        lines.append(table_row(*first, f"{case.bytes / 1e6:.3g}", *cells))
    return "\n".join(lines)


def verdict(time: float, goal: float | None) -> str:
    """How many times the goal it takes; a miss in bold."""
    if goal is None:
        return "-"
    return f"{time / goal:.2f}" if time <= goal else f"**{time / goal:.2f}**"


if __name__ == "__main__":
    print(text_of_page(), end="")
