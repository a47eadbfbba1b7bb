"""Blocks of the paged KV cache: who owns which. Target and drafter share the block tables."""


def blocks_needed(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)


class BlockManager:
    """A free list of block ids; a table grows when its request needs room and is returned whole.

    Rolling back rejected tokens needs no call: a request's length shrinks, its table stays.
    """

    def __init__(self, num_blocks: int, block_size: int):
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def fits(self, num_tokens: int) -> bool:
        """Whether an empty cache could hold that many tokens of one request."""
        return blocks_needed(num_tokens, self.block_size) <= self.num_blocks

    def reserve(self, block_table: list[int], num_tokens: int) -> bool:
        """Grow the table to hold `num_tokens`; False, and no change, if blocks are lacking."""
        missing = blocks_needed(num_tokens, self.block_size) - len(block_table)
        if missing > len(self._free):
            return False
        for _ in range(missing):
            block_table.append(self._free.pop())
        return True

    def release(self, block_table: list[int]) -> None:
        """Return all blocks of a table and empty it."""
        self._free.extend(reversed(block_table))
        block_table.clear()
