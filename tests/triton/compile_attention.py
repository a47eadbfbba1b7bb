"""Compiles the attention and cache kernels for GPUs that may be absent; prints what came out."""

import json
import re
import subprocess
import sys
import tempfile
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

TOOLS = Path(nvidia.__file__).parent / "bin"
CACHES = ("key_cache", "value_cache", "key_caches", "value_caches")
ROWS = ("query", "out", "key", "value")
SCALARS = ("inner", "factor", "key_scale", "value_scale")
FLOATS = ("sinks", "logsumexp", "partial", "partial_stats", "cos", "sin")
INTS = ("block_table", "context_lens", "cu_rows", "prefix_lens", "path", "accepted_len")


def main() -> None:
    capability = int(sys.argv[1])
    for head_size in (64, 128):
        for num_tokens in (1, 16, 64):
            for tree in (False, True):
                report_attention(capability, head_size, num_tokens, tree, torch.bfloat16)
            if num_tokens != 16:
                report_attention(capability, head_size, num_tokens, False, torch.float8_e4m3fn)
    report_cache(capability)


def report_attention(
    capability: int, head_size: int, num_tokens: int, tree: bool, dtype: torch.dtype
) -> None:
    """The kernels of one sequence of 32 heads on 8, bfloat16, and of 64 such sequences."""
    if tree and (num_tokens == 1 or head_size == 64):
        return
    cached = "*u8" if dtype == torch.float8_e4m3fn else "*bf16"
    for batch in (1, 64):
        query = torch.empty(batch * num_tokens, 32, head_size, dtype=torch.bfloat16, device="meta")
        cache = torch.empty(512, 16, 8, head_size, dtype=dtype, device="meta")
        table = torch.empty(batch, 512, dtype=torch.int32, device="meta")
        words = -(-num_tokens // 64)
        mask = torch.empty(batch, num_tokens, words, dtype=torch.int64, device="meta")
        scoring = attention.Scoring(1.0, ancestor_mask=mask if tree else None)
        common, _ = attention.choose(
            query, cache, table, "tree" if tree else "chain", scoring, False
        )
        if cached == "*u8" and capability >= 89:
            common["float8"] = "native"
        rows = "few" if num_tokens * 4 <= attention.FEW_ROWS else "many"
        variant = attention.Variant(**common, **attention.tiles(rows, head_size, cached == "*u8"))
        kind = "tree" if tree else "chain"
        kind += "8" if cached == "*u8" else ""
        name = f"{kind} q{num_tokens} d{head_size} b{batch}"
        constants, launch = {"V": variant}, attention.options(variant)
        report(name, attention_kernel, constants, capability, launch, cached)
        if batch == 1 and kind == "chain" and num_tokens == 1:
            report(f"merge d{head_size}", merge_kernel, constants, capability, {}, cached)


def report_cache(capability: int) -> None:
    sizes = {"BLOCK_SIZE": 16, "NUM_HEADS": 8, "HEAD_SIZE": 128, "ROTARY_SIZE": 128}
    sizes |= {"BLOCK_G": 8, "BLOCK_D": 128, "INTERPRETED": False}
    report("store_kv", store_kernel, {**sizes, "FLOAT8": False}, capability, {}, "*bf16")
    report("store_kv8", store_kernel, {**sizes, "FLOAT8": True}, capability, {}, "*u8")
    sizes = {"BLOCK_SIZE": 16, "WIDTH": 1024, "BLOCK_WIDTH": 1024, "MOVES": MOVES, "BLOCK_N": 16}
    report("compact_kv", compact_kernel, sizes, capability, {}, "*bf16")
    report("compact_kv8", compact_kernel, sizes, capability, {}, "*u8")


def report(name: str, kernel, constants: dict, capability: int, options: dict, cached: str) -> None:
    """Compile with all pointers and strides divisible by 16, as the launches of real models are."""
    signature, attributes = {}, {}
    for index, argument in enumerate(kernel.arg_names):
        kind = type_of(argument, cached) if argument not in constants else "constexpr"
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
    line = {"name": name, "shared": compiled.metadata.shared}
    line["registers"] = int(re.search(r"REG:(\d+)", usage)[1])
    for key, pattern in {
        "spills": r"\bSTL\b",
        "mma": r"\bHMMA\b",
        "wgmma": r"\bHGMMA\b",
        "tcgen05": r"\bUTC\w*MMA\b",
        "loads16": r"\b(?:LDGSTS|LDG)\.\S*128",
    }.items():
        line[key] = len(re.findall(pattern, code))
    print(json.dumps(line), flush=True)


def type_of(argument: str, cached: str) -> str:
    if argument in CACHES:
        return cached
    if argument in ROWS:
        return "*bf16"
    if argument in FLOATS:
        return "*fp32"
    if argument in INTS:
        return "*i32"
    if argument in ("ancestor_mask", "slot_mapping"):
        return "*i64"
    return "fp32" if argument in SCALARS else "i32"


def run(tool: str, *arguments: str) -> str:
    command = [str(TOOLS / tool), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main()
