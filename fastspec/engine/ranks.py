"""Keeps engines in several processes that share a target's weights in lockstep."""

import secrets
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary
from zlib import crc32

from transformers import PreTrainedModel

from fastspec.config import EngineConfig, SpecConfig
from fastspec.engine.loop import Loop
from fastspec.engine.request import EngineRequest
from fastspec.models.sharded import ADDRESS, Ranks, ranks_of


def check_options(model: PreTrainedModel, spec: SpecConfig, config: EngineConfig) -> None:
    """Raise on all ranks of a target unless they make engines with the same options."""
    ranks = ranks_of(model)
    if ranks is not None:
        options = {"spec": spec, "config": replace(config, device="auto")}
        ranks.check(call="Engine", target=type(model).__name__, **options)


def new_seeds(ranks: Ranks | None) -> Callable[[], int]:
    """Return a generator of seeds for requests without one."""
    return partial(secrets.randbits, 63) if ranks is None else ranks.new_seeds()


def loop_of(ranks: Ranks | None, **fields: Any) -> Loop:
    """Make the loop of an engine."""
    return Loop(**fields) if ranks is None else SameRounds(ranks, **fields)


class SameRounds(Loop):
    """Rounds that the ranks of a target begin only if all are in the same state."""

    def __init__(self, ranks: Ranks, **fields: Any):
        super().__init__(**fields)
        self._ranks = ranks
        self._numbers: WeakKeyDictionary[EngineRequest, int] = WeakKeyDictionary()

    def round(self) -> None:
        while self.abandoned:  # before the ranks compare what is left
            self.drop(self.abandoned.popleft())
        self._check_state()
        try:
            super().round()
        except BaseException as error:
            failure = self._ranks.failed(error)
            if isinstance(error, RuntimeError):  # such as a lost connection, wherever it surfaces
                raise failure from error
            raise

    def _check_state(self) -> None:
        """Raise on all ranks unless they have the same requests, read equally far."""
        drafters = {
            name: (each.drafter.name, each.num_speculative_tokens, each.max_nodes)
            for name, each in self.speculations.items()
        }
        running = [
            (r.request_id, len(r.token_ids), r.num_cached, len(r.block_table), self._number(r))
            for r in self.scheduler.running
        ]
        waiting = [(r.request_id, self._number(r)) for r in self.scheduler.waiting]
        state = {"drafters": drafters, "running": running, "waiting": waiting}
        blocks = self.scheduler.block_manager
        self._ranks.check(call="step", **state, free_blocks=blocks.num_free)

    def _number(self, request: EngineRequest) -> int:
        """Checksum of the request as submitted, cached; the tokens after it come from rank 0."""
        number = self._numbers.get(request)
        if number is None:
            start = request.token_ids[: request.num_prompt_tokens]
            asked = request.prompt_ids, start, request.seed, request.max_len, request.params
            text = ADDRESS.sub("", repr((*asked, sorted(request.stop_ids))))
            number = self._numbers[request] = crc32(text.encode())
        return number
