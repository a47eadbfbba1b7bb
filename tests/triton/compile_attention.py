"""Compiles the attention and cache kernels for GPUs that may be absent; prints what came out."""

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
import triton
import triton.backends.nvidia as nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fastspec_kernels.triton import attention
from fastspec_kernels.triton.attention_kernels import attention_kernel, merge_kernel
from fastspec_kernels.triton.cache import MOVES
from fastspec_kernels.triton.cache_kernels import compact_kernel, store_kernel
from tests.cuda.sass import region

TOOLS = Path(nvidia.__file__).parent / "bin"
CACHES = ("key_cache", "value_cache", "key_caches", "value_caches")
ROWS = ("query", "out", "key", "value")
SCALARS = ("inner", "factor", "key_scale", "value_scale")
FLOATS = ("sinks", "logsumexp", "partial", "partial_stats", "cos", "sin")
INTS = ("block_table", "context_lens", "cu_rows", "prefix_lens", "path", "accepted_len")


# Kind, query tokens of a sequence, head size, sequences (1 is split, 64 are not), dtype. Kinds
# that end in 8 read float8 caches; those in + have a window, a cap and sinks and return
# log-sum-exps.
SHAPES = [
    ("chain", 1, 64, 64, "bf16"),
    ("chain", 64, 64, 1, "fp16"),
    ("chain", 1, 128, 1, "bf16"),
    ("chain", 64, 128, 64, "bf16"),
    ("tree", 8, 128, 64, "bf16"),
    ("tree", 128, 128, 1, "bf16"),
    ("tree", 128, 128, 64, "bf16"),
    ("cross", 64, 128, 64, "bf16"),
    ("chain8", 1, 128, 64, "bf16"),
    ("tree8", 64, 128, 64, "bf16"),
    ("chain+", 64, 128, 64, "bf16"),
    ("tree+", 8, 128, 64, "bf16"),
    ("tree+", 128, 128, 64, "bf16"),
    ("tree+", 8, 256, 64, "bf16"),
    ("tree", 64, 256, 64, "bf16"),
    ("tree+", 4, 512, 64, "bf16"),
    ("tree", 8, 128, 64, "fp32"),
    ("chain", 1, 256, 64, "fp32"),
    ("tree", 5, 128, 1, "bf16"),
    ("tree", 5, 128, 64, "bf16"),
    ("tree", 16, 128, 1, "bf16"),
    ("tree", 16, 128, 64, "bf16"),
    ("cross", 5, 128, 1, "bf16"),
    ("cross", 5, 128, 64, "bf16"),
]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def main() -> None:
    capability = int(sys.argv[1])
    for shape in SHAPES:
        report_attention(capability, *shape)
    report_cache(capability)


def report_attention(
    capability: int, kind: str, num_tokens: int, head_size: int, batch: int, dtype: str
) -> None:
    """The kernel of sequences of 32 heads on 8, and the one that merges where they are split."""
    mask, is_float8, is_full = kind.rstrip("8+"), kind.endswith("8"), kind.endswith("+")
    size = (batch * num_tokens, 32, head_size)
    query = torch.empty(size, dtype=DTYPES[dtype], device="meta")
    cache_dtype = torch.float8_e4m3fn if is_float8 else query.dtype
    cache = torch.empty(512, 16, 8, head_size, dtype=cache_dtype, device="meta")
    table = torch.empty(batch, 512, dtype=torch.int32, device="meta")
    words = -(-num_tokens // 64)
    nodes = torch.empty(batch, num_tokens, words, dtype=torch.int64, device="meta")
    scoring = attention.Scoring(1.0, ancestor_mask=nodes if mask == "tree" else None)
    if is_full:
        scoring = replace(scoring, sliding_window=1024, softcap=50.0, sinks=torch.empty(32))
    common, room = attention.choose(query, cache, table, mask, scoring, is_full)
    assert (room > 0) == (batch == 1)
    if is_float8 and capability >= 89:
        common["float8"] = "native"
    # Of a batch the first kind has few rows, where there are such.
    kinds = attention.kinds_of_rows(query, 8, 2, num_tokens if mask == "tree" else 0)
    rows = kinds[0] if num_tokens * 4 <= attention.FEW_ROWS else kinds[-1]
    sizes = head_size, query.itemsize, is_float8, mask == "tree" and scoring.sliding_window > 0
    tiles = attention.tiles(rows, *sizes, divmod(capability, 10))
    variant = attention.variant_of(**common, **tiles)
    constants, launch = {"V": variant}, attention.options(variant, divmod(capability, 10))
    name = f"{kind} q{num_tokens} d{head_size} b{batch} {dtype}"
    report(name, attention_kernel, constants, capability, launch, dtype, is_float8)
    if batch == 1 and kind == "chain" and num_tokens == 1:
        report(f"merge d{head_size}", merge_kernel, constants, capability, {"num_warps": 1}, dtype)


def report_cache(capability: int) -> None:
    sizes = {"BLOCK_SIZE": 16, "NUM_HEADS": 8, "HEAD_SIZE": 128, "ROTARY_SIZE": 128}
    sizes |= {"BLOCK_G": 8, "BLOCK_D": 128, "INTERPRETED": False}
    launch = {"enable_fp_fusion": False}
    report("store_kv", store_kernel, {**sizes, "FLOAT8": False}, capability, launch, "bf16")
    report("store_kv8", store_kernel, {**sizes, "FLOAT8": True}, capability, launch, "bf16", True)
    sizes = {"BLOCK_SIZE": 16, "WIDTH": 1024, "BLOCK_WIDTH": 1024, "MOVES": MOVES, "BLOCK_N": 16}
    report("compact_kv", compact_kernel, sizes, capability, launch, "bf16")
    report("compact_kv8", compact_kernel, sizes, capability, launch, "bf16", True)


def report(
    name: str,
    kernel,
    constants: dict,
    capability: int,
    options: dict,
    dtype: str,
    is_float8: bool = False,
) -> None:
    """Compile with all pointers and strides divisible by 16, as the launches of real models are."""
    signature, attributes = {}, {}
    for index, argument in enumerate(kernel.arg_names):
        kind = type_of(argument, dtype, is_float8) if argument not in constants else "constexpr"
        signature[argument] = kind
        if kind.startswith("*") or argument.endswith("stride"):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    options = {"num_warps": 4, **options}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = run("cuobjdump", "-res-usage", file.name)
        code = run("nvdisasm", "-c", file.name)
    line = {"name": name, "shared": compiled.metadata.shared, "warps": options["num_warps"]}
    if kernel is attention_kernel:
        lines = [row.strip() for row in code.splitlines()]
        line["block_n"] = constants["V"].block_n.value
        line["regions"] = {"loop": region(lines, r"\bH\w*MMA\b")}
    line["registers"] = int(re.search(r"REG:(\d+)", usage)[1])
    # Only the loop over unmasked keys copies ahead; what it leaves in flight while it multiplies.
    waits = re.findall(r"cp\.async\.wait_group\s+(\d+)", compiled.asm["ptx"])
    line["in_flight"] = max(map(int, waits), default=0)
    line["pairs"] = pairs_of(compiled.asm["ttgir"])
    line["float8"] = sorted(set(re.findall(r"\be[45]m[23]x2\b", compiled.asm["ptx"])))
    for key, pattern in {
        "spills": r"\bSTL\b",
        "mma": r"\bHMMA\b",
        "wgmma": r"\bHGMMA\b",
        "tcgen05": r"\bUTC\w*MMA\b",
        "loads16": r"\b(?:LDGSTS|LDG)\.\S*128",
    }.items():
        line[key] = len(re.findall(pattern, code))
    print(json.dumps(line), flush=True)


def pairs_of(ttgir: str) -> list[bool]:
    """Whether the two numbers of each store of a pair are neighbours in a row."""
    layouts = dict(re.findall(r"^(#\w+) = #ttg\.(.*)$", ttgir, re.MULTILINE))
    stored = re.findall(r"st\.global\.v2\.f32.*-> tensor<\w+, (#\w+)>", ttgir)
    firsts = ("nvidia_mma<", "linear<{register = [[0, 1]")
    return [layouts[name].startswith(firsts) for name in stored]


def type_of(argument: str, dtype: str, is_float8: bool) -> str:
    if argument in CACHES:
        return "*u8" if is_float8 else f"*{dtype}"
    if argument in ROWS:
        return f"*{dtype}"
    if argument in FLOATS:
        return "*fp32"
    if argument in INTS:
        return "*i32"
    if argument in ("ancestor_mask", "shares", "slot_mapping"):
        return "*i64"
    return "fp32" if argument in SCALARS else "i32"


def run(tool: str, *arguments: str) -> str:
    command = [str(TOOLS / tool), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main()
