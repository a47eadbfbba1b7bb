"""Attention of packed query rows over the chunks of a paged cache, and the merge of chunks."""

import triton
import triton.language as tl

from fastspec_kernels.triton.attention_masks import row_limits, span, visible_keys
from fastspec_kernels.triton.attention_shares import (
    BLOCK_BATCH,
    CHUNK,
    FEW_CHUNK,
    RUN,
    share_of_program,
)
from fastspec_kernels.triton.attention_softmax import (
    attend_block,
    block_numbers,
    finish,
    is_wild,
    merge,
)
from fastspec_kernels.triton.cache_kernels import round_to

PARTS = tl.constexpr(RUN.value // FEW_CHUNK.value)  # partials loaded together: of a run, at most
AT_ONCE = tl.constexpr(128)  # partials whose factors are found together: a multiple of PARTS
STATS = tl.constexpr(4)  # peak, total, and the merge's factors of what precedes and of the partial
_STORE_ONE = tl.constexpr(
    "{.reg .pred p; setp.ne.s32 p, $3, 0; @p st.global.f32 [$1], $2; mov.b32 $0, 0;}"
)
_STORE_PAIR = tl.constexpr(
    "{.reg .pred p; setp.ne.s32 p, $6, 0; @p st.global.v2.f32 [$2], {$4, $5};"
    " mov.b32 $0, 0; mov.b32 $1, 0;}"
)

# The keys of a row are accumulated in a fixed tree: blocks of keys in order within a chunk, chunks
# in order within a run, and then the runs. If several programs share a sequence, each writes the
# state of each of its chunks or runs, and a second kernel merges them; a program that has a
# sequence to itself accumulates its runs. So the bits of a row depend neither on the sharing nor,
# within one kind of rows (few or many), on the number of rows of its sequence.


@triton.jit(do_not_specialize=["batch", "num_blocks", "capacity", "num_nodes", "programs", "room"])
def attention_kernel(
    query,  # [T, H, D]
    key_cache,  # [num_blocks, block_size, G, D]
    value_cache,
    block_table,  # [B, M]
    context_lens,  # [B]
    cu_rows,  # [B + 1]
    ancestor_mask,  # [B, N, words] of a tree
    sinks,  # [H], where V.sinks
    out,  # [T, H, D]
    logsumexp,  # [T, H], where V.logsumexp
    partial,  # [room, D] of shared sequences, if V.split
    partial_stats,  # [room, STATS], if V.split
    shares,  # [B, 3] int64, if V.split: results of share_of_program for each sequence
    batch,
    num_blocks,
    capacity,  # slots in a row of block_table
    num_nodes,
    programs,  # to distribute, per KV head
    room,
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
    """Program (share, KV head): a tile of packed rows (token, head of the group) over some keys.

    With V.rows "few" only sequences of at most V.block_m rows take part, one tile each, with "many"
    only longer ones. So the tensor-core instruction that a row uses, and with it its rounding,
    never depends on the rest of the batch.
    """
    lengths = (context_lens, cu_rows, batch, capacity, sliding_window)
    b, tile, part, parts, unit, length, base = share_of_program(lengths, programs, room, V)
    base = tl.where(length > 0, base, -1).to(tl.int32)
    if not V.split:
        part, parts, unit, base = 0, 1, RUN, -1
    if b >= batch:
        return
    num_tokens = tl.load(cu_rows + b + 1) - tl.load(cu_rows + b)
    num_rows = num_tokens * V.group
    idle = num_rows <= 0
    if V.rows == "few":
        idle = idle | (num_rows > V.block_m)
    if idle:
        return
    if V.split:  # for the merge; all programs of a sequence write the same
        share = shares + b * 3
        tl.store(share, unit.to(tl.int64))
        tl.store(share + 1, length.to(tl.int64))
        tl.store(share + 2, base.to(tl.int64))
        tl.debug_barrier()
    context = tl.minimum(tl.maximum(tl.load(context_lens + b), 0), capacity)
    table = block_table + b.to(tl.int64) * table_stride
    paged = (key_cache, value_cache, table, num_blocks, block_stride, slot_stride)
    tree = (ancestor_mask + b.to(tl.int64) * num_nodes * V.words, num_nodes)
    d = tl.arange(0, V.block_d)[None, :]
    token, head, inside, place = _packed_rows(cu_rows, b, tile, False, V)
    stored = inside[:, None] & (d < V.head_size)
    offset = (place * query_token_stride + head.to(tl.int64) * query_head_stride)[:, None] + d
    q = tl.load(query + offset, mask=stored, other=0.0).to(V.dot_dtype)
    oldest = tile * V.block_m // V.group
    newest = tl.minimum((tile * V.block_m + V.block_m - 1) // V.group, num_tokens - 1)
    low, full, full_end, end = span(context, num_tokens, oldest, newest, sliding_window, V)

    first_unit = low // unit
    num_units = tl.maximum((end + unit - 1) // unit - first_unit, 0)
    begin = (first_unit + part * num_units // parts) * unit
    stop = (first_unit + (part + 1) * num_units // parts) * unit
    begin, stop = tl.maximum(begin, low // V.block_n * V.block_n), tl.minimum(stop, end)
    if (parts > 1) & (begin >= stop):
        return
    store = (partial, partial_stats, shares, unit, base, tile, cu_rows, b)
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
            token, _, _, _ = _packed_rows(cu_rows, b, tile, True, V)
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
    token, head, inside, place = _packed_rows(cu_rows, b, tile, True, V)
    place = place * V.num_heads + head
    if V.split & (base >= 0):
        _store_partial(run, stop - 1, store, V)
    else:
        whole = merge(whole, run)
        _store_rows(out, logsumexp, sinks, whole, value_scale, place, head, inside, V)
    if wild > 0:  # rare: spoil the columns with such values for the rows that see them
        tl.debug_barrier()
        stored = inside[:, None] & (d < V.head_size)
        limits = row_limits(tree, context, num_tokens, token, V)
        nan = tl.full([V.block_m, V.block_d], float("nan"), tl.float32)
        for part in range(0 if V.windowed else 1, 2):
            _, first_masked, part_end = _part(part, begin, full, full_end, stop)
            for number in range(first_masked, part_end):
                key = number + tl.arange(0, 1)
                sees = visible_keys(tree, limits, context, num_tokens, number, sliding_window, 1, V)
                spoilt = stored & sees & is_wild(paged, key, V)
                if V.split & (base >= 0):
                    num_partials = _partials_per_row(shares, b, V)
                    entry = _entry(token, head, number // unit, num_partials, V)
                    place_of = (base + entry).to(tl.int64)[:, None] * V.head_size
                    tl.store(partial + place_of + d, nan, mask=spoilt)
                else:
                    rounded = nan.to(out.dtype.element_ty)
                    tl.store(out + place[:, None] * V.head_size + d, rounded, mask=spoilt)


@triton.jit
def _part(part, begin, full, full_end, stop):
    """The keys begin..stop, in part 0 those below `full`: starts of unmasked and masked ones."""
    if part == 0:
        first_full, first_masked, end = begin, begin, tl.minimum(full, stop)
    else:
        first_full = tl.maximum(begin, full)
        end = stop
        first_masked = tl.maximum(first_full, tl.minimum(full_end, stop))
    return first_full, first_masked, end


@triton.jit
def _fold(state, run, whole, number, stop, store, V: tl.constexpr):
    """Pass on what the keys below `number` complete; nothing if `number` is the last one."""
    if number % (FEW_CHUNK if V.rows == "few" else CHUNK) == 0:
        unit, base = store[3], store[4]
        run = merge(run, state)
        state = _empty_state(V.block_m, V)
        if (number % unit == 0) & (number < stop):
            if V.split & (base >= 0):
                _store_partial(run, number - 1, store, V)
            else:
                whole = merge(whole, run)
            run = state
    return state, run, whole


@triton.jit
def _store_partial(state, last_key, store, V: tl.constexpr):
    """Write a part of a shared sequence."""
    partial, partial_stats, shares, unit, base, tile, cu_rows, b = store
    length = _partials_per_row(shares, b, V)
    d = tl.arange(0, V.block_d)[None, :]
    token, head, inside, _ = _packed_rows(cu_rows, b, tile, True, V)
    entry = _entry(token, head, last_key // unit, length, V)
    stats = partial_stats + (base + entry) * STATS
    target = partial + (base + entry).to(tl.int64)[:, None] * V.head_size + d
    peak, total, mixed = state
    _store_in_place(target, mixed, inside[:, None] & (d < V.head_size), V)
    tl.store(stats, peak, mask=inside)
    tl.store(stats + 1, total, mask=inside)


@triton.jit
def _store_in_place(target, values, stored, V: tl.constexpr):
    """Store float32 values out of the registers that hold them.

    tl.store would first sort them in shared memory, which the keys on their way to a multiprocessor
    fill: of 64 rows, one program instead of two would fit.
    """
    if V.interpreted:
        tl.store(target, values, mask=stored)
    else:
        # The results of products lie in pairs of columns, which are both stored or neither; those
        # of the smallest heads need not.
        IN_PAIRS: tl.constexpr = V.head_size % 2 == 0 and V.block_d > 16
        tl.inline_asm_elementwise(
            _STORE_PAIR if IN_PAIRS else _STORE_ONE,
            "=r,=r,l,l,f,f,r,r" if IN_PAIRS else "=r,l,f,r",
            [target.to(tl.int64), values, tl.broadcast_to(stored, values.shape).to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=2 if IN_PAIRS else 1,
        )


@triton.jit
def _entry(token, head, index, length, V: tl.constexpr):
    """The partials of rows and a unit of keys, counted from the sequence's first one."""
    return (token * V.num_heads + head) * length + _in_row(index, length, V)


@triton.jit
def _in_row(index, length, V: tl.constexpr):
    """The place of a unit of keys among the partials of a row."""
    if V.windowed:
        index = index % length
    return index


@triton.jit
def _packed_rows(cu_rows, b, tile, AGAIN: tl.constexpr, V: tl.constexpr):
    """Token and head of each row, whether the sequence has it, and the token's place in the batch.

    Computed AGAIN after a loop, because keeping the values would occupy registers throughout.
    """
    if AGAIN:
        first_token, end = _load_again(cu_rows + b, V), _load_again(cu_rows + b + 1, V)
    else:
        first_token, end = tl.load(cu_rows + b), tl.load(cu_rows + b + 1)
    num_rows = (end - first_token) * V.group
    row = tl.minimum(tile, num_rows) * V.block_m + tl.arange(0, V.block_m)
    token, head = row // V.group, tl.program_id(1) * V.group + row % V.group
    return token, head, row < num_rows, (first_token + token).to(tl.int64)


@triton.jit
def _load_again(pointer, V: tl.constexpr):
    """Load a 32-bit integer again, so that no register holds it in between.

    The compiler may neither move nor drop this load. Unlike a volatile load, it may be answered by
    the L1.
    """
    if V.interpreted:
        return tl.load(pointer)
    return tl.inline_asm_elementwise(
        "ld.global.ca.b32 $0, [$1];",
        "=r,l",
        [pointer.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _partials_per_row(shares, b, V: tl.constexpr):
    """Partials per row of a shared sequence: the low half of an int64."""
    return _load_again((shares + b * 3 + 1).to(tl.pointer_type(tl.int32)), V)


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


@triton.jit(do_not_specialize=["batch", "capacity"])
def merge_kernel(
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
    sliding_window,
    value_scale,
    V: tl.constexpr,
):
    """Program (token, head): merge the partials of the keys that the token may see, in order.

    Only for shared sequences. One warp, for which a barrier costs next to nothing.
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
    unit = tl.load(shares + b * 3).to(tl.int32)
    length = tl.load(shares + b * 3 + 1).to(tl.int32)
    base = tl.load(shares + b * 3 + 2)
    if length == 0:
        return
    first, end = low // unit, (end + unit - 1) // unit

    own = base + _entry(number, tl.program_id(1), 0, length, V)
    stats = partial_stats + own * STATS
    _store_factors(stats, first, end, unit, length, V)
    tl.debug_barrier()  # each thread loads what others stored
    d = tl.arange(0, V.block_d)
    partial += own * V.head_size + d
    per_group = RUN // unit if unit < RUN else PARTS  # the chunks of a run, or several runs
    whole = _empty_state(1, V)
    peak, total = tl.full([], float("-inf"), tl.float32), tl.full([], 0.0, tl.float32)
    mixed = tl.full([V.block_d], 0.0, tl.float32)
    for group in tl.range(first // per_group, (end + per_group - 1) // per_group, num_stages=3):
        for part in tl.static_range(PARTS):
            index = group * per_group + part
            there = (part < per_group) & (index >= first) & (index < end)
            place = _in_row(index, length, V)
            part_peak = tl.load(stats + place * STATS, mask=there, other=-float("inf"))
            part_total = tl.load(stats + place * STATS + 1, mask=there, other=0.0)
            decay = tl.load(stats + place * STATS + 2, mask=there, other=1.0)
            part_decay = tl.load(stats + place * STATS + 3, mask=there, other=0.0)
            seen = d < tl.where(there, V.head_size, 0)
            part_mixed = tl.load(partial + place * V.head_size, mask=seen, other=0.0)
            peak = tl.maximum(peak, part_peak)  # as in `merge`
            total = tl.fma(part_total, part_decay, total * decay)
            mixed = tl.fma(part_mixed, part_decay, mixed * decay)
        if unit < RUN:
            whole = merge(whole, _state_of_row(peak, total, mixed))
            peak, total, mixed = float("-inf"), 0.0, tl.full([V.block_d], 0.0, tl.float32)
    if unit == RUN:
        whole = _state_of_row(peak, total, mixed)
    head = tl.program_id(1) + tl.arange(0, 1)
    place = token.to(tl.int64) * V.num_heads + head
    _store_rows(out, logsumexp, sinks, whole, value_scale, place, head, head < V.num_heads, V)


@triton.jit
def _state_of_row(peak, total, mixed):
    nothing = tl.full([1], 0.0, tl.float32)
    return nothing + peak, nothing + total, mixed[None, :]


@triton.jit
def _store_factors(stats, first, end, unit, length, V: tl.constexpr):
    """Store the factors that `merge` would multiply each partial by, and what precedes it.

    What precedes is the earlier part of its run or, if partials are runs, all earlier runs. One
    partial after another would take most of the merge's time.
    """
    peak_of_earlier = tl.full([], float("-inf"), tl.float32)
    for several in range(first // AT_ONCE * AT_ONCE, end, AT_ONCE):
        index = several + tl.arange(0, AT_ONCE)
        own = stats + _in_row(index, length, V) * STATS
        there = (index >= first) & (index < end)
        peak = tl.load(own, mask=there, other=-float("inf"))
        begins = (index <= first) | ((unit < RUN) & (index * unit % RUN == 0))
        last = stats + _in_row(tl.maximum(index - 1, 0), length, V) * STATS
        last_peak = tl.load(last, mask=there & (begins == 0), other=-float("inf"))
        peak_before, _ = tl.associative_scan((last_peak, begins.to(tl.int32)), 0, _peak_of_both)
        peak_before = tl.maximum(peak_before, peak_of_earlier)
        new_peak = tl.maximum(peak_before, peak)
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        tl.store(own + 2, tl.exp2(peak_before - base), mask=there)
        tl.store(own + 3, tl.exp2(peak - base), mask=there)
        if unit == RUN:  # chunks: no run spans two blocks
            peak_of_earlier = tl.maximum(peak_of_earlier, tl.max(peak, 0))


@triton.jit
def _peak_of_both(peak, begins, later_peak, later_begins):
    """Combine two stretches of a running maximum that restarts where `begins` is set."""
    both = tl.where(later_begins != 0, later_peak, tl.maximum(peak, later_peak))
    return both, begins | later_begins
