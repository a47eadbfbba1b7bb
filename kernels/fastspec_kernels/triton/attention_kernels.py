"""Attention of packed query rows over the chunks of a paged cache, and the merge of chunks."""

import triton
import triton.language as tl

from fastspec_kernels.triton.attention_masks import row_limits, span, visible_keys
from fastspec_kernels.triton.attention_softmax import (
    attend_block,
    block_numbers,
    finish,
    is_wild,
    merge,
)
from fastspec_kernels.triton.cache_kernels import round_to

# The keys of a row are added up in a fixed tree: blocks of keys in their order within a chunk,
# chunks in their order within a run, and then the runs. Chunks and runs are stretches of key
# positions (0..511 is a chunk, whoever reads it), and a split writes the state of each of its
# chunks or of each of its runs, so that the bits of a row depend neither on the split nor, within
# one kind of rows (few or many), on how many rows its sequence has.
CHUNK = tl.constexpr(512)
RUN = tl.constexpr(2048)
BLOCK_BATCH = tl.constexpr(128)


@triton.jit(do_not_specialize=["batch", "num_blocks", "capacity", "num_nodes", "num_partials"])
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
    partial,  # [T * H, num_partials, D], where V.split
    partial_stats,  # [T * H, num_partials, 2], peak and total, where V.split
    batch,
    num_blocks,
    capacity,  # slots in a row of block_table
    num_nodes,
    num_partials,
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
    low, full, full_end, end = span(context, num_tokens, oldest, newest, sliding_window, V)

    unit = _keys_of_partial(context, num_tokens, sliding_window, tl.num_programs(2), V)
    first_unit = low // unit
    num_units = tl.maximum((end + unit - 1) // unit - first_unit, 0)
    begin = (first_unit + tl.program_id(2) * num_units // tl.num_programs(2)) * unit
    stop = (first_unit + (tl.program_id(2) + 1) * num_units // tl.num_programs(2)) * unit
    begin, stop = tl.maximum(begin, low // V.block_n * V.block_n), tl.minimum(stop, end)
    if V.split and begin >= stop:
        return
    store = (partial, partial_stats, num_partials, cu_rows, b, unit)
    state = _empty_state(V.block_m, V)
    run, whole = state, state
    wild = tl.full([], 0, tl.int32)
    for part in tl.range(0 if V.windowed else 1, 2, disable_licm=True):
        first_full, first_masked, part_end = _part(part, begin, full, full_end, stop)
        block = block_numbers(paged, first_full, stop, V)
        for first in tl.range(first_full, first_masked, V.block_n):
            later = block_numbers(paged, first + V.block_n, stop, V)
            state, wild = attend_block(
                state, wild, q, paged, block, first, end, None, inner, factor, False, V
            )
            block = later
            state, run, whole = _fold(state, run, whole, first + V.block_n, stop, store, V)
        for first in tl.range(first_masked, part_end, V.block_n, num_stages=1, disable_licm=True):
            token, _, _, _ = _packed_rows(cu_rows, b, V)
            limits = row_limits(tree, context, num_tokens, token, V)
            block = block_numbers(paged, first, stop, V)
            seen = visible_keys(
                tree, limits, context, num_tokens, first, sliding_window, V.block_n, V
            )
            state, wild = attend_block(
                state, wild, q, paged, block, first, end, seen, inner, factor, True, V
            )
            state, run, whole = _fold(state, run, whole, first + V.block_n, stop, store, V)
    run = merge(run, state)
    if V.split:
        _store_partial(run, stop - 1, store, V)
    token, head, inside, place = _packed_rows(cu_rows, b, V)
    place = place * V.num_heads + head
    if not V.split:
        whole = merge(whole, run)
        _store_rows(out, logsumexp, sinks, whole, value_scale, place, head, inside, V)
    if wild > 0:  # rare: spoil the columns that such values are in, for the rows that see them
        tl.debug_barrier()
        stored = inside[:, None] & (d < V.head_size)
        limits = row_limits(tree, context, num_tokens, token, V)
        nan = tl.full([V.block_m, V.block_d], float("nan"), tl.float32)
        for part in range(0 if V.windowed else 1, 2):
            _, first_masked, part_end = _part(part, begin, full, full_end, stop)
            for number in range(first_masked, part_end):
                key = number + tl.arange(0, 1)
                sees = visible_keys(tree, limits, context, num_tokens, number, sliding_window, 1, V)
                target, entry = out, place
                if V.split:
                    target, entry = partial, place * num_partials + number // unit % num_partials
                tl.store(
                    target + entry[:, None] * V.head_size + d,
                    nan.to(target.dtype.element_ty),
                    mask=stored & sees & is_wild(paged, key, V),
                )


@triton.jit
def _keys_of_partial(context, num_tokens, sliding_window, splits, V: tl.constexpr):
    """A chunk where that suffices to give each program of a split one of them, else a run."""
    unit = RUN
    if V.split:
        prefix = context - num_tokens
        if V.windowed:
            prefix = tl.minimum(prefix, sliding_window)
        unit = tl.where(prefix + num_tokens <= splits * CHUNK, CHUNK, RUN)
    return unit


@triton.jit
def _part(part, begin, full, full_end, stop):
    """The keys begin..stop, in part 0 those below `full`: where the unmasked, masked ones start."""
    if part == 0:
        first_full, first_masked, end = begin, begin, tl.minimum(full, stop)
    else:
        first_full = tl.maximum(begin, full)
        end = stop
        first_masked = tl.maximum(first_full, tl.minimum(full_end, stop))
    return first_full, first_masked, end


@triton.jit
def _fold(state, run, whole, number, stop, store, V: tl.constexpr):
    """Pass on what is complete with the keys below `number`; nothing where that is the last one."""
    unit = store[5]
    if number % CHUNK == 0:
        run = merge(run, state)
        state = _empty_state(V.block_m, V)
        if (number % unit == 0) & (number < stop):
            if V.split:
                _store_partial(run, number - 1, store, V)
            else:
                whole = merge(whole, run)
            run = state
    return state, run, whole


@triton.jit
def _store_partial(state, last_key, store, V: tl.constexpr):
    partial, partial_stats, num_partials, cu_rows, b, unit = store
    peak, total, mixed = state
    d = tl.arange(0, V.block_d)[None, :]
    _, head, inside, place = _packed_rows(cu_rows, b, V)
    target = (place * V.num_heads + head) * num_partials + last_key // unit % num_partials
    stored = inside[:, None] & (d < V.head_size)
    tl.store(partial + target[:, None] * V.head_size + d, mixed, mask=stored)
    tl.store(partial_stats + target * 2, peak, mask=inside)
    tl.store(partial_stats + target * 2 + 1, total, mask=inside)


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


@triton.jit(do_not_specialize=["batch", "capacity", "num_partials", "splits"])
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
    num_partials,
    splits,
    sliding_window,
    value_scale,
    V: tl.constexpr,
):
    """Program (token, head): merge the partials of what the token may see, in order.

    One warp, as it has to wait for nobody; the loads of the next partials are on their way.
    """
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
    low, _, _, end = span(context, num_tokens, number, number, sliding_window, V)
    unit = _keys_of_partial(context, num_tokens, sliding_window, splits, V)

    head = tl.program_id(1) + tl.arange(0, 1)
    inside = head < V.num_heads
    d = tl.arange(0, V.block_d)
    stored = inside[:, None] & (d < V.head_size)[None, :]
    place = token.to(tl.int64) * V.num_heads + head
    whole = _empty_state(1, V)
    run = whole
    for index in tl.range(low // unit, (end + unit - 1) // unit, num_stages=8):
        source = place * num_partials + index % num_partials
        part_mixed = tl.load(
            partial + source[:, None] * V.head_size + d[None, :], mask=stored, other=0.0
        )
        part_peak = tl.load(partial_stats + source * 2, mask=inside, other=0.0)
        part_total = tl.load(partial_stats + source * 2 + 1, mask=inside, other=0.0)
        run = merge(run, (part_peak, part_total, part_mixed))
        if (index + 1) * unit % RUN == 0:
            whole = merge(whole, run)
            run = _empty_state(1, V)
    whole = merge(whole, run)
    _store_rows(out, logsumexp, sinks, whole, value_scale, place, head, inside, V)
