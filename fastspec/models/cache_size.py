"""Limits on request length and cache size, and the allocation of cache blocks."""

import torch

from fastspec.config import EngineConfig
from fastspec.models.paged_model import PagedModel

_DEFAULT_CPU_BYTES = 2**30
_DEFAULT_MODEL_LEN = 4096  # for models without a limit of their own


def blocks_needed(num_tokens: int, block_size: int) -> int:
    """Return the number of blocks for `num_tokens` tokens."""
    return -(-num_tokens // block_size)


def model_len(config: EngineConfig, target: PagedModel) -> int:
    """Return the maximum tokens per request, prompt included; per side for encoder-decoders."""
    wanted, limit = config.max_model_len, target.max_positions
    if wanted is not None and limit is not None and wanted > limit:
        raise ValueError(f"max_model_len: {wanted} exceeds the model's {limit} positions")
    return wanted or limit or _DEFAULT_MODEL_LEN


def cache_blocks(config: EngineConfig, models: list[PagedModel], max_model_len: int) -> int:
    """Return the number of cache blocks: as configured, or what fits in memory and can be used.

    Without prefix caching, only as many as one batch can fill can be used.
    """
    if config.num_blocks is not None:
        return config.num_blocks
    device = models[0].device
    memory = config.kv_cache_memory
    state_bytes = config.max_batch_size * sum(model.bytes_per_sequence for model in models)
    if memory is None:
        on_gpu, default = device.type == "cuda", _DEFAULT_CPU_BYTES + state_bytes
        memory = torch.cuda.mem_get_info(device)[0] // 2 if on_gpu else default
        if models[0].ranks is not None:
            (memory,) = models[0].ranks.least([memory])
    bytes_per_token = sum(model.bytes_per_token() for model in models)
    if models[0].ranks is not None:  # a process also stores what a draft reads
        numbers = sum(getattr(model.model, "numbers_read", 0) for model in models)
        bytes_per_token += numbers * models[0].cache_dtype.itemsize
    bytes_per_block = config.block_size * bytes_per_token
    usable = config.max_batch_size * blocks_needed(max_model_len, config.block_size)
    affordable = usable
    if bytes_per_block:
        affordable = (memory - state_bytes) // bytes_per_block
    if affordable <= 0 or memory < state_bytes:
        states = f", the states of {config.max_batch_size} requests (max_batch_size) {state_bytes}"
        raise ValueError(
            f"kv_cache_memory: {memory} bytes are too few; a block of {config.block_size} tokens"
            f" takes {bytes_per_block} bytes{states if state_bytes else ''}"
        )
    return affordable if config.prefix_caching else min(affordable, usable)


class Blocks:
    """A free list of block ids; tables grow as their texts need room, and are freed as a whole.

    Attributes:
        num_free: number of blocks in no table.
        num_tokens: capacity of all blocks together.
    """

    def __init__(self, num_blocks: int, block_size: int):
        self.num_blocks = self.num_free = num_blocks
        self.block_size = block_size
        self.num_tokens = num_blocks * block_size
        self._free = list(range(num_blocks - 1, -1, -1))
        self._tenancies = [0] * num_blocks

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
