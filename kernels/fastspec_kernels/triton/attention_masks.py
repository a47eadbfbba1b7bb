"""Which keys a query row of a paged context sees: chain, token tree or whole context, windows."""

import triton
import triton.language as tl


@triton.jit
def span(context, num_tokens, oldest, newest, sliding_window, V: tl.constexpr):
    """Bounds of the keys that tokens oldest..newest may see: low, full, full_end, end.

    None sees a key outside low..end; from `full` to full_end, starts of blocks, all see all keys.
    """
    prefix = context - num_tokens
    last_position = prefix + newest
    if V.mask == "chain":
        first_position, end = prefix + oldest, prefix + newest + 1
        full_end = first_position + 1
    elif V.mask == "tree":  # a node that sees no node is before the tree
        first_position, end, full_end = prefix - 1, context, prefix
        last_position = context - 1
    else:
        first_position, end, full_end = context - 1, context, context
    low, full = 0, 0
    if V.windowed:
        low = tl.maximum(first_position - sliding_window + 1, 0)
        full = tl.maximum(last_position - sliding_window + V.block_n, 0) // V.block_n * V.block_n
    return low, full, tl.maximum(full_end, 0) // V.block_n * V.block_n, end


@triton.jit
def row_limits(tree, context, num_tokens, token, V: tl.constexpr):
    """Position of each row, and the two mask words of its node."""
    prefix = context - num_tokens
    position = prefix + token
    low_word = (token * 0).to(tl.int64)
    high_word = low_word
    if V.mask == "tree":
        low_word, high_word = _mask_words(tree, num_tokens, token, V)
        if V.windowed:
            position = prefix + _depths(tree, num_tokens, token, V)
    return position, low_word, high_word


@triton.jit
def visible_keys(
    tree, limits, context, num_tokens, first, sliding_window, N: tl.constexpr, V: tl.constexpr
):
    """[M, N]: whether each row sees each of the keys first..first + N, at most 64."""
    keys = first + tl.arange(0, N)
    position, low_word, high_word = limits
    prefix = context - num_tokens
    key_position = keys
    if V.mask == "chain":
        seen = keys[None, :] <= position[:, None]
    elif V.mask == "tree":
        node = keys - prefix
        words = _window(low_word, high_word, first - prefix)
        low, high = words.to(tl.int32), (words >> 32).to(tl.int32)
        bits = tl.where((node & 32) == 0, low[:, None], high[:, None]) >> (node & 31)
        seen = (bits & 1) == 1
        if V.windowed:
            key_position = tl.where(node < 0, keys, prefix + _depths(tree, num_tokens, node, V))
    else:
        seen = (keys < context)[None, :] & (position == position)[:, None]
    if V.windowed:
        seen = seen & (key_position[None, :] > (position - sliding_window)[:, None])
    return seen


@triton.jit
def _mask_words(tree, num_tokens, node, V: tl.constexpr):
    """The two mask words of each node, without the bits past the nodes of the sequence."""
    words, num_nodes = tree
    inside = (node >= 0) & (node < tl.minimum(num_tokens, num_nodes))
    low = tl.load(words + node * V.words, mask=inside, other=0)
    low = low & _low_bits(num_tokens)
    high = low * 0
    if V.words > 1:
        high = tl.load(words + node * V.words + 1, mask=inside, other=0)
        high = high & _low_bits(num_tokens - 64)
    return low, high


@triton.jit
def _depths(tree, num_tokens, node, V: tl.constexpr):
    """The number of nodes above each; 2D, so that the bits of a node are counted by one thread."""
    words, num_nodes = tree
    word = tl.arange(0, V.words)[None, :]
    inside = (node >= 0) & (node < tl.minimum(num_tokens, num_nodes))
    bits = tl.load(words + node[:, None] * V.words + word, mask=inside[:, None], other=0)
    return tl.sum(_popcount(bits & _low_bits(num_tokens - 64 * word)), 1) - 1


@triton.jit
def _window(low, high, start):
    """Bits start..start + 63 of the words, each at its place modulo 64; those before 0 are set."""
    ends_after_0, ends_after_64 = _low_bits(start + 64), _low_bits(start)
    begins_after_64 = _low_bits(start - 64)
    from_low, from_high = ends_after_0 & ~ends_after_64, ends_after_64 & ~begins_after_64
    return (low & from_low) | (high & from_high) | ~ends_after_0


@triton.jit
def _low_bits(count):
    """A word with its lowest `count` bits set; `count` may lie outside 0..64."""
    one = tl.full([], 1, tl.int64)
    some = (one << tl.minimum(tl.maximum(count, 0), 63).to(tl.int64)) - 1
    return tl.where(count >= 64, -one, some)


@triton.jit
def _popcount(words):
    """Number of set bits, by adding neighbours."""
    x = words.to(tl.uint64)
    x = x - ((x >> 1) & 0x5555555555555555)
    x = (x & 0x3333333333333333) + ((x >> 2) & 0x3333333333333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0F
    return ((x * 0x0101010101010101) >> 56).to(tl.int32)
