"""Every op on small shapes against the reference, for the sanitizers and for the GPU tests.

All inputs are made and all results compared on the CPU, so that a tool sees our kernels and copies
of memory, and little of torch's own.
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch
from torch import Tensor

import fastspec_kernels as ops
from benchmarks import verification
from benchmarks.gpu import options
from benchmarks.gpu.steps import UNFINISHED
from benchmarks.inputs import binary_tree, draw_tokens, make_logits, noisy, randomness
from fastspec_kernels.backend import backends_of

TINY_VOCABS = (1, 33, 1000)
VOCABS = (*TINY_VOCABS, 8193, 40001)  # two tiles and a bit; several blocks of a cluster
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MIXED = {  # a sequence each: plain, greedy, filtered
    "temperature": torch.tensor([1.0, 0.0, 0.8]),
    "top_k": torch.tensor([0, 0, 50], dtype=torch.int32),
    "top_p": torch.tensor([1.0, 1.0, 0.9]),
    "min_p": torch.tensor([0.0, 0.0, 0.01]),
}
TOLERANCE = {
    torch.float32: {"atol": 1e-4, "rtol": 1e-4},
    torch.float16: {"atol": 4e-3, "rtol": 4e-3},
    torch.bfloat16: {"atol": 3e-2, "rtol": 3e-2},
}
BATCH = 3
NUM_DRAFT = 3
NUM_NODES = 7


def backends(device_type: str) -> list[str]:
    """Compiled backends on this type of device that have at least one of the ops."""
    found = {
        name: None
        for op in CHECKS
        for name in backends_of(op, torch.device(device_type))
        if name != "reference"
    }
    return list(found) or ["reference"]


def checks(
    backend: str, device_type: str, vocabs: tuple[int, ...] = VOCABS
) -> Iterator[tuple[str, Callable[[], None]]]:
    """Name and check of everything that the backend has there; a check raises AssertionError.

    Small vocabularies of all ops come before large ones, so that a run cut short has seen each op.
    """
    device = torch.device(device_type)
    has = {op: check for op, check in CHECKS.items() if backend in backends_of(op, device)}
    for vocab, dtype in product(vocabs, DTYPES):
        first = (vocab, dtype) == (vocabs[0], DTYPES[0])
        for op, check in has.items():
            if op in SAMPLING_OPS or first:
                name = f"{op}-V{vocab}-{str(dtype).removeprefix('torch.')}"
                yield name, partial(check, vocab, dtype, backend, device)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def bitmask(num_rows: int, vocab: int) -> Tensor:
    """Half of the tokens allowed; the first of each word always, so that no row is empty."""
    words = torch.randint(-(2**31), 2**31, (num_rows, -(-vocab // 32)), generator=generator())
    return words.int() | 1


def logits_of(num_rows: int, vocab: int, dtype: torch.dtype) -> Tensor:
    """[num_rows, vocab] in rows with a gap between them that holds NaN."""
    buffer = torch.full((num_rows, vocab + 3), torch.nan, dtype=dtype)
    rows = buffer[:, :vocab]
    rows.copy_(make_logits("flat", num_rows, vocab, torch.float32, generator()) * 3)
    return rows


def moved(values: tuple | dict, device: torch.device):
    """The arguments on the device, strides kept."""
    if isinstance(values, dict):
        return {name: moved((value,), device)[0] for name, value in values.items()}
    return tuple(_moved(value, device) if isinstance(value, Tensor) else value for value in values)


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    if tensor.is_contiguous():
        return tensor.to(device)
    strided = torch.empty(tensor.stride(0) * len(tensor), dtype=tensor.dtype).fill_(torch.nan)
    strided = strided.as_strided(tensor.shape, tensor.stride()).copy_(tensor)
    base = strided.as_strided((tensor.stride(0) * len(tensor),), (1,))
    return base.to(device).as_strided(tensor.shape, tensor.stride())


def _rows_check(op: str):
    def check(vocab, dtype, backend, device):
        logits = logits_of(BATCH, vocab, dtype)
        extra = randomness(op, BATCH, generator())
        args = moved((logits, *extra), device)
        for params in (MIXED, {**MIXED, "token_bitmask": bitmask(BATCH, vocab)}):
            ours = getattr(ops, op)(*args, **moved(params, device), backend=backend)
            verification.rows(op, logits, extra, params, ours)

    return check


def chain_inputs(vocab: int, dtype: torch.dtype) -> tuple[tuple, dict]:
    """Three ragged sequences: all proposals, none, two of them."""
    cu_rows = torch.tensor([0, NUM_DRAFT + 1, NUM_DRAFT + 2, NUM_DRAFT + 5], dtype=torch.int32)
    target = logits_of(int(cu_rows[-1]), vocab, dtype)
    draft = noisy(logits_of(BATCH * NUM_DRAFT, vocab, dtype), generator())
    tokens = draw_tokens(draft, {}, 1, True, generator()).view(BATCH, NUM_DRAFT)
    uniform = torch.rand(BATCH, NUM_DRAFT + 1, generator=generator())
    return (target, cu_rows, tokens, uniform), {
        "draft_logits": draft.view(BATCH, NUM_DRAFT, vocab),
        **MIXED,
    }


def tree_inputs(vocab: int, dtype: torch.dtype) -> tuple[tuple, dict]:
    target = logits_of(BATCH * NUM_NODES, vocab, dtype)
    draft = noisy(target, generator())
    siblings = draw_tokens(draft, {}, 2, True, generator())  # row i: the two children of node i
    parents = binary_tree(NUM_NODES)
    which = (torch.arange(NUM_NODES) - 1) % 2
    tokens = siblings.view(BATCH, NUM_NODES, 2)[:, parents.clamp_min(0), which].contiguous()
    cu_rows = torch.arange(BATCH + 1, dtype=torch.int32) * NUM_NODES
    uniform = torch.rand(BATCH, NUM_NODES + 1, generator=generator())
    args = (target, cu_rows, tokens, parents.expand(BATCH, -1).contiguous(), uniform)
    return args, {"draft_logits": draft.view(BATCH, NUM_NODES, vocab), **MIXED}


def _chain_check(vocab, dtype, backend, device):
    args, kwargs = chain_inputs(vocab, dtype)
    variants = (
        kwargs,
        {**kwargs, "draft_logits": None},
        {**kwargs, "method": "block"},
        {**kwargs, "draft_logsumexp": logsumexp_of(kwargs)},
        {**kwargs, "token_bitmask": bitmask(len(args[0]), vocab)},
        {**kwargs, "draft_token_map": torch.arange(vocab, dtype=torch.int32).flip(0)},
    )
    for options_of in variants:
        ours = ops.verify_chain(*moved(args, device), **moved(options_of, device), backend=backend)
        verification.chain(args, options_of, ours)


def logsumexp_of(kwargs: dict) -> Tensor:
    """[BATCH, NUM_DRAFT], what row_stats gives for the draft rows."""
    rows = {name: value.repeat_interleave(NUM_DRAFT) for name, value in MIXED.items()}
    logits = kwargs["draft_logits"].flatten(0, 1)
    return ops.row_stats(logits, **rows, backend="reference")[0].view(BATCH, NUM_DRAFT)


def _tree_check(vocab, dtype, backend, device):
    args, kwargs = tree_inputs(vocab, dtype)
    for rule in ("with_replacement", "without_replacement", "target_only"):
        options_of = {**kwargs, "sibling_rule": rule}
        if rule == "target_only":
            options_of["draft_logits"] = None
            options_of["token_bitmask"] = bitmask(len(args[0]), vocab)
        ours = ops.verify_tree(*moved(args, device), **moved(options_of, device), backend=backend)
        verification.tree(args, options_of, ours)


def call_of(op: str, vocab: int, dtype: torch.dtype, backend: str) -> tuple:
    """A function of the op's arguments on the GPU, and such arguments: positional, by name."""
    args, kwargs = chain_inputs(vocab, dtype) if op == "verify_chain" else tree_inputs(vocab, dtype)
    if op == "verify_tree":
        kwargs["sibling_rule"] = "with_replacement"
    device = torch.device("cuda")

    def run(args: tuple, kwargs: dict) -> tuple[Tensor, ...]:
        return getattr(ops, op)(*args, **kwargs, backend=backend)

    return run, moved(args, device), moved(kwargs, device)


def _build_tree_check(vocab, dtype, backend, device):
    for num_nodes in (1, 7, 64, 65, 200):
        parents = binary_tree(num_nodes).repeat(BATCH, 1)
        expected = ops.build_tree(parents, backend="reference")
        verification.equal(ops.build_tree(parents.to(device), backend=backend), expected)


def _uniform_check(vocab, dtype, backend, device):
    seed, position = torch.randint(2**62, (2, BATCH), generator=generator())
    expected = ops.uniform(seed, position, 7, 3, backend="reference")
    ours = ops.uniform(seed.to(device), position.to(device), 7, 3, backend=backend)
    verification.equal((ours,), (expected,))


def _store_check(vocab, dtype, backend, device):
    """Whole vectors, single values, rotated keys; a token that is skipped, slots left alone."""
    for element, head_size, size in product(DTYPES, (128, 5), (0, 4)):
        key, value = torch.randn(2, 3, 2, head_size, generator=generator()).to(element)
        cache = torch.full((4, 4, 2, head_size), torch.nan, dtype=element)
        cos, sin = torch.rand(2, 3, size, generator=generator())
        factors = {"cos": cos, "sin": sin} if size else {}
        args = (key, value, cache, cache.clone(), torch.tensor([9, -1, 2]))
        ours = tuple(tensor.to(device, copy=True) for tensor in args)
        ops.store_kv(*ours, **moved(factors, device), backend=backend)
        ops.store_kv(*args, **factors, backend="reference")
        for part, wanted in zip(ours[2:4], args[2:4], strict=True):
            torch.testing.assert_close(part.cpu(), wanted, equal_nan=True)


def _compact_check(vocab, dtype, backend, device):
    """Moves that overlap and cross pages, in two rounds; the second sequence stays as it is."""
    for element, head_size in product((*DTYPES, torch.float8_e4m3fn), (128, 5)):
        caches = torch.randn(2, 3, 12, 4, 2, head_size, generator=generator()).to(element).unbind(0)
        table = torch.randperm(12, generator=generator()).view(2, 6).int()
        path = torch.arange(2, 12, dtype=torch.int32).repeat(2, 1)
        lengths = torch.tensor([[5, 6], [10, 0]], dtype=torch.int32)
        ours = tuple(cache.to(device, copy=True) for cache in caches)
        indices = (table, lengths[0], path, lengths[1])
        ops.compact_kv(*ours, *moved(indices, device), backend=backend)
        ops.compact_kv(*caches, *indices, backend="reference")
        verification.equal(ours, caches)


def _attention_check(op: str):
    """Ragged chains and trees over one to three chunks, blocks out of order, NaN in unused slots.

    Few sequences, so that programs share a context and their parts are merged.
    """

    def check(vocab, dtype, backend, device):
        counts = torch.tensor([5, 1, NUM_NODES])
        cu_rows = torch.cat([torch.zeros(1), counts.cumsum(0)]).int()
        lengths = torch.tensor([40, 1, 1100], dtype=torch.int32)
        table = torch.randperm(3 * 70, generator=generator()).view(3, 70).int()
        shown = build_tree_mask() if op == "tree_attention" else None
        for element, head_size in product(DTYPES, (128, 64)):
            query = torch.randn(int(cu_rows[-1]), 8, head_size, generator=generator()).to(element)
            caches = torch.full((2, 3 * 70, 16, 2, head_size), torch.nan, dtype=element)
            for blocks, length in zip(table.long(), lengths.tolist(), strict=True):
                slots = torch.arange(length)
                entries = torch.randn(2, length, 2, head_size, generator=generator())
                caches[:, blocks[slots // 16], slots % 16] = entries.to(element)
            args = (query, *caches.unbind(0), table, lengths, cu_rows)
            for mask in (None,) if shown is None else (None, shown):
                options_of = {} if mask is None else {"ancestor_mask": mask}
                expected = getattr(ops, op)(*args, **options_of, backend="reference")
                on_device = moved(args, device), moved(options_of, device)
                ours = getattr(ops, op)(*on_device[0], **on_device[1], backend=backend)
                torch.testing.assert_close(ours.cpu(), expected, **TOLERANCE[element])

    return check


def _decoder_check(vocab, dtype, backend, device):
    """Few rows and many, of sizes that fill no tile; biases and norms of heads, or none."""
    for element, count, is_full in product(DTYPES, (1, 9, 40), (False, True)):
        numbers, size, head_size = generator(), 72, 16
        shapes = {
            "attention_norm": (size,),
            "query_weight": (4 * head_size, size),
            "key_weight": (2 * head_size, size),
            "value_weight": (2 * head_size, size),
            "output_weight": (size, 4 * head_size),
            "mlp_norm": (size,),
            "gate_weight": (83, size),
            "up_weight": (83, size),
            "down_weight": (size, 83),
        }
        if is_full:
            biases = {"query": 64, "key": 32, "value": 32, "output": size}
            shapes |= {f"{name}_bias": (number,) for name, number in biases.items()}
            shapes |= {"query_norm": (head_size,), "key_norm": (head_size,)}
        weights = {
            name: (torch.randn(shape, generator=numbers) * shape[-1] ** -0.5).to(element)
            for name, shape in shapes.items()
        }
        caches = torch.randn(2, 5, 16, 2, head_size, generator=numbers).to(element)
        table = torch.randperm(5, generator=numbers)[None, :4].int()
        places = torch.arange(10, 10 + count)
        cos, sin = torch.rand(2, count, head_size, generator=numbers)
        on_pages = {
            "slot_mapping": table[0, places // 16].long() * 16 + places % 16,
            "block_table": table,
            "context_lens": torch.tensor([10 + count], dtype=torch.int32),
            "cu_rows": torch.tensor([0, count], dtype=torch.int32),
            "cos": cos,
            "sin": sin,
        }
        hidden, outs = torch.randn(count, size, generator=numbers), []
        for where, own in ((torch.device("cpu"), "reference"), (device, backend)):
            layer = ops.LayerWeights(**moved(weights, where))
            keys, values = (cache.to(where, copy=True) for cache in caches)
            given = hidden.to(where), [layer], [keys], [values]
            outs.append(
                ops.decoder_layers(*given, **moved(on_pages, where), eps=1e-5, backend=own).cpu()
            )
        torch.testing.assert_close(outs[1], outs[0], **TOLERANCE[element])


def build_tree_mask() -> Tensor:
    """[BATCH, NUM_NODES, 1] of binary trees."""
    parents = binary_tree(NUM_NODES).repeat(BATCH, 1)
    return ops.build_tree(parents, backend="reference")[1]


def _suffix_check(vocab, dtype, backend, device):
    texts = torch.randint(3, (BATCH, 3000), generator=generator()).int()
    lengths = torch.tensor([3000, 1, 700], dtype=torch.int32)
    for rule in ("latest", "earliest_longest"):
        search = {"min_match": 2, "max_match": 6, "num_tokens": 10, "rule": rule}
        expected = ops.match_suffix(texts, lengths, **search, backend="reference")
        ours = ops.match_suffix(*moved((texts, lengths), device), **search, backend=backend)
        verification.equal((ours,), (expected,))


def penalize_inputs(vocab: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """A row for each node of three trees; history and bias of every other token, or of none."""
    history = torch.arange(0, vocab, 2, dtype=torch.int32)
    bias = torch.arange(vocab // 3, vocab, 2, dtype=torch.int32)
    tokens = torch.randint(vocab, (BATCH, NUM_NODES), generator=generator()).int()
    nodes = torch.arange(BATCH * NUM_NODES, dtype=torch.int32)
    return (
        logits_of(BATCH * NUM_NODES, vocab, dtype),
        nodes // NUM_NODES,
        nodes % NUM_NODES,
        tokens,
        torch.tensor([0, len(history), len(history), len(history)], dtype=torch.int32),
        history,
        history % 4,
        torch.tensor([0, 0, len(bias), len(bias)], dtype=torch.int32),
        bias,
        torch.randn(len(bias), generator=generator()),
        bias % 4,
    )


def _penalize_check(vocab, dtype, backend, device):
    """To the last bit, of chains and of trees."""
    args = penalize_inputs(vocab, dtype)
    values = torch.tensor([[1.3, 0.7, 1.0], [0.5, 0.0, -0.5], [0.1, 0.2, 0.0]])
    names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    penalties = dict(zip(names, values, strict=True))
    for parents in (None, binary_tree(NUM_NODES).expand(BATCH, -1).contiguous()):
        options_of = {**penalties, "parents": parents}
        expected, ours = args[0].clone(), args[0].to(device, copy=True)
        ops.penalize(expected, *args[1:], **options_of, backend="reference")
        on_device = {name: x for name, x in options_of.items() if x is not None}
        ops.penalize(ours, *moved(args[1:], device), **moved(on_device, device), backend=backend)
        verification.equal((ours,), (expected,))


SAMPLING_OPS = (
    "row_stats",
    "logits_to_probs",
    "sample",
    "sample_coupled",
    "penalize",
    "verify_chain",
    "verify_tree",
)
# Attention and the caches first: a wrong one spoils every token after it.
CHECKS: dict[str, Callable] = {
    "tree_attention": _attention_check("tree_attention"),
    "cross_attention": _attention_check("cross_attention"),
    "store_kv": _store_check,
    "compact_kv": _compact_check,
    "decoder_layers": _decoder_check,
    **{op: _rows_check(op) for op in SAMPLING_OPS[:4]},
    "penalize": _penalize_check,
    "verify_chain": _chain_check,
    "verify_tree": _tree_check,
    "build_tree": _build_tree_check,
    "uniform": _uniform_check,
    "match_suffix": _suffix_check,
}


def main() -> int:
    parser = options.parser(__doc__)
    parser.add_argument("--backend", help="this one alone")
    parser.add_argument("--part", type=int, nargs=2, default=(0, 1), metavar=("I", "N"))
    arguments = parser.parse_args()
    device_type = "cpu" if arguments.dry_run else "cuda"
    vocabs = TINY_VOCABS if arguments.dry_run else VOCABS
    chosen = [arguments.backend] if arguments.backend else backends(device_type)
    plan = [
        (f"{name}-{backend}", check)
        for backend in chosen
        for name, check in checks(backend, device_type, vocabs)
    ]
    first, step = arguments.part
    plan = plan[first::step]
    if not plan:
        print(f"{', '.join(chosen)}: no kernels on this {device_type}", flush=True)
        return 1
    failed = []
    for i, (name, check) in enumerate(plan):
        if options.seconds_left(arguments) < 0:
            print(f"{i} of {len(plan)} checks, {len(failed)} failed", flush=True)
            return 1 if failed else UNFINISHED
        try:
            check()
        except AssertionError as error:
            failed.append(name)
            print(f"{name}: {error}", flush=True)
    print(f"{len(plan)} checks, {len(failed)} failed {' '.join(failed[:5])}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
