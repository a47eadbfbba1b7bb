"""How long a kernel should take on a GPU, from what the compiler made of it: a resource model."""

import json
import math
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

RESOURCES = Path(__file__).with_name("resources.json")
TRITON_ONLY = ("tree_attention", "cross_attention", "match_suffix")
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
    port: int = 64  # bytes per cycle into one multiprocessor
    lanes: int = 128  # instructions of single lanes per cycle and multiprocessor
    converters: int = 16  # of those, exponentials, logarithms and conversions
    products: float = 2048.0  # multiply-adds of tensor cores per cycle, half of the peak of wgmma
    memory: float = 0.65  # latency of an access to memory
    cache: float = 0.3  # of one to the L2
    barrier: float = 0.3  # of a cluster
    launch: float = 1.5  # of a kernel in a graph, which waits for the one in front of it

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


@dataclass(frozen=True)
class Case:
    """A call of an op, the bytes that it must move, and its launches."""

    op: str
    batch: int
    shape: dict  # as records name it
    floor_bytes: float
    launches: tuple[Launch, ...]

    @property
    def backend(self) -> str:
        return "triton" if self.op in TRITON_ONLY else "cuda"

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
        work = sum(self.time_of_phase(part, phase, waves) for phase in part.phases)
        return machine.launch + waits + work

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
