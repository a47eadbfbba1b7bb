"""Token trees: where in a text and in a packed pass their nodes are."""

import torch
from torch import Tensor

from fastspec.models.transfer import device_tensor


def tree_positions(depths: Tensor, counts: list[int], context_lens: Tensor) -> Tensor:
    """Positions [T] int64 of the first counts[b] nodes of each tree, the last of its context.

    A node is as many positions behind its root as it is deep; padding counts as the root.

    Args:
        depths: [B, N] int32, see `fastspec_kernels.build_tree`.
        context_lens: [B] int32.
    """
    in_batch = device_tensor(counts, torch.int64, context_lens.device)
    roots = context_lens.long() - in_batch
    return packed(roots[:, None] + depths.clamp(min=0), counts)


def packed(values: Tensor, counts: list[int]) -> Tensor:
    """The first counts[b] entries of each row of [B, N], one row after another, [T]."""
    width = values.shape[1]
    if all(count == width for count in counts):
        return values.reshape(-1)
    places = [row * width + column for row, count in enumerate(counts) for column in range(count)]
    return values.reshape(-1)[device_tensor(places, torch.int64, values.device)]
