"""Decides which requests run in a step, and reserves their cache blocks."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from fastspec.engine.block_manager import BlockManager
from fastspec.engine.prefix_index import ContentKey
from fastspec.engine.request import EngineRequest
from fastspec.models.blocks import blocks_needed


@dataclass(eq=False)
class Scheduler:
    """First come, first served; when blocks run out, the youngest request waits and is reread.

    Invariant: any one request fits the whole cache, so the oldest always makes progress. A
    preempted request later finds its own blocks again, as far as prefix caching has kept them. A
    request whose model must reread it at some length is preempted for that as well, and goes first.
    """

    block_manager: BlockManager
    max_batch_size: int
    awaits_prefix: bool = field(default=False, init=False)  # see `admit`
    running: list[EngineRequest] = field(default_factory=list, init=False)
    waiting: deque[EngineRequest] = field(default_factory=deque, init=False)
    # All requests, by their public id.
    _samples: dict[str, list[EngineRequest]] = field(default_factory=dict, init=False)

    @property
    def has_unfinished(self) -> bool:
        return bool(self.running or self.waiting)

    def check_fits(self, request: EngineRequest) -> None:
        """Raise ValueError if the request would outgrow the cache even on its own."""
        manager = self.block_manager
        if not manager.fits(request.max_len):
            needed = blocks_needed(request.max_len, manager.block_size)
            raise ValueError(
                f"num_blocks: no room in the cache: {request.num_prompt_tokens} prompt tokens and"
                f" {request.max_len - request.num_prompt_tokens} new ones need {needed} blocks of"
                f" {manager.block_size}, the cache has {manager.num_blocks}"
            )

    def add(self, request: EngineRequest) -> None:
        """Queue a request that fits."""
        self._samples.setdefault(request.public_id, []).append(request)
        self.waiting.append(request)

    def schedule(self, reach: Callable[[EngineRequest], int]) -> list[EngineRequest]:
        """Reserve room for the running requests' next step; return those preempted for it.

        reach: length up to which a request's next step may cache; capped by the cache's size.
        """
        preempted: list[EngineRequest] = []
        capacity = self.block_manager.num_tokens
        scheduled = 0
        while scheduled < len(self.running):
            request = self.running[scheduled]
            if self.block_manager.reserve(request.block_table, min(reach(request), capacity)):
                scheduled += 1
            else:
                preempted.append(self._preempt(self.running[-1]))
        for request in [r for r in reversed(self.running) if r.rereads_above is not None]:
            if request.must_be_reread:
                preempted.append(self._preempt(request))
        return preempted

    def admit(self, reach: Callable[[EngineRequest], int]) -> list[EngineRequest]:
        """Admit waiting requests, with the cached blocks of their prefixes, while they fit.

        A request that needs a block which an earlier one is about to fill must wait for it, as
        `awaits_prefix` then says: call again when more tokens are cached, until none is admitted.
        """
        self.awaits_prefix = False
        capacity = self.block_manager.num_tokens
        admitted: list[EngineRequest] = []
        coming: set[ContentKey | None] = set()
        for request in self.running if self.waiting else ():
            self.block_manager.publish(request)
            if request.num_cached < len(request.token_ids) - 1:
                coming.add(self.block_manager.find(request).next_key)
        coming.discard(None)
        while self.waiting and len(self.running) < self.max_batch_size:
            request = self.waiting[0]
            match = self.block_manager.find(request)
            length = min(reach(request), capacity)
            self.awaits_prefix = match.next_key in coming
            if self.awaits_prefix or not self.block_manager.admit(request, match, length):
                break
            if match.next_key is not None:
                coming.add(match.next_key)
            self.running.append(self.waiting.popleft())
            admitted.append(request)
        return admitted

    def samples(self, request_id: str) -> list[EngineRequest]:
        """Return the samples of a request that run or wait."""
        return [*self._samples.get(request_id, ())]

    def remove(self, request: EngineRequest, failed: bool = False) -> None:
        """Remove a request and free its blocks; a failed request's blocks are not reused."""
        self._samples[request.public_id].remove(request)
        if not self._samples[request.public_id]:
            del self._samples[request.public_id]
        queue = self.running if request in self.running else self.waiting
        queue.remove(request)
        if failed:
            self.block_manager.forget(request)
        else:
            self.block_manager.publish(request)
        self.block_manager.release(request)

    def all_requests(self) -> list[EngineRequest]:
        """Return the requests that run or wait, also after an interrupt amid a change."""
        return [request for samples in self._samples.values() for request in samples]

    def reset(self) -> None:
        """Drop all requests after an interrupt amid a change."""
        self.block_manager.reset()
        for request in self.all_requests():
            self.block_manager.clear(request)
        self.running.clear()
        self.waiting.clear()
        self._samples.clear()

    def _preempt(self, request: EngineRequest) -> EngineRequest:
        if request.must_be_reread:
            request.first_read_len = len(request.token_ids)
        self.running.remove(request)
        self.block_manager.publish(request)
        self.block_manager.release(request)
        self.waiting.appendleft(request)
        return request
