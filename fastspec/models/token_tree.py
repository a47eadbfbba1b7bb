"""Token trees: what a forward pass needs to know of their structure."""

from typing import NamedTuple

import torch
from torch import Tensor

from fastspec.models.transfer import device_tensor
from fastspec_kernels import build_tree


class TreeLayout(NamedTuple):
    """Structure of B trees: depths [B, N] int32, ancestor_mask [B, N, ceil(N / 64)] int64."""

    depths: Tensor
    ancestor_mask: Tensor

    @classmethod
    def of(cls, parents: Tensor, backend: str) -> "TreeLayout":
        """The layout of trees given by the parents [B, N] int32 of their nodes."""
        return cls(*build_tree(parents, backend=backend))

    def positions(self, counts: list[int], context_lens: Tensor) -> Tensor:
        """Positions [T] int64 of the first counts[b] nodes of each tree, the last of its context.

        A node is as many positions behind its root as it is deep; padding counts as the root.
        """
        in_batch = device_tensor(counts, torch.int64, context_lens.device)
        roots = context_lens.long() - in_batch
        return packed(roots[:, None] + self.depths.clamp(min=0), counts)


def packed(values: Tensor, counts: list[int]) -> Tensor:
    """The first counts[b] entries of each row of [B, N], one row after another, [T]."""
    width = values.shape[1]
    if all(count == width for count in counts):
        return values.reshape(-1)
    places = [row * width + column for row, count in enumerate(counts) for column in range(count)]
    return values.reshape(-1)[device_tensor(places, torch.int64, values.device)]
