"""Copied paths in token trees whose other nodes come from a draft model."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fastspec.drafters.base import SamplingTensors, divisors
from fastspec.models.transfer import padded_tensor
from fastspec_kernels import row_stats

# Of 0.7, 0.9, 0.97 and 0.99, larger values had more accepted tokens on SmolLM2's sampled agent
# turns; the largest leaves less to siblings with top_p, and had fewer accepted tokens there.
_SHARE = 0.97


class CopiedPaths:
    """A path from the root of each request's tree that should contain copied tokens.

    If siblings are drawn, the row that a node on the path draws its children from is tilted: the
    copied token gets `_SHARE` of the mass in advance, the model's row the rest. Tokens are drawn
    from and verified against that same row, so this is exact; and as a row depends only on the
    tokens above its node, so do the trees. A path that reaches a node without children continues
    from there with point masses, which the draft model does not read; a path whose token is not
    drawn ends.

    Args:
        token_ids: copied tokens of each request; empty for no copy.
        num_beyond: maximum tokens that continue after the drawn tree.
        depth: levels of the drawn trees.
    """

    def __init__(
        self,
        token_ids: Sequence[Sequence[int]],
        num_beyond: int,
        depth: int,
        device: torch.device,
    ):
        self._length = max(map(len, token_ids))
        width = max(self._length, depth) + num_beyond
        self.token_ids = padded_tensor(token_ids, width, device)  # [B, W]
        self.num_beyond = num_beyond
        self._node = torch.zeros(len(token_ids), dtype=torch.int64, device=device)
        self._matched = torch.zeros_like(self._node)  # [B], tokens on the path to that node

    def tilted(
        self,
        logits: Tensor,
        rows: tuple[Tensor, Tensor, int],
        sampling: SamplingTensors,
        token_map: Tensor | None,
        backend: str,
    ) -> Tensor:
        """Tilt logits [R, V'] towards the copied token in rows whose node is on the path.

        With top_p the share is scaled by it, so that some mass is left to siblings.

        Args:
            rows: the request and the node of each row [R], and the level of all these nodes.
            sampling: sampling parameters of each row.
            token_map: map of the columns, see `Proposal`.
        """
        requests, nodes, level = rows
        if level >= self._length:
            return logits
        tokens = self.token_ids[requests, level]
        is_on = (self._node[requests] == nodes) & (self._matched[requests] == level)
        is_on &= tokens >= 0
        columns = _columns(tokens, token_map)[:, None]
        temperature, top_p = sampling["temperature"], sampling["top_p"]
        logsumexp, _ = row_stats(logits, temperature=temperature, backend=backend)
        scale, share = divisors(temperature), torch.full_like(logsumexp, _SHARE)
        if scale is None:
            scale = torch.ones_like(logsumexp)
        if top_p is not None:
            share = share * top_p.clamp(0, 1)
        old = logits.gather(1, columns)
        own = (old[:, 0].float() / scale - logsumexp).exp()  # its probability
        new = (scale * (logsumexp + (own + share / (1 - share)).log()))[:, None].to(logits.dtype)
        is_on &= (old[:, 0] > -torch.inf) & new[:, 0].isfinite()  # logit rules may forbid it
        return logits.scatter(1, columns, new.where(is_on[:, None], old))

    def follow(self, token_ids: Tensor, parents: Tensor, first: int, level: int) -> None:
        """Advance to the copied tokens among a level's nodes [B, C], numbered from `first`."""
        if level >= self._length:
            return
        is_next = (token_ids == self.token_ids[:, level, None]) & (token_ids >= 0)
        is_next &= (parents == self._node[:, None]) & (self._matched == level)[:, None]
        found = is_next.any(dim=1)
        self._node = torch.where(found, is_next.int().argmax(dim=1) + first, self._node)
        self._matched = self._matched + found

    def beyond(self, token_ids: Tensor, parents: Tensor) -> tuple[Tensor, Tensor]:
        """Return tokens [B, num_beyond] int32 that follow trees [B, N], and their parents int64."""
        num, num_nodes = self.num_beyond, token_ids.shape[1]
        is_leaf = ~((parents == self._node[:, None]) & (token_ids >= 0)).any(dim=1)
        steps = torch.arange(num, device=token_ids.device)
        added = self.token_ids.gather(1, self._matched[:, None] + steps)
        above = (steps + num_nodes).expand(len(added), -1).clone()
        above[:, 0] = self._node
        return added.masked_fill(~is_leaf[:, None], -1), above


def put_point_masses(
    draft_logits: Tensor, rows: Tensor, token_ids: Tensor, token_map: Tensor | None
) -> None:
    """Make rows [B, C] of draft logits [B, N, V'] point masses on tokens [B, C]; -1 = any token."""
    requests = torch.arange(len(rows), device=rows.device)[:, None]
    draft_logits[requests, rows] = -torch.inf
    draft_logits[requests, rows, _columns(token_ids, token_map)] = 0.0


def _columns(token_ids: Tensor, token_map: Tensor | None) -> Tensor:
    """Return the columns int64 of tokens; 0 where there is none."""
    columns = token_ids.clamp(min=0).long()
    return columns if token_map is None else token_map[columns].clamp(min=0).long()
