"""The kernels of csrc/cuda compiled for this machine's CPU: each op on CPU tensors."""

import ctypes
import hashlib
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from ctypes import POINTER, c_char, c_int32, c_int64, c_uint64, c_void_p
from functools import cache
from pathlib import Path

import torch
from filelock import FileLock
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
EMULATION = Path(__file__).resolve().parent / "emulation"
BUILD = ROOT / "build" / "emulation"
FLAGS = ["-std=c++17", "-O1", "-fPIC", "-ffp-contract=off", "-Wall", "-Wno-unknown-pragmas"]
COMPILER = shutil.which(os.environ.get("CXX", "g++"))
ELEMENTS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
RULES = ("target_only", "without_replacement", "with_replacement")


def struct(name: str, **fields) -> type:
    """A C struct with these fields in this order."""
    return type(name, (ctypes.Structure,), {"_fields_": list(fields.items())})


def pointers(*names: str) -> dict:
    return dict.fromkeys(names, c_void_p)


Plan = struct("Plan", **dict.fromkeys(("cluster", "threads", "staged"), c_int32))
Image = struct("Image", ptx_version=c_int32, binary_version=c_int32)
Run = struct("Run", order=c_uint64, message=c_char * 512)
Limits = struct("Limits", multiprocessors=c_int64, shared_bytes=c_int64, clusters=ctypes.c_bool)
RowShape = struct("RowShape", size=c_int64, element_bytes=c_int64)
Logits = struct(
    "Logits",
    **pointers("data", "bitmask"),
    **dict.fromkeys(("row_stride", "bitmask_stride", "num_rows", "size"), c_int64),
    element=c_int32,
)
Parameters = struct("Parameters", **pointers("temperature", "top_k", "top_p", "min_p"))
PenalizeCall = struct(
    "PenalizeCall",
    **pointers("logits", "row_sequence", "row_node", "tree_token_ids", "parents", "cu_history"),
    **pointers("history_ids", "history_counts", "cu_bias", "bias_ids", "bias", "bias_until"),
    **pointers("repetition_penalty", "presence_penalty", "frequency_penalty"),
    **dict.fromkeys(("row_stride", "num_rows", "vocab", "batch", "num_nodes"), c_int64),
    element=c_int32,
)
VerifyTreeCall = struct(
    "VerifyTreeCall",
    target=Logits,
    draft=Logits,
    draft_batch_stride=c_int64,
    **pointers("draft_token_map", "cu_rows", "tree_token_ids", "parents", "uniform_samples"),
    parameters=Parameters,
    batch=c_int64,
    num_nodes=c_int64,
    rule=c_int32,
    **pointers("path", "output_token_ids", "accepted_len", "logprobs"),
)
BuildTreeCall = struct(
    "BuildTreeCall",
    **pointers("parents"),
    batch=c_int64,
    num_nodes=c_int64,
    **pointers("depths", "ancestor_mask"),
)
UniformCall = struct(
    "UniformCall",
    **pointers("seed", "position", "samples"),
    **dict.fromkeys(("batch", "num", "stream_id"), c_int64),
)


@cache
def library() -> ctypes.CDLL:
    """Compile what changed since the last time and load it."""
    kernels = sorted((ROOT / "csrc" / "cuda").glob("*.cu"))
    sources = [*kernels, *sorted(EMULATION.glob("*.cpp"))]
    headers = [*(ROOT / "csrc").rglob("*.*h"), *EMULATION.glob("*.h")]
    texts = [path.read_bytes() for path in (*sources, *sorted(headers))]
    digest = hashlib.sha256(b"".join([*texts, repr((COMPILER, FLAGS)).encode()])).hexdigest()
    path = BUILD / f"emulated_{digest[:16]}.so"
    BUILD.mkdir(parents=True, exist_ok=True)
    with FileLock(BUILD / "emulated.lock"):  # each worker of a test run comes by
        if not path.exists():
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                objects = list(pool.map(compile_one, sources, [digest[:16]] * len(sources)))
            temporary = path.with_suffix(f".{os.getpid()}")
            subprocess.run([COMPILER, "-shared", *objects, "-o", temporary], check=True)
            temporary.rename(path)
    return ctypes.CDLL(str(path))


def compile_one(source: Path, tag: str) -> Path:
    out = BUILD / f"{source.stem}_{tag}.{os.getpid()}.o"
    folders = [f"-I{ROOT / 'csrc'}", f"-I{EMULATION}"]
    subprocess.run([COMPILER, *FLAGS, *folders, "-x", "c++", "-c", source, "-o", out], check=True)
    return out


class Emulation:
    """The ops under one plan and one order of the threads; arguments as the reference's."""

    def __init__(self, cluster=2, threads=64, staged=True, order=0):
        self.plan = Plan(cluster, threads, staged)
        self.order = order

    def launch(self, op: str, call: ctypes.Structure) -> None:
        run = Run(self.order)
        argument_types = [POINTER(type(call)), POINTER(Plan), POINTER(Run)]
        function = library()[f"emulated_{op}"]
        function.argtypes = argument_types
        if function(call, self.plan, run) != 0:
            raise RuntimeError(run.message.decode())

    def penalize(self, logits, **tensors):
        pointers = {name: address(tensor) for name, tensor in tensors.items()}
        sizes = logits.stride(0), *logits.shape, *tensors["tree_token_ids"].shape
        call = PenalizeCall(address(logits), **pointers)
        names = "row_stride", "num_rows", "vocab", "batch", "num_nodes"
        for name, value in zip(names, sizes, strict=True):
            setattr(call, name, value)
        call.element = ELEMENTS[logits.dtype]
        self.launch("penalize", call)

    def verify_tree(
        self,
        target_logits,
        cu_rows,
        tree_token_ids,
        parents,
        uniform_samples,
        sibling_rule,
        draft_logits,
        temperature,
        top_k,
        top_p,
        min_p,
        draft_token_map,
        token_bitmask,
    ):
        shape = tree_token_ids.shape
        outputs = poisoned_ids(shape), poisoned_ids(shape), poisoned_ids(shape[:1]), poisoned(shape)
        inputs = draft_token_map, cu_rows, tree_token_ids, parents, uniform_samples
        call = VerifyTreeCall(
            logits_struct(target_logits, token_bitmask),
            *draft_structs(draft_logits),
            *map(address, inputs),
            parameters_struct((temperature, top_k, top_p, min_p)),
            *shape,
            RULES.index(sibling_rule),
            *map(address, outputs),
        )
        self.launch("verify_tree", call)
        return outputs

    def build_tree(self, parents):
        depths = poisoned_ids(parents.shape)
        words = (parents.shape[1] + 63) // 64
        mask = torch.full((*parents.shape, words), -1, dtype=torch.int64)
        tensors = address(depths), address(mask)
        self.launch("build_tree", BuildTreeCall(address(parents), *parents.shape, *tensors))
        return depths, mask

    def uniform(self, seed, position, num, stream):
        samples = poisoned((len(seed), num))
        tensors = seed, position, samples
        self.launch("uniform", UniformCall(*map(address, tensors), len(seed), num, stream))
        return samples


PLANS = [
    Emulation(1, 32, staged=False),
    Emulation(1, 96, staged=True, order=1),
    Emulation(2, 64, staged=True, order=2),
    Emulation(4, 64, staged=False, order=3),
    Emulation(8, 32, staged=True, order=1),
]


def plan_id(emulation: Emulation) -> str:
    plan = emulation.plan
    return f"{plan.cluster}x{plan.threads}{'-staged' if plan.staged else ''}"


def same(one, other) -> bool:
    """Whether results agree bit by bit, also where there is NaN."""
    pairs = zip(one, other, strict=True)
    return all(a.view(torch.int32).equal(b.view(torch.int32)) for a, b in pairs)


def chosen_plan(size: int, element_bytes: int, num_rows: int, limits: ctypes.Structure):
    """The plan that the bindings would take on a device with these limits."""
    plan = Plan()
    function = library().chosen_plan
    function.argtypes = [POINTER(RowShape), c_int64, POINTER(Limits), POINTER(Plan)]
    function(RowShape(size, element_bytes), num_rows, limits, plan)
    return plan


def has_clusters(ptx_version: int, binary_version: int, device_major: int) -> bool:
    """Whether the bindings would let blocks share a row."""
    function = library().has_clusters
    function.argtypes, function.restype = [POINTER(Image), c_int64], ctypes.c_bool
    return function(Image(ptx_version, binary_version), device_major)


def poisoned(shape) -> Tensor:
    return torch.full(tuple(shape), 1e30)


def poisoned_ids(shape) -> Tensor:
    return torch.full(tuple(shape), -77, dtype=torch.int32)


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def parameters_struct(parameters) -> ctypes.Structure:
    return Parameters(*map(address, parameters))


def logits_struct(logits: Tensor | None, bitmask: Tensor | None = None) -> ctypes.Structure:
    if logits is None:
        return Logits()
    mask_stride = 0 if bitmask is None else bitmask.stride(0)
    sizes = logits.stride(-2), mask_stride, logits.shape[-2], logits.shape[-1]
    return Logits(address(logits), address(bitmask), *sizes, ELEMENTS[logits.dtype])


def draft_structs(draft_logits: Tensor | None) -> tuple[ctypes.Structure, int]:
    return logits_struct(draft_logits), 0 if draft_logits is None else draft_logits.stride(0)
