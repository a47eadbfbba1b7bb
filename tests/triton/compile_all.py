"""Compiles the kernels of the launches below for one GPU generation; prints a JSON line for each.

Run as a program, as Triton compiles nothing in a process that interprets: compile_all.py 90, or of
one kernel alone: compile_all.py 90 match_suffix_kernel
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from fastspec_kernels import LayerWeights
from fastspec_kernels import triton as ops
from fastspec_kernels.triton import decoder

BINARIES = Path(triton.__path__[0]) / "backends/nvidia/bin"
BATCH, NUM_DRAFT = 2, 4


def recorded_launches(capability: int, every_variant: bool) -> list[tuple]:
    """Kernel, arguments and options of the launches of every op, none of them carried out."""
    launches = []

    def record(kernel, *args, grid, warmup, **options):
        if "INTERPRETED" in options:  # what a GPU gets, though the tensors are on the CPU
            options["INTERPRETED"] = False
        if "PDL" in options:
            options |= overlap(capability)
        launches.append((kernel, args, options))

    JITFunction.run = record
    # Aligned rows: 16-byte loads.
    for dtype in (torch.bfloat16, torch.float32):
        logits = torch.empty(BATCH, 128256, dtype=dtype)
        ops.row_stats(logits, torch.empty(BATCH), None, None, None, None)
    _call_chains(128256, torch.bfloat16, _params(BATCH), False)
    _call_trees(128256, torch.bfloat16, (None,) * 4, False)
    _call_row_ops(128256, torch.bfloat16, (None,) * 4, None)
    ops.build_tree(torch.empty(BATCH, NUM_DRAFT, dtype=torch.int32))
    ops.uniform(torch.empty(BATCH, dtype=torch.int64), torch.empty(BATCH, dtype=torch.int64), 5, 2)
    texts = torch.empty(BATCH, 4096, dtype=torch.int32)
    _call_penalize(128256, torch.bfloat16, NUM_DRAFT, (None,) * 4)
    ops.match_suffix(texts, torch.empty(BATCH, dtype=torch.int32), 2, 3, 10, "latest")
    for num_rows in (5, 17):  # few and many
        _call_decoder(torch.bfloat16, False, num_rows)
    if every_variant:  # rows of odd length, with everything optional
        _call_chains(50257, torch.float32, _params(BATCH), True)
        _call_trees(50257, torch.float32, _params(BATCH), True)
        rows = BATCH * (NUM_DRAFT + 1)
        _call_row_ops(50257, torch.float16, _params(rows), _bitmask(rows, 50257))
        _call_row_ops(33, torch.float32, _params(rows), None)
        parents = torch.empty(BATCH, 64, dtype=torch.int32)
        _call_penalize(50257, torch.float16, 64, (parents, *torch.empty(3, BATCH)))
        _call_decoder(torch.float16, True, num_rows=16)
        _call_decoder(torch.float32, True)
        _call_ones()
    return launches


def overlap(capability: int) -> dict[str, bool]:
    """What a launch of a kernel that knows PDL gets on a GPU."""
    return {"PDL": True, "launch_pdl": True} if capability >= 90 else {"PDL": False}


def _call_ones() -> None:
    """One of everything: the launcher makes a constant of each 1, as the interpreter does not."""
    one, seed = torch.empty(1, 1, dtype=torch.int32), torch.empty(1, dtype=torch.int64)
    bounds, uniform, params = torch.empty(2, dtype=torch.int32), torch.empty(1, 2), _params(1)
    draft = torch.empty(1, 1, 5)
    chain = (torch.empty(2, 5), bounds, one, uniform, draft, *params)
    ops.verify_chain(*chain, 1.0, "standard", None, None, None)
    tree = (torch.empty(1, 5), bounds, one, one, uniform)
    ops.verify_tree(*tree, "with_replacement", draft, *params, None, None)
    ops.build_tree(one)
    ops.uniform(seed, seed, 1, 1)
    ops.sample_coupled(torch.empty(1, 1), seed, seed, *params, None)
    lists = (bounds, one[0], one[0], bounds, one[0], torch.empty(1), one[0])
    ops.penalize(torch.empty(1, 1), one[0], one[0], one, *lists, one, *torch.empty(3, 1))
    for rule in ("latest", "earliest_longest"):
        ops.match_suffix(one, one[0], 1, 1, 1, rule)


def _call_penalize(vocab: int, dtype: torch.dtype, num_nodes: int, options: tuple) -> None:
    rows = torch.empty(BATCH * num_nodes, dtype=torch.int32)
    tokens = torch.empty(BATCH, num_nodes, dtype=torch.int32)
    entries = torch.empty(30, dtype=torch.int32)
    history = torch.empty(BATCH + 1, dtype=torch.int32), entries, entries
    bias = history[0], entries, torch.empty(30), entries
    logits = torch.empty(len(rows), vocab, dtype=dtype)
    ops.penalize(logits, rows, rows, tokens, *history, *bias, *options)


def _call_decoder(dtype: torch.dtype, full: bool, num_rows: int = 5) -> None:
    """A layer of 8 heads on 2 of 128; its attention has a test of its own."""
    decoder.tree_attention = lambda query, *args: (query, None)
    size, (queries, keys, wide) = 2048, (1024, 256, 512)
    shapes = (size,), (queries, size), (keys, size), (keys, size), (size, queries), (size,)
    shapes += (wide, size), (wide, size), (size, wide)
    weights = [torch.empty(shape, dtype=dtype) for shape in shapes]
    norms = [torch.empty(shape, dtype=dtype) for shape in (128, 128, size, size)]
    caches = torch.empty(2, 9, 16, 2, 128, dtype=dtype)
    hidden, ints = torch.empty(num_rows, size), torch.empty(6, dtype=torch.int32)
    factors = (torch.empty(num_rows, 128), torch.empty(num_rows, 128))
    if full:
        biases = [torch.empty(number, dtype=dtype) for number in (queries, keys, keys, size)]
        weights += biases + norms
    layer = LayerWeights(*weights)
    activation = "gelu_tanh" if full else "silu"
    pages = torch.empty(num_rows, dtype=torch.int64), ints[None], ints, ints
    kept = [0], [*torch.empty(2, 9, 16, 1, size // 2, dtype=dtype)]
    given = [caches[0]], [caches[1]], 1e-5, float(full), activation, *factors, None, *kept, *pages
    ops.decoder_layers(hidden, list(layer), *given, 1.0, 0, 0.0, None)


def _call_row_ops(vocab: int, dtype: torch.dtype, params: tuple, bitmask) -> None:
    rows = BATCH * (NUM_DRAFT + 1)
    logits = torch.empty(rows, vocab, dtype=dtype)
    ops.row_stats(logits, *params, bitmask)
    ops.logits_to_probs(logits, *params, bitmask)
    ops.sample(logits, torch.empty(rows), *params, bitmask)
    seed = torch.empty(rows, dtype=torch.int64)
    ops.sample_coupled(logits, seed, seed, *params, bitmask)


def _call_chains(vocab: int, dtype: torch.dtype, params: tuple, full: bool) -> None:
    logits, cu_rows, tokens, uniform, draft_logits, token_map, bitmask = _inputs(vocab, dtype, full)
    chain = (logits, cu_rows, tokens, uniform)
    no_params = (torch.empty(BATCH), None, None, None)
    options = (token_map, bitmask)
    ops.verify_chain(*chain, draft_logits, *params, 1.0, "standard", None, *options)
    ops.verify_chain(*chain, draft_logits, *no_params, 1.0, "block", None, *options)
    ops.verify_chain(*chain, None, *no_params, 1.5, "standard", None, None, bitmask)
    if full:
        logsumexp = torch.empty(BATCH, NUM_DRAFT)
        ops.verify_chain(*chain, draft_logits, *params, 1.0, "standard", logsumexp, *options)
        ops.verify_chain(*chain, None, *no_params, 1.0, "block", None, None, bitmask)


def _call_trees(vocab: int, dtype: torch.dtype, params: tuple, full: bool) -> None:
    logits, cu_rows, tokens, uniform, draft_logits, token_map, bitmask = _inputs(vocab, dtype, full)
    tree = (logits, cu_rows, tokens, tokens, uniform)
    ops.verify_tree(*tree, "target_only", None, *params, None, bitmask)
    rule = "without_replacement" if full else "with_replacement"
    ops.verify_tree(*tree, rule, draft_logits, *params, token_map, bitmask)


def _inputs(vocab: int, dtype: torch.dtype, full: bool) -> tuple:
    rows, draft_vocab = BATCH * (NUM_DRAFT + 1), vocab - 3 if full else vocab
    return (
        torch.empty(rows, vocab, dtype=dtype),
        torch.empty(BATCH + 1, dtype=torch.int32),
        torch.empty(BATCH, NUM_DRAFT, dtype=torch.int32),
        torch.empty(BATCH, NUM_DRAFT + 1),
        torch.empty(BATCH, NUM_DRAFT, draft_vocab, dtype=dtype),
        torch.empty(vocab, dtype=torch.int32) if full else None,
        _bitmask(rows, vocab) if full else None,
    )


def _bitmask(rows: int, vocab: int) -> torch.Tensor:
    return torch.empty(rows, (vocab + 31) // 32, dtype=torch.int32)


def _params(num: int) -> tuple:
    return (
        torch.empty(num),
        torch.empty(num, dtype=torch.int32),
        torch.empty(num),
        torch.empty(num),
    )


def compile_launch(kernel, args: tuple, options: dict, capability: int):
    """Compile what Triton's own launcher would compile for these arguments."""
    target = GPUTarget("cuda", capability, 32)
    backend = make_backend(target)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, rest = bind(*args, **options)
    packed = kernel._pack_args(backend, options, bound, specialization, rest)
    launch_options, signature, constants, attributes = packed
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=target, options=launch_options.__dict__)


def resources(cubin: bytes) -> dict:
    """Registers, stack and local memory, and counts of instructions, from the machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _output("cuobjdump", "-res-usage", file.name)
        code = re.findall(
            r"^\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+ )?([\w.]+)([^;]*);",
            _output("cuobjdump", "-sass", file.name),
            re.MULTILINE,
        )
    number = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    while code and code[-1][2] in ("NOP", "BRA"):
        code.pop()
    names = [name for _, _, name, _ in code]
    return {
        "registers": number["REG"],
        "stack": number["STACK"],
        "local": number["LOCAL"],
        "instructions": len(code),
        "executed": executed(code),
        "wide_loads": sum(name.startswith("LDG.E.128") for name in names),
        "exponentials": sum(name.startswith("MUFU.EX2") for name in names),
    }


def in_flight(ptx: str) -> int:
    """Groups of asynchronous copies that the kernel leaves on their way when it waits."""
    return max(map(int, re.findall(r"cp\.async\.wait_group\s+(\d+)", ptx)), default=0)


def executed(code: list[tuple[str, str, str, str]]) -> int:
    """Instructions on the shortest way that passes most exponentials, taking loops once."""
    place = {int(address, 16): i for i, (address, *_) in enumerate(code)}
    ways = [(0, 0)] * (len(code) + 1)  # from here on: exponentials, minus instructions
    for i, (_, predicate, name, operands) in reversed(list(enumerate(code))):
        following = [ways[i + 1]]
        if name == "EXIT" and not predicate:
            following = [(0, 0)]
        if name in ("BRA", "BRA.U"):
            target = place.get(int(operands.split("0x")[1], 16), 0)
            is_sure = not predicate and "P" not in operands
            following = [] if is_sure and target > i else following
            following += [ways[target]] if target > i else []
        exponentials, instructions = max(following)
        ways[i] = exponentials + name.startswith("MUFU.EX2"), instructions - 1
    return -ways[0][1]


def _output(tool: str, *args: str) -> str:
    command = [str(BINARIES / tool), *args]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _has_minimum(signature: dict) -> bool:
    return getattr(signature.get("tiles"), "minimum", "constexpr") != "constexpr"


def main(capability: int, only: str = "") -> None:
    seen = set()
    for kernel, args, options in recorded_launches(capability, capability == 90 and not only):
        if only not in kernel.fn.__name__:
            continue
        compiled = compile_launch(kernel, args, options, capability)
        if compiled.hash in seen:
            continue
        seen.add(compiled.hash)
        dtypes = str(compiled.src.signature)
        record = {
            "kernel": kernel.fn.__name__,
            "dtype": next((x for x in ("bf16", "fp16", "fp32") if x in dtypes), None),
            "options": options,
            "filtered": _has_minimum(compiled.src.signature),
            "shared": compiled.metadata.shared,
            "narrow_copies": compiled.asm["ptx"].count("cp.async.ca."),
            "in_flight": in_flight(compiled.asm["ptx"]),
            **resources(compiled.asm["cubin"]),
        }
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
