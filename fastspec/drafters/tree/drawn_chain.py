"""Drawn chains with drawn siblings: CaPE where tokens are sampled."""

import torch
from torch import Tensor

from fastspec.drafters.base import DRAFT_STREAM, Batch, Proposal
from fastspec.drafters.tree.growing import (
    ConfidenceBins,
    NumExtra,
    known_counts,
    sampling_temperature,
    spread,
)
from fastspec.drafters.tree.siblings import drawn, likeliest, of_rows
from fastspec.models.transfer import device_tensor


class DrawnChain:
    """A chain drawn from the draft model, each token with siblings drawn after it, as leaves.

    Siblings are drawn without replacement, the more of them the less likely the likeliest token is.
    How many are kept thus depends on what they are drawn from, never on what they are.
    """

    def __init__(self, batch: Batch, num_children: int, bins: ConfidenceBins):
        self.max_depth = batch.num_speculative_tokens
        self._batch = batch
        self._num_children = num_children
        self._temperature = sampling_temperature(batch, 1.0)
        self._num_extra = NumExtra(bins, batch.device)
        self._ranks = torch.arange(num_children, device=batch.device)
        self._token_ids: list[Tensor] = []  # by level: [B, C], -1 where there is none
        self._logits: list[Tensor] = []  # by level: [B, V'], what its tokens are drawn from

    def add(self, logits: Tensor, places: list[int]) -> None:
        batch = self._batch
        rows = device_tensor(places, torch.int64, logits.device)
        temperature = None if self._temperature is None else self._temperature[rows]
        _, logprobs = likeliest(logits, 1, temperature, batch.backend)
        first = len(self._token_ids) * self._num_children
        uniforms = batch.uniforms(first + self._num_children, DRAFT_STREAM)[rows, first:]
        token_ids = drawn(logits, uniforms, of_rows(batch.sampling, rows), batch.backend)
        token_ids = token_ids.masked_fill(self._ranks > self._num_extra.of(logprobs.exp()), -1)
        if self._token_ids:  # after a token that could not be drawn there is none
            token_ids = token_ids.masked_fill(self._token_ids[-1][rows, :1] < 0, -1)
        for levels, values, empty in ((self._token_ids, token_ids, -1), (self._logits, logits, 0)):
            size = (len(batch.requests), 1, values.shape[1])
            levels.append(spread(values, places, size, empty)[:, 0])

    def expanded(self) -> tuple[Tensor, Tensor]:
        chain = self._token_ids[-1][:, :1]
        return chain, torch.zeros_like(chain, dtype=torch.int64)

    def proposal(self) -> Proposal:
        if not self._token_ids:  # the draft model is behind its last position everywhere
            none = self._ranks.new_full((len(self._batch.requests), 1), -1, dtype=torch.int32)
            counts = [0] * len(none)
            return Proposal(none, none, num_tokens=counts, sibling_rule="target_only")
        token_ids = torch.cat(self._token_ids, dim=1)
        num_requests, num_nodes = token_ids.shape
        is_missing, order = (token_ids < 0).sort(dim=1, stable=True)
        number_of = torch.empty_like(order)  # in the tree, those that are missing last
        numbers = torch.arange(1, num_nodes + 1, device=order.device)
        number_of.scatter_(1, order, numbers.expand_as(order))
        chain = number_of[:, :: self._num_children]  # [B, levels]
        above = torch.cat([torch.zeros_like(chain[:, :1]), chain[:, :-1]], dim=1)
        parents = above.repeat_interleave(self._num_children, dim=1).gather(1, order)
        logits = torch.stack(self._logits, dim=1)  # [B, levels, V']
        draft_logits = logits.new_zeros((num_requests, num_nodes + 1, logits.shape[2]))
        requests = torch.arange(num_requests, device=order.device)[:, None]
        draft_logits[requests, above] = logits
        return Proposal(
            token_ids.gather(1, order),
            parents.masked_fill(is_missing, -1).int(),
            draft_logits,
            num_tokens=known_counts(token_ids),
            sibling_rule="without_replacement",
        )
