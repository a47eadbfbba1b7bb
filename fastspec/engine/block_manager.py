"""Ownership of the paged KV cache's blocks. Target and drafter share the block tables."""

from collections import OrderedDict

from fastspec.engine.prefix_index import Match, PrefixIndex
from fastspec.engine.request import EngineRequest
from fastspec.models.blocks import Blocks, blocks_needed
from fastspec.models.layout import StateKey


class BlockManager(Blocks):
    """Manages the blocks of the target's cache and tracks which of them requests share.

    Rolling back rejected tokens needs no call: a request's length shrinks, its table stays.
    With prefix caching, requests that begin with the same tokens share full blocks of committed
    tokens. The blocks stay findable after the last such request has ended, until their space is
    needed; the least recently used go first. Without prefix caching only samples of the same prompt
    share blocks this way. A table's owner only writes after its full blocks, so a shared block
    never changes.
    """

    def __init__(self, num_blocks: int, block_size: int, prefix_caching: bool = False):
        super().__init__(num_blocks, block_size)
        self.prefix_caching = prefix_caching
        self._index = PrefixIndex(block_size)
        self._idle: OrderedDict[int, None] = OrderedDict()  # findable and in no table, oldest first
        self._num_users = [0] * num_blocks
        self._unshared: set[int] = set()  # in a table, partly filled before `share_with_next`

    def share_with_next(self) -> None:
        """From now on, share a block only if the token after it also matches.

        Blocks filled earlier, and those partly filled now, are no longer found: they lack the
        additional data that is kept with a block from now on.
        """
        if self._index.num_ahead:
            return
        self._index.num_ahead = 1
        self._unshared = {block_id for block_id, users in enumerate(self._num_users) if users}

    def find(self, request: EngineRequest) -> Match:
        """Find a request's cached tokens, without the last one, whose logits are needed."""
        if not (self.prefix_caching or request.root is not None):
            return Match([], None)
        if request.lacks_prompt_logprobs:  # it reads all blocks itself, and others wait for them
            return Match(
                [], self._index.next_key(request.contents, request.token_ids, request.root)
            )
        return self._index.find(request.token_ids, request.root)

    def admit(self, request: EngineRequest, match: Match, num_tokens: int) -> bool:
        """Give a request that has no blocks those of its match, then reserve the rest."""
        shared = [c.block_id for c in match.contents if c.block_id is not None]
        num_idle = sum(block_id in self._idle for block_id in shared)
        missing = blocks_needed(num_tokens, self.block_size) - len(shared)
        if missing > self.num_free - num_idle:
            return False
        self.num_free -= num_idle
        for block_id in shared:
            self._idle.pop(block_id, None)
            self._num_users[block_id] += 1
        request.block_table += shared
        request.contents += match.contents
        request.num_cached = len(shared) * self.block_size
        return self.reserve(request.block_table, num_tokens)

    def publish(self, request: EngineRequest) -> None:
        """Make the full blocks of a request's cached tokens findable by others."""
        if not self.prefix_caching and request.root is None:
            return
        for number in range(len(request.contents), request.num_cached // self.block_size):
            if request.block_table[number] in self._unshared:
                return
            key = self._index.key(request.contents, request.token_ids, number, request.root)
            request.contents.append(self._index.add(key, request.block_table[number]))

    def release(self, request: EngineRequest) -> None:
        """Take all blocks from a request; findable ones keep their contents for now."""
        for block_id in reversed(request.block_table):  # so that the end of a text is evicted first
            self._num_users[block_id] -= 1
            if self._num_users[block_id]:
                continue
            self.num_free += 1
            if block_id in self._index:
                self._idle[block_id] = None
            else:
                self._free.append(block_id)
        self.clear(request)

    def clear(self, request: EngineRequest) -> None:
        """Let a request forget the blocks that it had."""
        request.block_table.clear()
        request.contents.clear()
        request.num_cached = 0
        request.state_key = StateKey()

    def reset(self) -> None:
        """Free all blocks, whose tables nobody uses any more, and forget their contents."""
        num_ahead = self._index.num_ahead
        self._index = PrefixIndex(self.block_size)
        self._index.num_ahead = num_ahead
        self._idle.clear()
        self._unshared.clear()
        self._num_users = [0] * self.num_blocks
        self._free_all()

    def forget(self, request: EngineRequest) -> None:
        """Make the blocks of a request unfindable, because their contents cannot be trusted."""
        for block_id in request.block_table:
            self._index.drop(block_id)

    def _take(self) -> int:
        if self._free:
            block_id = self._free.pop()
        else:
            block_id, _ = self._idle.popitem(last=False)
            self._index.drop(block_id)
        self._num_users[block_id] = 1
        self._unshared.discard(block_id)
        return block_id
