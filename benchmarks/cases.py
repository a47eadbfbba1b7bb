"""Which sizes the sampling benchmarks run, the most telling first."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

# The first value of each axis is its base; values further back are measured later.
VOCABS = (128256, 32000, 151936, 262144)
BATCHES = {"cpu": (1, 8, 64, 256), "cuda": (64, 1, 8, 256)}
NUM_DRAFT = (4, 8)
NUM_NODES = (16, 64)
LOGITS = ("zipf", "peaked", "flat")
DTYPES = {"cpu": ("float32", "bfloat16"), "cuda": ("bfloat16", "float32")}
SAMPLING = {
    "unfiltered": {},
    "filtered": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    "top_p": {"top_p": 0.9},
}
CHAIN_RULES = ("standard", "draft_logsumexp", "block", "point_mass", "greedy")
TREE_RULES = ("target_only", "without_replacement", "with_replacement", "greedy")
OPS = (
    "verify_chain",
    "verify_tree",
    "sample",
    "sample_coupled",
    "row_stats",
    "logits_to_probs",
    "build_tree",
    "uniform",
)
ROW_OPS = ("sample", "sample_coupled", "row_stats", "logits_to_probs")
OPS_WITHOUT_LOGITS = ("build_tree", "uniform")
NUM_UNIFORMS = 6  # per sequence: K = 4 to accept, one to draw, one to spare
ITEM_SIZE = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Case:
    """One op at one size; `rank` counts how far its axes are from their bases."""

    op: str
    vocab: int
    batch: int
    logits: str
    dtype: str
    sampling: str = "unfiltered"
    num_draft: int = 0
    num_nodes: int = 0
    rule: str = ""
    rank: int = 0

    @property
    def shape(self) -> dict:
        """The sizes as records name them."""
        if self.op == "build_tree":
            return {"B": self.batch, "N": self.num_nodes}
        if self.op == "uniform":
            return {"B": self.batch, "num": NUM_UNIFORMS}
        rows = {"R": self.batch} if self.op in ROW_OPS else {"B": self.batch}
        draft = {"K": self.num_draft} if self.num_draft else {}
        nodes = {"N": self.num_nodes} if self.num_nodes else {}
        rule = {} if self.rule in ("", "standard") else {"rule": self.rule}
        return {**rows, **draft, **nodes, "V": self.vocab, "sampling": self.sampling, **rule}

    @property
    def name(self) -> str:
        sizes = "-".join(f"{name}{value}" for name, value in self.shape.items())
        return f"{self.op}-{sizes}-{self.logits}-{self.dtype}"

    @property
    def num_rows(self) -> int:
        """Target rows."""
        if self.num_nodes:
            return self.batch * self.num_nodes
        return self.batch * (self.num_draft + 1)

    @property
    def num_draft_rows(self) -> int:
        if self.rule in ("target_only", "point_mass", "greedy"):
            return 0
        return self.batch * (self.num_nodes or self.num_draft)

    @property
    def input_bytes(self) -> int:
        """Size of all logits of the case."""
        rows = self.num_rows + self.num_draft_rows
        return rows * self.vocab * ITEM_SIZE.get(self.dtype, 0)


def cases(op: str, device_type: str) -> list[Case]:
    """All sizes of one op on one type of device, by rank."""
    return sorted(_cases(op, device_type), key=lambda case: case.rank)


def _cases(op: str, device_type: str) -> Iterator[Case]:
    axes: dict[str, tuple] = {"batch": BATCHES[device_type]}
    if op in OPS_WITHOUT_LOGITS:
        dtype = {"build_tree": "int32", "uniform": "float32"}[op]
        axes |= {"vocab": (0,), "logits": ("none",), "dtype": (dtype,)}
    else:
        axes |= {"vocab": VOCABS, "logits": LOGITS, "dtype": DTYPES[device_type]}
        axes["sampling"] = tuple(SAMPLING)[: 3 if op in ROW_OPS else 2]
    if op == "verify_chain":
        axes |= {"num_draft": NUM_DRAFT, "rule": CHAIN_RULES}
    if op == "verify_tree":
        axes |= {"num_nodes": NUM_NODES, "rule": TREE_RULES}
    if op == "build_tree":
        axes |= {"num_nodes": NUM_NODES}
    for values in product(*axes.values()):
        chosen = dict(zip(axes, values, strict=True))
        if chosen.get("rule") == "greedy" and chosen["sampling"] != "unfiltered":
            continue  # filters do not change an argmax
        rank = sum(axes[name].index(value) for name, value in chosen.items())
        yield Case(op, rank=rank, **chosen)


def in_default_run(case: Case) -> bool:
    """Whether a CPU run without --full takes the case: one axis at most away from its base.

    So V 32000 and 128256, B 1 and 8, K 4, N 16, each distribution, dtype, filter and rule at
    V 128256 and B 1: a few minutes on two cores.
    """
    small = case.vocab <= 128256 and case.batch <= 8
    near = case.num_draft in (0, NUM_DRAFT[0]) and case.num_nodes in (0, NUM_NODES[0])
    return small and near and _axes_off_base(case) <= 1


def _axes_off_base(case: Case) -> int:
    bases = {
        "vocab": (0, VOCABS[0]),
        "batch": (BATCHES["cpu"][0],),
        "logits": ("none", LOGITS[0]),
        "dtype": ("int32", DTYPES["cpu"][0]),
        "rule": ("", CHAIN_RULES[0], TREE_RULES[0]),
        "sampling": tuple(SAMPLING)[:2],  # with and without filters at every size
    }
    return sum(getattr(case, name) not in values for name, values in bases.items())


def fits(case: Case, memory: int) -> bool:
    """Whether inputs, and what the peers make of them, fit into so many bytes."""
    as_float32 = case.input_bytes * 4 // ITEM_SIZE.get(case.dtype, 4)
    return case.input_bytes + 3 * as_float32 <= memory
