"""Launches of the attention kernels: choice of variant, number of programs, scratch memory."""

from dataclasses import dataclass, fields
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastspec_kernels.triton.attention_kernels import STATS, attention_kernel, merge_kernel
from fastspec_kernels.triton.attention_shares import FEW_CHUNK, RUN, TILE
from fastspec_kernels.triton.attention_softmax import LOG2_E
from fastspec_kernels.triton.cache import numbers_or_bytes
from fastspec_kernels.triton.launch import launch

MAX_HEAD_SIZE = 512  # half of it in float32: larger heads do not fit into the registers
FEW_ROWS = 32
PROGRAMS_WANTED = 256  # about two per multiprocessor of a large GPU; no more fit on one
LONG = 2**13  # table slots from which a sequence may be too long for one program
PARTIAL_BYTES = 512 * 2**20  # maximum scratch for shared sequences
_DOT_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@dataclass(frozen=True, eq=False)
class Variant:
    """Compile-time options of an attention kernel, each wrapped for triton.

    Triton looks up the compiled kernel by this object at each launch. Comparing fields took longer
    than the rest of a launch, so variants compare by identity; get them from `variant_of`.
    """

    mask: str  # "chain", "tree" or "cross"
    words: int  # of a row of the ancestor mask
    windowed: bool
    capped: bool
    sinks: bool
    logsumexp: bool
    split: bool
    num_heads: int
    group: int
    head_size: int
    block_size: int
    rows: str  # "few" (up to few_rows packed rows per sequence), "many" (more) or "all"
    few_rows: int
    block_m: int
    block_n: int
    block_d: int
    interpreted: bool
    long_blocks: bool  # offsets in a block of the cache exceed 32 bits
    dot_dtype: tl.dtype
    float8: str  # "no", "native" (the GPU converts it) or "bits" (the kernel does)

    def __post_init__(self):
        """Wrap the fields, because kernels require constants."""
        for field in fields(self):
            object.__setattr__(self, field.name, tl.constexpr(getattr(self, field.name)))


@cache
def variant_of(**choices) -> Variant:
    """Return the one variant with these fields."""
    return Variant(**choices)


@dataclass(frozen=True)
class Scoring:
    """Parameters that turn products into weights."""

    scale: float
    sliding_window: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None
    ancestor_mask: Tensor | None = None
    value_scale: float = 1.0


def tiles(
    rows: str,
    head_size: int,
    itemsize: int,
    is_float8: bool = False,
    is_windowed_tree: bool = False,
    capability: tuple[int, int] = (9, 0),
) -> dict[str, int]:
    """Return tile sizes for few, many or "all" rows; itemsize is that of queries.

    Two steps of keys and values, of up to 16 KiB each, are buffered in shared memory (99 KiB per
    program on some GPUs) while one is multiplied; registers hold three states of block_m rows.
    """
    block_d = max(16, triton.next_power_of_2(head_size))
    narrow = capability[0] == 12 or capability in ((8, 6), (8, 9))
    many = FEW_ROWS if block_d > 128 or is_windowed_tree else 64
    block_m = {"few": FEW_ROWS, "many": many, "all": 16}[rows]
    most = 64
    if rows == "all" or is_windowed_tree or (narrow and (rows == "many" or block_d > 64)):
        most = 32
    if is_float8 and rows == "few":
        most = 32  # bytes and converted values share the registers
    block_n = min(most, 2**14 // (block_d * itemsize))
    return {"rows": rows, "block_m": block_m, "block_n": block_n, "block_d": block_d}


def options(variant: Variant, capability: tuple[int, int]) -> dict[str, int]:
    """Return a variant's compile options, which depend only on kind of rows and head size."""
    # On an H200, 64 rows of size 128 take 1.3 times as long with 8 warps as with 4, although the
    # latter spill; before Hopper they would spill more.
    is_old = variant.rows.value == "many" and capability < (9, 0)
    eight = variant.block_d.value > 128 or is_old
    # Code that must round identically writes its multiply-adds explicitly; the rest may be fused.
    # With three stages the next step's keys and values load while one step's are multiplied.
    return {"num_warps": 8 if eight else 4, "num_stages": 3, "enable_fp_fusion": True}


def room_for_partials(tiles: int, wanted: int, num_rows: int, head_size: int, capacity: int) -> int:
    """Return the partials for sequences shared by several programs; 0 = none, so no merge.

    Args:
        tiles, wanted: minimum and desired number of programs per KV head.
        num_rows: rows of all heads. With very many, as for a long prompt, the merge would cost more
            than sharing gains.
    """
    most = PARTIAL_BYTES // ((head_size + STATS.value) * 4)
    if capacity <= (LONG if tiles > wanted else FEW_CHUNK.value) or num_rows > most // 16:
        return 0
    chunks, runs = -(-capacity // FEW_CHUNK.value), -(-capacity // RUN.value)
    # Units are chunks only where a program's part is less than a run. A tile then has partials of
    # FEW_ROWS rows for chunks of 256 keys, or of twice as many rows for chunks of 512.
    in_chunks = PROGRAMS_WANTED * (RUN.value // FEW_CHUNK.value) * FEW_ROWS
    room = min(num_rows * chunks, max(num_rows * runs, in_chunks)) + num_rows
    return min(room, most)


def most_shares(rows: str, batch: int, num_rows: int, block_m: int, programs: int) -> int:
    """Return the maximum programs per KV head to which `share_of_program` assigns work.

    Args:
        rows: the kernel's kind of rows; num_rows counts those of all sequences.
        programs: number of programs that are distributed by tiles of `TILE` rows.
    """
    if rows == "few":
        return batch + programs
    # What counts once may be several smaller tiles.
    return batch + num_rows // block_m + programs * max(TILE.value // block_m, 1)


def tree_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    cu_rows: Tensor,
    scale: float,
    sliding_window: int,
    softcap: float,
    sinks: Tensor | None,
    ancestor_mask: Tensor | None,
    return_logsumexp: bool,
    value_scale: float,
) -> tuple[Tensor, Tensor]:
    """Run one launch, or two if programs may share a sequence."""
    paged = (key_cache, value_cache, block_table, context_lens, cu_rows)
    scoring = Scoring(scale, sliding_window, softcap, sinks, ancestor_mask, value_scale)
    mask = "chain" if ancestor_mask is None else "tree"
    return _attend(query, *paged, mask, scoring, return_logsumexp)


def cross_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    cu_rows: Tensor,
    scale: float,
    value_scale: float,
) -> Tensor:
    """Like tree_attention, without a tail."""
    paged = (key_cache, value_cache, block_table, context_lens, cu_rows)
    return _attend(query, *paged, "cross", Scoring(scale, value_scale=value_scale), False)[0]


def check_head_size(name: str, head_size: int, dtype: torch.dtype) -> None:
    """Refuse heads that do not fit into the registers."""
    most = MAX_HEAD_SIZE if dtype != torch.float32 else MAX_HEAD_SIZE // 2
    if head_size > most:
        raise ValueError(f"{name}: head size {head_size}, triton takes at most {most} in {dtype}")


def _attend(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    cu_rows: Tensor,
    mask: str,
    scoring: Scoring,
    return_logsumexp: bool,
) -> tuple[Tensor, Tensor]:
    num_tokens, num_heads, head_size = query.shape
    check_head_size("query", head_size, query.dtype)
    num_blocks, block_size, num_kv_heads, _ = key_cache.shape
    batch, width = block_table.shape
    capacity = width * block_size if num_blocks > 0 else 0
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    logsumexp = query.new_empty(query.shape[:2] if return_logsumexp else 0, dtype=torch.float32)
    if out.numel() == 0 or batch == 0:
        return out, logsumexp

    on_gpu = query.device.type == "cuda"
    capability = torch.cuda.get_device_capability(query.device) if on_gpu else (9, 0)
    common, room = choose(query, key_cache, block_table, mask, scoring, return_logsumexp)
    programs = max(PROGRAMS_WANTED // num_kv_heads, 1) if room > 0 else 0
    partial = query.new_empty((room, head_size), dtype=torch.float32)
    partial_stats = query.new_empty((room, STATS.value), dtype=torch.float32)
    shares = context_lens.new_empty((batch, 3) if room > 0 else 0, dtype=torch.int64)
    tree = scoring.ancestor_mask
    sinks = context_lens if scoring.sinks is None else scoring.sinks
    inner, factor = 1.0, scoring.scale * LOG2_E.value
    if scoring.softcap > 0.0:
        inner, factor = scoring.scale / scoring.softcap, scoring.softcap * LOG2_E.value
    window = scoring.sliding_window if common["windowed"] else 0
    num_nodes = 0 if tree is None else tree.shape[1]
    is_windowed_tree = tree is not None and scoring.sliding_window > 0
    sizes = head_size, query.itemsize, common["float8"] != "no", is_windowed_tree
    for rows in kinds_of_rows(query, num_kv_heads, batch, num_nodes):
        variant = variant_of(**common, **tiles(rows, *sizes, capability))
        block_m, num_rows = variant.block_m.value, num_tokens * common["group"]
        num_shares = most_shares(rows, batch, num_rows, block_m, programs)
        launch(
            attention_kernel,
            (num_shares, num_kv_heads),
            query,
            numbers_or_bytes(key_cache),
            numbers_or_bytes(value_cache),
            block_table,
            context_lens,
            cu_rows,
            context_lens if tree is None else tree,
            sinks,
            out,
            logsumexp,
            partial,
            partial_stats,
            shares,
            batch,
            num_blocks,
            capacity,
            num_nodes,
            programs,
            room,
            query.stride(0),
            query.stride(1),
            key_cache.stride(0),
            key_cache.stride(1),
            block_table.stride(0),
            inner,
            factor,
            window,
            scoring.value_scale,
            V=variant,
            **options(variant, capability),
        )
    if room > 0:
        launch(
            merge_kernel,
            (num_tokens, num_heads),
            context_lens,
            cu_rows,
            sinks,
            out,
            logsumexp,
            partial,
            partial_stats,
            shares,
            batch,
            capacity,
            window,
            scoring.value_scale,
            V=variant,
            num_warps=1,
            enable_fp_fusion=True,
        )
    return out, logsumexp


def kinds_of_rows(query: Tensor, num_kv_heads: int, batch: int, num_nodes: int) -> tuple[str, ...]:
    """Return the kinds of sequences that are possible by the shapes; one launch each."""
    num_tokens, num_heads, head_size = query.shape
    if head_size > 256 or (query.dtype == torch.float32 and query.device.type != "cpu"):
        return ("all",)  # small tiles keep the products in registers
    group = num_heads // num_kv_heads
    most = min(num_tokens, num_nodes) if num_nodes > 0 else num_tokens
    if most * group <= FEW_ROWS:
        return ("few",)
    return ("many",) if batch == 1 else ("few", "many")


def choose(
    query: Tensor,
    key_cache: Tensor,
    block_table: Tensor,
    mask: str,
    scoring: Scoring,
    return_logsumexp: bool,
) -> tuple[dict, int]:
    """Return the options shared by all variants of a call, and the room for partials, by shapes."""
    num_tokens, num_heads, head_size = query.shape
    _, block_size, num_kv_heads, _ = key_cache.shape
    batch, width = block_table.shape
    group = num_heads // num_kv_heads
    tree = scoring.ancestor_mask
    num_tiles = num_tokens * group // 64 + batch
    wanted = PROGRAMS_WANTED // num_kv_heads
    rows = num_tokens * num_heads
    room = room_for_partials(num_tiles, wanted, rows, head_size, width * block_size)
    windowed = 0 < scoring.sliding_window < width * block_size
    # The interpreter multiplies the bits of bfloat16 as integers.
    interpreted = query.device.type == "cpu"
    dot_dtype = torch.float32 if interpreted else query.dtype
    common = {
        "mask": mask,
        "words": 1 if tree is None else tree.shape[2],
        "windowed": windowed,
        "capped": scoring.softcap > 0.0,
        "sinks": scoring.sinks is not None,
        "logsumexp": return_logsumexp,
        "split": room > 0,
        "num_heads": num_heads,
        "group": group,
        "head_size": head_size,
        "block_size": block_size,
        "few_rows": FEW_ROWS,
        "interpreted": interpreted,
        "long_blocks": block_size * key_cache.stride(1) >= 2**31,
        "dot_dtype": _DOT_DTYPES[dot_dtype],
        "float8": float8_of(key_cache),
    }
    return common, room


def float8_of(cache: Tensor) -> str:
    """Return how kernels read the cache: Variant.float8."""
    if cache.dtype != torch.float8_e4m3fn:
        return "no"
    if cache.device.type != "cuda":
        return "bits"
    return "native" if torch.cuda.get_device_capability(cache.device) >= (8, 9) else "bits"
