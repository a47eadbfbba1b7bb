"""Limits on the length of requests and on the number of cache blocks."""

from typing import Any

import torch

from fastspec.config import EngineConfig
from fastspec.models.blocks import blocks_needed
from fastspec.models.paged_model import PagedModel

_DEFAULT_CPU_BYTES = 2**30
_DEFAULT_MODEL_LEN = 4096  # for models without a limit of their own


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
    memory: Any = config.kv_cache_memory  # stored as a number of bytes
    state_bytes = config.max_batch_size * sum(model.bytes_per_sequence for model in models)
    if memory is None:
        on_gpu, default = device.type == "cuda", _DEFAULT_CPU_BYTES + state_bytes
        memory = torch.cuda.mem_get_info(device)[0] // 2 if on_gpu else default
        if models[0].ranks is not None:
            (memory,) = models[0].ranks.all_reduce_min([memory])
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
        num = config.max_batch_size
        states = f", what is kept for each of {num} requests (max_batch_size) {state_bytes}"
        raise ValueError(
            f"kv_cache_memory: {memory} bytes are too few; a block of {config.block_size} tokens"
            f" takes {bytes_per_block} bytes{states if state_bytes else ''}"
        )
    return affordable if config.prefix_caching else min(affordable, usable)
