"""Attention of packed query rows over the chunks of a paged cache, and the merge of chunks."""

import triton
import triton.language as tl

from fastspec_kernels.triton.attention_masks import row_limits, span, visible_keys
from fastspec_kernels.triton.attention_softmax import attend_block, finish, is_wild, merge
from fastspec_kernels.triton.cache_kernels import round_to

# Softmax partials belong to fixed stretches of key positions (0..511 is one, whoever reads it), so
# that the bits of a row depend neither on the split nor on how many rows its sequence has.
CHUNK = tl.constexpr(512)
BLOCK_BATCH = tl.constexpr(128)


@triton.jit(do_not_specialize=["batch", "num_blocks", "capacity", "num_nodes", "max_chunks"])
def attention_kernel(
    query,  # [T, H, D]
    key_cache,  # [num_blocks, block_size, G, D]
    value_cache,
    block_table,  # [B, M]
    context_lens,  # [B]
    cu_rows,  # [B + 1]
    ancestor_mask,  # [B, N, words] of a tree
    sinks,  # [H], where V.sinks
    out,  # [T, H, D], unless V.split
    logsumexp,  # [T, H], where V.logsumexp
    partial,  # [T * H, max_chunks, D], where V.split
    partial_stats,  # [T * H, max_chunks, 2], peak and total, where V.split
    batch,
    num_blocks,
    capacity,  # slots in a row of block_table
    num_nodes,
    max_chunks,
    query_token_stride,
    query_head_stride,
    block_stride,
    slot_stride,
    table_stride,
    inner,  # factor of the scores before the cap
    factor,  # factor after it, to units of log2
    sliding_window,
    value_scale,
    V: tl.constexpr,
):
    """Program (tile, KV head, split): packed rows (token, head of the group) over a run of chunks.

    With V.rows "few" only sequences of at most V.block_m rows take part, one tile each, with "many"
    only longer ones. What else is in the batch thus never decides which tensor-core instruction,
    and with it which rounding, a row meets.
    """
    b = tl.program_id(0)
    if V.rows != "few":
        b = _sequence_of_tile(cu_rows, batch, tl.program_id(0), V)
    first_token = tl.load(cu_rows + b)
    tile = _tile_of_sequence(first_token, b, V)
    num_tokens = tl.load(cu_rows + b + 1) - first_token
    num_rows = num_tokens * V.group
    idle = tile * V.block_m >= num_rows
    if V.rows == "few":
        idle = idle | (num_rows > V.block_m)
    if V.rows == "many":
        idle = idle | (num_rows <= V.few_rows)
    if idle:
        return
    context = tl.minimum(tl.maximum(tl.load(context_lens + b), 0), capacity)
    table = block_table + b.to(tl.int64) * table_stride
    paged = (key_cache, value_cache, table, num_blocks, block_stride, slot_stride)
    tree = (ancestor_mask + b.to(tl.int64) * num_nodes * V.words, num_nodes)
    d = tl.arange(0, V.block_d)[None, :]
    token, head, inside, place = _packed_rows(cu_rows, b, V)
    stored = inside[:, None] & (d < V.head_size)
    offset = (place * query_token_stride + head.to(tl.int64) * query_head_stride)[:, None] + d
    q = tl.load(query + offset, mask=stored, other=0.0).to(V.dot_dtype)
    oldest = tile * V.block_m // V.group
    newest = tl.minimum((tile * V.block_m + V.block_m - 1) // V.group, num_tokens - 1)
    low, full_end, end = span(context, num_tokens, oldest, newest, sliding_window, V)
    limits = row_limits(tree, context, num_tokens, token, V)
    scoring = (inner, factor, sliding_window)

    peak, total, mixed = _empty_state(V.block_m, V)
    wild = tl.full([], 0, tl.int32)
    first_chunk = low // CHUNK
    num_chunks = tl.maximum((end + CHUNK - 1) // CHUNK - first_chunk, 0)
    begin = first_chunk + tl.program_id(2) * num_chunks // tl.num_programs(2)
    stop = first_chunk + (tl.program_id(2) + 1) * num_chunks // tl.num_programs(2)
    # Where registers are scarce, what one loop needs must not fill them in another.
    SCARCE: tl.constexpr = V.rows != "few" or V.mask == "tree"
    for chunk in tl.range(begin, stop, disable_licm=SCARCE):
        start = tl.maximum(chunk * CHUNK, low // V.block_n * V.block_n)
        bounds = (start, full_end, tl.minimum(chunk * CHUNK + CHUNK, end))
        part_peak, part_total, part_mixed, wild = _attend_chunk(
            q, paged, tree, scoring, limits, context, num_tokens, bounds, wild, V
        )
        if V.split:
            if SCARCE:
                token, head, inside, place = _packed_rows(cu_rows, b, V)
                stored = inside[:, None] & (d < V.head_size)
            target = (place * V.num_heads + head) * max_chunks + chunk
            tl.store(partial + target[:, None] * V.head_size + d, part_mixed, mask=stored)
            tl.store(partial_stats + target * 2, part_peak, mask=inside)
            tl.store(partial_stats + target * 2 + 1, part_total, mask=inside)
        else:
            peak, total, mixed = merge((peak, total, mixed), (part_peak, part_total, part_mixed))
    token, head, inside, place = _packed_rows(cu_rows, b, V)
    place = place * V.num_heads + head
    if not V.split:
        state = (peak, total, mixed)
        _store_rows(out, logsumexp, sinks, state, value_scale, place, head, inside, V)
    if wild > 0:  # rare: spoil the columns that such values are in, for the rows that see them
        tl.debug_barrier()
        target, per_row, chunk_size = (
            (partial, max_chunks, CHUNK) if V.split else (out, 1, capacity)
        )
        stored = inside[:, None] & (d < V.head_size)
        limits = row_limits(tree, context, num_tokens, token, V)
        nan = tl.full([V.block_m, V.block_d], float("nan"), tl.float32)
        first = tl.maximum(tl.maximum(begin * CHUNK, full_end), low // V.block_n * V.block_n)
        for number in range(first, tl.minimum(stop * CHUNK, end)):
            key = number + tl.arange(0, 1)
            sees = visible_keys(tree, limits, context, num_tokens, number, sliding_window, 1, V)
            entry = place * per_row + key // chunk_size
            tl.store(
                target + entry[:, None] * V.head_size + d,
                nan.to(target.dtype.element_ty),
                mask=stored & sees & is_wild(paged, key, V),
            )


@triton.jit
def _sequence_of_tile(cu_rows, batch, tile, V: tl.constexpr):
    """The sequence of a tile.

    Sequence b starts at tile cu_rows[b] * group // block_m + b, which leaves room for all its rows.
    """
    found = tl.full([], 0, tl.int32)
    for first in range(0, batch, BLOCK_BATCH):
        index = first + tl.arange(0, BLOCK_BATCH)
        inside = index < batch
        starts = tl.load(cu_rows + index, mask=inside, other=0) * V.group // V.block_m + index
        found += tl.sum((inside & (starts <= tile)).to(tl.int32), 0)
    return found - 1


@triton.jit
def _tile_of_sequence(first_token, b, V: tl.constexpr):
    """The number of this program's tile in sequence b."""
    tile = 0
    if V.rows != "few":
        tile = tl.program_id(0) - (first_token * V.group // V.block_m + b)
    return tile


@triton.jit
def _packed_rows(cu_rows, b, V: tl.constexpr):
    """Token and head of each row, whether the sequence has it, and the token's place in the batch.

    After a loop these are worked out anew, as kept values would take up registers all through it;
    the volatile loads make the compiler do so.
    """
    first_token = tl.load(cu_rows + b, volatile=True)
    num_rows = (tl.load(cu_rows + b + 1, volatile=True) - first_token) * V.group
    tile = _tile_of_sequence(first_token, b, V)
    row = tile * V.block_m + tl.arange(0, V.block_m)
    token, head = row // V.group, tl.program_id(1) * V.group + row % V.group
    return token, head, row < num_rows, (first_token + token).to(tl.int64)


@triton.jit
def _attend_chunk(
    q, paged, tree, scoring, limits, context, num_tokens, bounds, wild, V: tl.constexpr
):
    """The state of the rows after the keys start..end: whole blocks first, then masked ones."""
    inner, factor, sliding_window = scoring
    start, full_end, end = bounds
    peak, total, mixed = _empty_state(V.block_m, V)
    if not V.windowed:
        for first in range(start, tl.minimum(full_end, end), V.block_n):
            state = (peak, total, mixed, wild)
            peak, total, mixed, wild = attend_block(
                state, q, paged, first, end, None, inner, factor, False, V
            )
    MANY: tl.constexpr = V.rows != "few"
    for first in tl.range(
        tl.maximum(start, full_end),
        end,
        V.block_n,
        num_stages=2 if MANY else 1,  # as many as the registers allow
        disable_licm=MANY and V.mask == "tree",  # for the mask words' sake
    ):
        state = (peak, total, mixed, wild)
        seen = visible_keys(tree, limits, context, num_tokens, first, sliding_window, V.block_n, V)
        peak, total, mixed, wild = attend_block(
            state, q, paged, first, end, seen, inner, factor, True, V
        )
    return peak, total, mixed, wild


@triton.jit
def _empty_state(BLOCK_M: tl.constexpr, V: tl.constexpr):
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.full([BLOCK_M], 0.0, tl.float32)
    return peak, total, tl.full([BLOCK_M, V.block_d], 0.0, tl.float32)


@triton.jit
def _store_rows(out, logsumexp, sinks, state, value_scale, place, head, inside, V: tl.constexpr):
    result, log_total = finish(state, sinks, head, inside, V)
    if V.float8 != "no":
        result = result * value_scale
    d = tl.arange(0, V.block_d)
    stored = inside[:, None] & (d < V.head_size)[None, :]
    target = out + place[:, None] * V.head_size + d[None, :]
    tl.store(target, round_to(result, out.dtype.element_ty, V.interpreted), mask=stored)
    if V.logsumexp:
        tl.store(logsumexp + place, log_total, mask=inside)


@triton.jit(do_not_specialize=["batch", "capacity", "max_chunks"])
def merge_kernel(
    context_lens,
    cu_rows,
    sinks,
    out,
    logsumexp,
    partial,
    partial_stats,
    batch,
    capacity,
    max_chunks,
    sliding_window,
    value_scale,
    V: tl.constexpr,
):
    """Program (token, block of heads): merge the chunks that the token may see, in their order."""
    token = tl.program_id(0)
    b = tl.full([], 0, tl.int32)
    for first in range(0, batch, BLOCK_BATCH):
        index = first + tl.arange(0, BLOCK_BATCH)
        ends = tl.load(cu_rows + 1 + index, mask=index < batch, other=2147483647)
        b += tl.sum((ends <= token).to(tl.int32), 0)
    if b >= batch:
        return
    first_token = tl.load(cu_rows + b)
    num_tokens = tl.load(cu_rows + b + 1) - first_token
    context = tl.minimum(tl.maximum(tl.load(context_lens + b), 0), capacity)
    number = token - first_token
    low, _, end = span(context, num_tokens, number, number, sliding_window, V)

    head = tl.program_id(1) * V.merge_m + tl.arange(0, V.merge_m)
    inside = head < V.num_heads
    d = tl.arange(0, V.block_d)
    stored = inside[:, None] & (d < V.head_size)[None, :]
    place = token.to(tl.int64) * V.num_heads + head
    peak, total, mixed = _empty_state(V.merge_m, V)
    for chunk in tl.range(low // CHUNK, (end + CHUNK - 1) // CHUNK, loop_unroll_factor=4):
        source = place * max_chunks + chunk
        part_mixed = tl.load(
            partial + source[:, None] * V.head_size + d[None, :], mask=stored, other=0.0
        )
        part_peak = tl.load(partial_stats + source * 2, mask=inside, other=0.0)
        part_total = tl.load(partial_stats + source * 2 + 1, mask=inside, other=0.0)
        part = (part_peak, part_total, part_mixed)
        peak, total, mixed = merge((peak, total, mixed), part)
    state = (peak, total, mixed)
    _store_rows(out, logsumexp, sinks, state, value_scale, place, head, inside, V)
