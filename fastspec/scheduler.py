"""Which requests run in a step, and where their blocks come from."""

from collections import deque

from fastspec.block_manager import BlockManager, blocks_needed
from fastspec.request import Request


class Scheduler:
    """First come, first served; when blocks run out the youngest request waits and is read again.

    Invariant: any one request fits the whole cache, so the oldest always makes progress.
    """

    def __init__(self, block_manager: BlockManager, max_batch_size: int):
        self.block_manager = block_manager
        self.max_batch_size = max_batch_size
        self.running: list[Request] = []
        self._waiting: deque[Request] = deque()

    @property
    def has_unfinished(self) -> bool:
        return bool(self.running or self._waiting)

    def check_fits(self, request: Request) -> None:
        """Raise ValueError when the request, even alone, would outgrow the cache."""
        manager = self.block_manager
        if not manager.fits(request.max_len):
            needed = blocks_needed(request.max_len, manager.block_size)
            raise ValueError(
                f"num_blocks: no room in the cache: {request.num_prompt_tokens} prompt tokens and"
                f" {request.max_len - request.num_prompt_tokens} new ones need {needed} blocks of"
                f" {manager.block_size}, the cache has {manager.num_blocks}"
            )

    def add(self, request: Request) -> None:
        """Queue a request that fits."""
        self._waiting.append(request)

    def schedule(self, num_draft_tokens: int) -> list[Request]:
        """Reserve room for the next step of as many requests as possible; who lost their blocks.

        Afterwards `running` holds the requests of the step.
        """
        preempted: list[Request] = []
        scheduled = 0
        while scheduled < len(self.running):
            if self._reserve(self.running[scheduled], num_draft_tokens):
                scheduled += 1
            else:
                preempted.append(self._preempt_youngest())
        while not preempted and self._waiting and len(self.running) < self.max_batch_size:
            if not self._reserve(self._waiting[0], num_draft_tokens):
                break
            self.running.append(self._waiting.popleft())
        return preempted

    def remove(self, request_id: str) -> Request | None:
        """Take a request out, wherever it is, and free its blocks."""
        for queue in (self.running, self._waiting):
            for request in queue:
                if request.request_id == request_id:
                    queue.remove(request)
                    self.block_manager.release(request.block_table)
                    return request
        return None

    def _reserve(self, request: Request, num_draft_tokens: int) -> bool:
        length = min(len(request.token_ids) + num_draft_tokens, request.max_len)
        return self.block_manager.reserve(request.block_table, length)

    def _preempt_youngest(self) -> Request:
        request = self.running.pop()
        self.block_manager.release(request.block_table)
        request.num_cached = 0
        self._waiting.appendleft(request)
        return request
