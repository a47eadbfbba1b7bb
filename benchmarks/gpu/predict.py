"""Predicts the time of every op on an H100 and an H200 from what the compiler made of its kernels.

`python -m benchmarks.gpu.predict` prints the table of docs/kernels.md. `python -m
tests.gpu.resources` compiles the kernels and writes that page and resources.json anew.
"""

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from benchmarks.report import table_head, table_row

VOCAB, ITEM = 128256, 2  # bfloat16 logits
ROW = VOCAB * ITEM
NUM_DRAFT, NUM_NODES, DEPTH = 4, 16, 4
HEADS, KV_HEADS, HEAD_SIZE, LAYERS = 32, 8, 128, 32
SLOT = KV_HEADS * HEAD_SIZE * ITEM  # bytes of a token's keys in one layer
TILE = 4096  # logits, csrc/cuda/launch.h
UNIT = 8  # logits that a lane takes at a time, csrc/cuda/device.cuh
RESOURCES = Path(__file__).with_name("resources.json")
# Times the floor, plus microseconds. Of attention, for up to 16 tokens per sequence.
GOALS = {
    "verify_chain": (1.3, 4.0),
    "verify_tree": (2.0, 8.0),
    "tree_attention": (1.25, 0.0),
    "cross_attention": (1.25, 0.0),
}


@dataclass(frozen=True)
class Machine:
    """What is assumed of a GPU; microseconds, and units per microsecond."""

    name: str
    bandwidth: float  # bytes, of a copy
    multiprocessors: int = 132
    clock: float = 1755.0  # cycles
    l2_bandwidth: float = 5.5e6
    l2_bytes: int = 40 << 20  # what stays there from one kernel to the next
    port: int = 64  # bytes per cycle into one multiprocessor
    lanes: int = 128  # instructions of single lanes per cycle and multiprocessor
    converters: int = 16  # of those, exponentials, logarithms and conversions
    products: float = 2048.0  # multiply-adds of tensor cores per cycle, half of the peak of wgmma
    memory: float = 0.65  # latency of an access to memory
    cache: float = 0.3  # of one to the L2
    barrier: float = 0.3  # of a cluster
    launch: float = 1.5  # of a kernel in a graph, which waits for the one in front of it
    early_launch: float = 0.7  # where it was launched early

    def resident(self, registers: int, threads: int, shared: int) -> int:
        """Blocks that one multiprocessor holds."""
        warps = -(-threads // 32)
        per_warp = -(-registers * 32 // 256) * 256
        return max(
            1, min(32, 64 // warps, 65536 // (per_warp * warps), (228 << 10) // (shared + 1024))
        )


MACHINES = (Machine("H100", 3.0e6), Machine("H200", 4.3e6))


@dataclass(frozen=True)
class Phase:
    """What a block does between two barriers.

    `regions`: pieces of code, each with how many logits or keys one round of a thread covers; all
    of them go over `elements`.
    """

    bytes: float = 0.0
    in_flight: float = math.inf  # bytes that the block has on their way at once
    elements: float = 0.0
    regions: tuple[tuple[str, float], ...] = ()
    multiply_adds: float = 0.0
    cached: bool = False


@dataclass(frozen=True)
class Launch:
    """One kernel; `accesses` to memory and to the L2 that wait for each other, before phases."""

    kernel: str
    blocks: int
    threads: int
    phases: tuple[Phase, ...] = ()
    shared: int = 0
    memory_accesses: float = 0
    cache_accesses: float = 0
    barriers: int = 0
    early: bool = False


@dataclass(frozen=True)
class Case:
    """A call of an op, the bytes that it must move, and its launches."""

    op: str
    batch: int
    shape: str
    floor_bytes: float
    launches: tuple[Launch, ...]

    @property
    def bytes(self) -> float:
        return sum(part.blocks * phase.bytes for part in self.launches for phase in part.phases)

    def floor(self, machine: Machine) -> float:
        return self.floor_bytes / machine.bandwidth

    def goal(self, machine: Machine) -> float | None:
        if self.op not in GOALS:
            return None
        times, plus = GOALS[self.op]
        return times * self.floor(machine) + plus


@dataclass
class Model:
    """Times of launches on one machine."""

    machine: Machine
    resources: dict[str, dict] = field(default_factory=lambda: load()["kernels"])

    def time(self, case: Case) -> float:
        return sum(map(self.time_of_launch, case.launches))

    def resident(self, part: Launch) -> int:
        own = self.resources[part.kernel]
        shared = part.shared + own["shared"]
        return self.machine.resident(own["registers"], part.threads, shared)

    def in_flight(self, part: Launch) -> int:
        return min(part.blocks, self.resident(part) * self.machine.multiprocessors)

    def time_of_launch(self, part: Launch) -> float:
        machine = self.machine
        waves = math.ceil(part.blocks / self.in_flight(part))
        waits = part.memory_accesses * machine.memory + part.cache_accesses * machine.cache
        waits += part.barriers * machine.barrier
        if self.resident(part) == 1:
            waits *= waves  # no other block works meanwhile
        start = machine.early_launch if part.early else machine.launch
        return start + waits + sum(self.time_of_phase(part, phase, waves) for phase in part.phases)

    def time_of_phase(self, part: Launch, phase: Phase, waves: int) -> float:
        machine, blocks = self.machine, part.blocks
        latency = machine.cache if phase.cached else machine.memory
        bandwidth = machine.l2_bandwidth if phase.cached else machine.bandwidth
        most = math.ceil(blocks / machine.multiprocessors)  # blocks of the busiest multiprocessor
        regions = self.resources[part.kernel].get("regions", {})
        issued, converted = (
            sum(regions[name][kind] / covered for name, covered in phase.regions)
            for kind in ("instructions", "conversions")
        )
        work = most * phase.elements / machine.clock
        steady = max(
            blocks * phase.bytes / bandwidth,
            most * phase.bytes / (machine.port * machine.clock),
            work * issued / machine.lanes,
            work * converted / machine.converters,
            most * phase.multiply_adds / (machine.products * machine.clock),
        )
        fill = latency if phase.bytes else 0.0
        return max(steady + fill, waves * math.ceil(phase.bytes / phase.in_flight) * latency)


@cache
def load() -> dict:
    return json.loads(RESOURCES.read_text(encoding="utf-8"))


def cluster_of(rows: int, machine: Machine) -> int:
    """choose_plan of csrc/cuda/plan.h, for rows that fit."""
    cluster = 1
    while cluster < 8 and rows * cluster < machine.multiprocessors:
        cluster *= 2
    return cluster


TEAM_SHARED = 17 << 10
AHEAD = 4  # units of a lane that the first pass over a row has on their way


def row_launch(kernel: str, rows: int, machine: Machine, *more: Phase, barriers: int) -> Launch:
    """A cluster per row: a pass from memory into shared memory, the sum there, and `more`."""
    cluster, threads = cluster_of(rows, machine), 512
    share = VOCAB / cluster
    first = Phase(ROW / cluster, AHEAD * 16 * threads, share, (("first", AHEAD * UNIT),))
    total = Phase(elements=share, regions=(("sum", UNIT),))
    shared = TEAM_SHARED + ROW // cluster
    phases = (first, total, *more)
    return Launch(kernel, rows * cluster, threads, phases, shared, 1, 0, barriers)


def row_stats(batch: int, machine: Machine) -> Case:
    launch = row_launch("row_stats", batch, machine, barriers=3)
    return Case("row_stats", batch, "", batch * ROW, (launch,))


def logits_to_probs(batch: int, machine: Machine) -> Case:
    share = VOCAB / cluster_of(batch, machine)
    write = Phase(4 * share, elements=share, regions=(("write", UNIT),))
    launch = row_launch("logits_to_probs", batch, machine, write, barriers=3)
    return Case("logits_to_probs", batch, "", batch * (ROW + 4 * VOCAB), (launch,))


def sample(batch: int, machine: Machine) -> Case:
    cluster = cluster_of(batch, machine)
    again = Phase(elements=VOCAB / cluster, regions=(("sum", UNIT),))
    launch = row_launch("sample", batch, machine, again, found(cluster, 512), barriers=5)
    return Case("sample", batch, "", batch * ROW, (launch,))


def found(cluster: int, threads: int) -> Phase:
    """One warp looks for the token in its stretch, on average half of it, 32 units at a time."""
    rounds = VOCAB / UNIT / (cluster * threads) / 2
    return Phase(rounds * 512, 512, cached=True)


def sample_coupled(batch: int, machine: Machine) -> Case:
    share = VOCAB / cluster_of(batch, machine)
    race = Phase(ITEM * share, elements=share, regions=(("race", 4),), cached=True)
    launch = row_launch("sample_coupled", batch, machine, race, barriers=4)
    return Case("sample_coupled", batch, "", batch * ROW, (launch,))


def verify_chain(batch: int, machine: Machine, given: bool = False) -> Case:
    """Every sequence is rejected somewhere, which costs most; `given`: with draft_logsumexp."""
    rows = batch * (NUM_DRAFT + 1 + (0 if given else NUM_DRAFT))
    threads, cluster = 64, cluster_of(batch, machine)
    tile = Phase(
        TILE * ITEM,
        TILE * ITEM,
        TILE,
        (("best", TILE / threads), ("sum", TILE / threads)),
    )
    tiles = Launch("chain_tiles", rows * -(-VOCAB // TILE), threads, (tile,), 32, 2)
    threads, cached = 256, rows * ROW <= machine.l2_bytes
    share = VOCAB / cluster
    flight = load()["kernels"]["verify_chain"]["regions"]["residual"]["loads"] // 2 * 16 * threads
    residual = Phase(2 * ITEM * share, flight, share, (("residual", UNIT),), cached=cached)
    phases = (residual, found(cluster, threads))
    if given:  # the draft row's own statistics: two passes, the second from the L2
        passes = [
            Phase(ITEM * share, flight, share, (("residual", UNIT),), cached=cached)
            for cached in (False, True)
        ]
        phases = (*passes, *phases)
    decision = Launch(
        "verify_chain",
        batch * cluster,
        threads,
        phases,
        TEAM_SHARED,
        memory_accesses=0 if cached else 2,
        cache_accesses=9 if cached else 7,
        barriers=7 if given else 4,
        early=True,
    )
    floor = batch * (NUM_DRAFT + 2 if given else 2 * NUM_DRAFT + 1) * ROW
    shape = f"K={NUM_DRAFT}" + (", draft_logsumexp" if given else "")
    return Case("verify_chain", batch, shape, floor, (tiles, decision))


def verify_tree(batch: int, machine: Machine) -> Case:
    """Siblings without replacement; of DEPTH + 1 nodes on the way, the last turns two children
    down."""
    nodes, cluster = DEPTH + 1, cluster_of(batch, machine)
    share, threads = VOCAB / cluster, 512
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
    return Case("verify_tree", batch, f"N={NUM_NODES}", batch * 2 * nodes * ROW, (launch,))


def small(
    op: str, batch: int, blocks: int, threads: int, moved: float, shape: str, **waits
) -> Case:
    """A kernel that reads and writes little."""
    launch = Launch(op, blocks, threads, (Phase(moved / blocks),), **waits)
    return Case(op, batch, shape, moved, (launch,))


def penalize(batch: int, machine: Machine) -> Case:
    """Histories of 1024 tokens: a binary search each in the (empty) list of biases."""
    rows, known = batch * (NUM_DRAFT + 1), 1024
    moved = rows * known * (2 * ITEM + 8)
    shape = f"K={NUM_DRAFT}, {known} known"
    rounds = known / 128
    return small(
        "penalize", batch, rows, 128, moved, shape, memory_accesses=3 + rounds, cache_accesses=2
    )


def build_tree(batch: int, machine: Machine) -> Case:
    blocks = -(-batch * NUM_NODES // 128)
    moved = batch * NUM_NODES * 16
    waits = {"memory_accesses": 1, "cache_accesses": 2 * DEPTH}
    return small("build_tree", batch, blocks, 128, moved, f"N={NUM_NODES}", **waits)


def uniform(batch: int, machine: Machine) -> Case:
    blocks = -(-batch * 2 // 256)
    return small("uniform", batch, blocks, 256, batch * 40, "6 numbers", memory_accesses=1)


def store_kv(batch: int, machine: Machine) -> Case:
    tokens = batch * (NUM_DRAFT + 1)
    moved = tokens * (4 * SLOT + 2 * HEAD_SIZE * 4)
    threads = 192  # 128 units of values, 64 pairs of keys
    shape = f"{NUM_DRAFT + 1} tokens, rotated"
    return small("store_kv", batch, tokens, threads, moved, shape, memory_accesses=1)


def compact_kv(batch: int, machine: Machine) -> Case:
    blocks = batch * LAYERS * 2
    moved = blocks * DEPTH * SLOT * 2
    shape = f"{DEPTH} moves, {LAYERS} layers"
    return small("compact_kv", batch, blocks, 128, moved, shape, memory_accesses=3)


def match_suffix(batch: int, machine: Machine) -> Case:
    """Texts of 4096 tokens, ten of which match; one program goes over a text."""
    width, matched, tile = 4096, 10, 2048
    waits = {"memory_accesses": width / tile, "cache_accesses": 2 * matched * width / tile + 2}
    threads = 32 * load()["kernels"]["match_suffix"]["warps"]
    shape = f"{width} tokens"
    return small("match_suffix", batch, batch, threads, batch * width * 4, shape, **waits)


def attention(op: str, batch: int, machine: Machine, tokens: int, context: int) -> Case:
    """As kernels/fastspec_kernels/triton/attention.py cuts it up; the context is as long as the
    block table."""
    group, chunk, run, wanted = HEADS // KV_HEADS, 512, 2048, 512
    few = tokens * group <= 32
    block_m = 32 if few else 64
    programs = (batch * tokens * group // 64 + batch) * KV_HEADS
    splits = max(1, min(context // chunk, wanted // programs))
    kind, of = op.removesuffix("_attention"), "b1" if splits > 1 else "b64"
    name = f"{kind} q{5 if few else 16} d128 {of} bf16"
    own = load()["kernels"][name]
    tiles = batch * -(-tokens * group // block_m)
    if not few:
        tiles = batch + batch * tokens * group // block_m  # one of two has nothing to do
    keys = context / splits
    read = keys * 2 * HEAD_SIZE * ITEM
    partials = -(-context // chunk) if context <= splits * chunk else -(-context // run)
    written = block_m * HEAD_SIZE * (4 * partials / splits if splits > 1 else ITEM)
    threads = 32 * own["warps"]
    step = 2 * own["block_n"] * HEAD_SIZE * ITEM
    phase = Phase(
        read + written,
        own["in_flight"] // 2 * step,
        keys,
        (("loop", own["block_n"] / threads),),
        2 * block_m * keys * HEAD_SIZE,
    )
    busy = batch * KV_HEADS * splits
    launches = [Launch(name, busy, threads, (phase,), 0, 2, 1)]
    if not few and batch > 1:  # one that leaves the sequences to the other
        launches.append(Launch(name, tiles * KV_HEADS, threads, (), 0, 1))
    if splits > 1:
        rows = batch * tokens * HEADS
        merged = Phase(
            8 * HEAD_SIZE * 4 * partials, 4 * 8 * HEAD_SIZE * 4, cached=True
        )  # four partials of eight heads at once
        launches.append(Launch("merge d128", rows // 8, 128, (merged,), 0, 0, 3))
    floor = batch * (context * 2 * SLOT + tokens * HEADS * HEAD_SIZE * ITEM * 2)
    shape = f"{tokens} tokens, context {context // 1024}k"
    return Case(op, batch, shape, floor, tuple(launches))


OPS: tuple[Callable[[int, Machine], Case], ...] = (
    row_stats,
    logits_to_probs,
    sample,
    sample_coupled,
    penalize,
    verify_chain,
    verify_tree,
    build_tree,
    uniform,
    match_suffix,
    store_kv,
    compact_kv,
)


def cases(machine: Machine) -> list[Case]:
    """Every op for one sequence and for 64."""
    batches = (1, 64)
    found = []
    for op in OPS:
        found += [op(batch, machine) for batch in batches]
        if op is verify_chain:
            found += [verify_chain(batch, machine, given=True) for batch in batches]
    for batch in batches:
        for tokens in (5, 16):
            for context in (8192, 32768, 131072):
                found.append(attention("tree_attention", batch, machine, tokens, context))
    found += [attention("cross_attention", batch, machine, 5, 8192) for batch in batches]
    return found


PAGE = Path(__file__).resolve().parents[2] / "docs" / "kernels.md"
TABLES = re.compile(r"(<!-- predicted: .*?-->\n)(.*?)(<!-- end of predicted -->)", re.DOTALL)


ASSUMPTIONS = """\
1. Memory moves {bandwidths}, as a copy does; the L2
   {l2:.1f} TB/s, and keeps {kept} MiB from one kernel to the next.
2. An access to memory takes {memory} µs, one to the L2 {cache} µs; those that wait for each other
   (an index, then what it points to) are counted in the source and added up.
3. A kernel in a CUDA graph costs {launch} µs on top of its work, one that is launched early
   {early} µs. A barrier of a cluster costs {barrier} µs.
4. A multiprocessor, of which there are {processors} at {clock} MHz, issues {lanes} instructions of
   single threads per cycle, and {converters} exponentials, logarithms or conversions; takes in
   {port} bytes; and multiplies at half of the peak of its tensor cores. How many instructions a
   logit or a key costs is counted in the machine code, on the way through the loop that does the
   work.
5. How many blocks share a multiprocessor follows from registers, shared memory and threads. Each
   has on its way what its code loads before it waits; a phase takes the longest of its bytes at the
   bandwidth, its instructions on the busiest multiprocessor, and its loads one after the other, for
   every wave of blocks.
6. Phases of a block, between barriers, come one after the other. Where a multiprocessor holds one
   block, its waits are nobody's gain: they count once for every wave.
7. Inputs are not in the L2. Every sequence of `verify_chain` is rejected somewhere; `verify_tree`
   draws siblings without replacement, accepts four nodes and turns two down at the last. Logits are
   bfloat16, {vocab} to a row; attention has 32 heads on 8 of 128 numbers, every sequence the same
   length.
"""


def assumptions() -> str:
    machine = MACHINES[0]
    bandwidths = " and ".join(f"{m.bandwidth / 1e6:.1f} TB/s on an {m.name}" for m in MACHINES)
    return ASSUMPTIONS.format(
        bandwidths=bandwidths,
        l2=machine.l2_bandwidth / 1e6,
        kept=machine.l2_bytes >> 20,
        memory=machine.memory,
        cache=machine.cache,
        launch=machine.launch,
        early=machine.early_launch,
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
    """Of every kernel with what its largest case launches of it."""
    found = load()
    lines = [
        f"Of nvcc {found['nvcc']} and Triton {found['triton']} for {found['architecture']}.",
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
        first = (f"`{case.op}`", str(case.batch), case.shape, str(len(case.launches)), blocks)
        lines.append(table_row(*first, f"{case.bytes / 1e6:.3g}", *cells))
    return "\n".join(lines)


def verdict(time: float, goal: float | None) -> str:
    """How many times the goal it takes; a miss in bold."""
    if goal is None:
        return "-"
    return f"{time / goal:.2f}" if time <= goal else f"**{time / goal:.2f}**"


if __name__ == "__main__":
    print(text_of_page(), end="")
