"""Blocks of the paged cache: how many a text needs, and which are free."""


def blocks_needed(num_tokens: int, block_size: int) -> int:
    """Return the number of blocks for `num_tokens` tokens."""
    return -(-num_tokens // block_size)


class Blocks:
    """A free list of block ids; tables grow as their texts need room, and are freed as a whole.

    Attributes:
        num_free: number of blocks in no table.
        num_tokens: capacity of all blocks together.
    """

    def __init__(self, num_blocks: int, block_size: int):
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_tokens = num_blocks * block_size
        self._tenancies = [0] * num_blocks
        self._free_all()

    def tenancy(self, block_id: int) -> int:
        """Return a number that changes when a block is reassigned, which voids its contents."""
        return self._tenancies[block_id]

    def share_with_next(self) -> None:
        """Do nothing: these blocks are never shared."""

    def fits(self, num_tokens: int) -> bool:
        """Whether that many tokens of one text fit in an empty cache."""
        return blocks_needed(num_tokens, self.block_size) <= self.num_blocks

    def reserve(self, block_table: list[int], num_tokens: int) -> bool:
        """Grow the table to hold `num_tokens`; return False, without change, if blocks run out."""
        missing = -(-num_tokens // self.block_size) - len(block_table)
        if missing > self.num_free:
            return False
        for _ in range(missing):
            block_id = self._take()
            self._tenancies[block_id] += 1
            self.num_free -= 1
            block_table.append(block_id)
        return True

    def _take(self) -> int:
        return self._free.pop()

    def _free_all(self) -> None:
        self.num_free = self.num_blocks
        self._free = list(range(self.num_blocks - 1, -1, -1))
