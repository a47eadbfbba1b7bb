"""Candidates for a token tree, and the choice of those that it is made of."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad


class Candidates(NamedTuple):
    """Nodes that a tree may have, parents first, [B, M] each; candidate i is node i + 1.

    Attributes:
        token_ids: int32.
        parents: int64, 0 = the root, the last committed token.
        scores: float32, of no node more than of its parent; -inf where there is no token.
    """

    token_ids: Tensor
    parents: Tensor
    scores: Tensor

    @property
    def count(self) -> int:
        """M."""
        return self.scores.shape[1]

    @classmethod
    def joined(cls, parts: Sequence["Candidates"]) -> "Candidates":
        """All of them; the numbers of each go on from those before it."""
        return cls(*(torch.cat(column, dim=1) for column in zip(*parts, strict=True)))

    def with_chain(self, token_ids: Tensor) -> "Candidates":
        """These and a chain [B, K] after the root, -1 after its end, preferred to all others.

        Where it begins like a branch that is there already, the two are one.
        """
        result = self
        current = torch.zeros_like(self.parents[:, 0])  # [B], the node that the chain has got to
        for token in token_ids.unbind(1):
            is_same = (result.parents == current[:, None]) & (result.token_ids == token[:, None])
            is_same &= (token >= 0)[:, None]
            found = is_same.any(dim=1)
            new = token.masked_fill(found, -1)[:, None]
            scores = torch.zeros_like(result.scores[:, :1]).masked_fill(new < 0, -torch.inf)
            preferred = result._replace(scores=result.scores.masked_fill(is_same, 0.0))
            result = self.joined([preferred, Candidates(new, current[:, None], scores)])
            current = torch.where(found, is_same.int().argmax(dim=1) + 1, result.count)
        return result

    def best(self, num_nodes: int, limits: Tensor) -> tuple[Tensor, Tensor]:
        """Trees of the limits[b] <= num_nodes best candidates: token_ids, parents [B, num_nodes].

        Both int32, -1 after the last node. A tree holds the parent of each of its nodes, as that
        one scores no less and comes earlier.
        """
        scores, order = self.scores.sort(dim=1, descending=True, stable=True)
        ranks = torch.arange(self.count, device=order.device)
        is_out = (ranks >= limits[:, None]) | (scores == -torch.inf)
        chosen = order.masked_fill(is_out, self.count)[:, :num_nodes].sort(dim=1).values
        chosen = pad(chosen, (0, num_nodes - chosen.shape[1]), value=self.count)
        numbers = torch.arange(1, num_nodes + 1, device=order.device).expand_as(chosen)
        number_of = chosen.new_zeros((len(chosen), self.count + 2))
        number_of.scatter_(1, chosen + 1, numbers)
        is_node, index = chosen < self.count, chosen.clamp(max=self.count - 1)
        token_ids = self.token_ids.gather(1, index).where(is_node, -1)
        parents = number_of.gather(1, self.parents.gather(1, index)).where(is_node, -1)
        return token_ids.int(), parents.int()
