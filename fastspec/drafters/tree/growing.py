"""Trees in the making: what a draft model's logits add to them, and what it is to read next."""

from typing import Protocol

import torch
from torch import Tensor

from fastspec.config.tree_shapes import TreeShape
from fastspec.drafters.base import DRAFT_STREAM, Batch, Proposal
from fastspec.drafters.tree.candidates import Candidates
from fastspec.drafters.tree.siblings import drawn, likeliest, of_rows
from fastspec.models.transfer import device_tensor

ConfidenceBins = tuple[tuple[float, int], ...]  # up to this probability, so many more siblings

# A target that takes its likeliest token follows a draft's likelier ones more often than a target
# that samples: of 0.35, 0.5, 0.7 and 1 this one gave the longest trees on the bundled prompts.
_GREEDY_TEMPERATURE = 0.5


class GrowingTree(Protocol):
    """One tree for each request of a batch, grown level by level.

    `add` takes logits [R, V'] after nodes read last, E of each request, and the places b * E + e
    that have a row; first these are the roots, then what `expanded` gives: the tokens [B, E] of the
    nodes to read next, and which of the E nodes read before them they follow.
    """

    max_depth: int

    def add(self, logits: Tensor, places: list[int]) -> None: ...

    def expanded(self) -> tuple[Tensor, Tensor]: ...

    def proposal(self) -> Proposal: ...


class LikeliestTree:
    """The `width` likeliest nodes of each level get their `num_children` likeliest tokens each.

    Of all nodes grown, those of the highest cumulative draft probability make the tree. With `bins`
    a node's likeliest child has only as many siblings as its own probability asks for.

    Sources: EAGLE-2 (Li et al., arXiv 2406.16858); with bins and width 1 CaPE (Du et al., arXiv
    2402.02082).
    """

    def __init__(
        self,
        batch: Batch,
        width: int,
        num_children: int,
        num_nodes: int,
        bins: ConfidenceBins | None = None,
    ):
        self.max_depth = batch.num_speculative_tokens
        self._batch = batch
        self._width = width
        self._num_children = num_children
        self._num_nodes = num_nodes
        greedy = _GREEDY_TEMPERATURE if bins is None else 1.0
        self._temperature = sampling_temperature(batch, greedy)
        self._num_extra = None if bins is None else NumExtra(bins, batch.device)
        self._ranks = torch.arange(num_children, device=batch.device)
        root = torch.zeros((len(batch.requests), 1), dtype=torch.int64, device=batch.device)
        self._nodes, self._scores = root, root.float()  # [B, E], those read last
        # A candidate that is never chosen, for trees to which nothing is added.
        none = Candidates((root - 1).int(), root, torch.full_like(self._scores, -torch.inf))
        self._grown, self._count = [none], none.count

    def add(self, logits: Tensor, places: list[int]) -> None:
        num_requests, width = self._nodes.shape
        temperature = self._temperature
        if temperature is not None and (width > 1 or len(places) < num_requests):
            rows = device_tensor([p // width for p in places], torch.int64, logits.device)
            temperature = temperature[rows]
        token_ids, logprobs = likeliest(
            logits, self._num_children, temperature, self._batch.backend
        )
        size = (num_requests, width, self._num_children)
        scores = self._scores[:, :, None] + spread(logprobs, places, size, -torch.inf)
        if self._num_extra is not None:
            num_extra = self._num_extra.of((scores[:, :, :1] - self._scores[:, :, None]).exp())
            scores = scores.masked_fill(self._ranks > num_extra, -torch.inf)
        newest = Candidates(
            spread(token_ids, places, size, -1).flatten(1),
            self._nodes[:, :, None].expand(size).flatten(1),
            scores.flatten(1),
        )
        self._grown.append(newest)
        self._count += newest.count

    def expanded(self) -> tuple[Tensor, Tensor]:
        newest = self._grown[-1]
        self._scores, chosen = newest.scores.topk(self._width, dim=1)
        self._nodes = chosen + (self._count - newest.count + 1)
        return newest.token_ids.gather(1, chosen), chosen // self._num_children

    def add_branch(self, token_ids: Tensor) -> None:
        """A chain [B, K] of another drafter's, -1 after its end, that every tree is to hold."""
        self._grown = [Candidates.joined(self._grown).with_chain(token_ids)]

    def proposal(self) -> Proposal:
        limits = device_tensor(self._batch.num_draft_tokens, torch.int64, self._batch.device)
        token_ids, parents = Candidates.joined(self._grown).best(self._num_nodes, limits)
        counts = known_counts(token_ids)
        return Proposal(token_ids, parents, num_tokens=counts, sibling_rule="target_only")


class NumExtra:
    """How many siblings the likeliest of some children gets, by its probability."""

    def __init__(self, bins: ConfidenceBins, device: torch.device):
        self._bounds = device_tensor([bound for bound, _ in bins[:-1]], torch.float32, device)
        self._extra = device_tensor([extra for _, extra in bins], torch.int64, device)

    def of(self, confidence: Tensor) -> Tensor:
        """int64, in the shape of the probabilities."""
        return self._extra[torch.bucketize(confidence, self._bounds)]


class FixedTree:
    """A tree of one shape, of a draft model's likeliest tokens or of tokens drawn from it.

    Tokens are drawn without replacement among siblings.
    """

    def __init__(self, batch: Batch, shape: TreeShape, draws: bool):
        self.max_depth = min(shape.depth, batch.num_speculative_tokens)
        self._batch = batch
        self._levels = shape.levels
        self._draws = draws
        num_nodes = shape.num_nodes(batch.num_speculative_tokens)
        self._parents = device_tensor(shape.parents[:num_nodes], torch.int32, batch.device)
        size = (len(batch.requests), num_nodes)
        self._token_ids = torch.full(size, -1, dtype=torch.int32, device=batch.device)
        self._draft_logits: Tensor | None = None
        self._newest = self._token_ids  # [B, E * C], all children read off the last logits
        self._level = 0

    def add(self, logits: Tensor, places: list[int]) -> None:
        level = self._levels[self._level]
        self._level += 1
        width, device = len(level.expanded), logits.device
        if self._draws:
            rows = device_tensor([p // width for p in places], torch.int64, device)
            self._keep_logits(logits, rows, [level.expanded[p % width] for p in places])
            sampling = of_rows(self._batch.sampling, rows)
            token_ids = drawn(logits, self._uniforms(places), sampling, self._batch.backend)
        else:
            token_ids, _ = likeliest(logits, level.num_children, None, self._batch.backend)
        size = (len(self._token_ids), width, level.num_children)
        self._newest = spread(token_ids, places, size, -1).flatten(1)
        first = level.children[0] - 1
        kept = device_tensor(level.kept, torch.int64, device)
        self._token_ids[:, first : first + len(level.kept)] = self._newest[:, kept]

    def expanded(self) -> tuple[Tensor, Tensor]:
        above, level = self._levels[self._level - 1], self._levels[self._level]
        places = device_tensor(level.places, torch.int64, self._newest.device)
        parents = places // above.num_children
        return self._newest[:, places], parents.expand(len(self._newest), -1)

    def proposal(self) -> Proposal:
        parents = self._parents.expand_as(self._token_ids)
        rule = "target_only" if self._draft_logits is None else "without_replacement"
        return Proposal(self._token_ids, parents, self._draft_logits, sibling_rule=rule)

    def _keep_logits(self, logits: Tensor, rows: Tensor, nodes: list[int]) -> None:
        """Note what the children of some nodes are drawn from."""
        if self._draft_logits is None:
            batch, num_nodes = self._token_ids.shape
            self._draft_logits = logits.new_zeros((batch, num_nodes + 1, logits.shape[1]))
        self._draft_logits[rows, device_tensor(nodes, torch.int64, logits.device)] = logits

    def _uniforms(self, places: list[int]) -> Tensor:
        """[R, C]: of each request those of the nodes that its rows are drawn for."""
        batch, level = self._batch, self._levels[self._level - 1]
        width, num_children = len(level.expanded), level.num_children
        numbers = [0] * (width * num_children)
        for place, node in zip(level.kept, level.children, strict=True):
            numbers[place] = node
        num = self._token_ids.shape[1] + 1
        all_uniforms = batch.uniforms(num, DRAFT_STREAM)
        grid = all_uniforms[:, device_tensor(numbers, torch.int64, batch.device)]
        return grid.view(-1, num_children)[device_tensor(places, torch.int64, batch.device)]


def sampling_temperature(batch: Batch, greedy: float) -> Tensor | None:
    """At which scores are taken, [B]; `greedy` for requests of temperature 0, None = 1 for all."""
    temperature = batch.sampling["temperature"]
    return None if temperature is None else temperature.masked_fill(temperature == 0, greedy)


def known_counts(token_ids: Tensor) -> list[int] | None:
    """How many nodes each tree has, on the CPU, where looking costs nothing."""
    on_cpu = token_ids.device.type == "cpu"
    return (token_ids >= 0).sum(dim=1).tolist() if on_cpu else None


def spread(values: Tensor, places: list[int], size: tuple[int, int, int], empty: float) -> Tensor:
    """Rows [R, C] at their places of a grid of the size [B, E, C], `empty` elsewhere."""
    if len(places) == size[0] * size[1]:
        return values.view(size)
    grid = values.new_full((size[0] * size[1], size[2]), empty)
    grid[device_tensor(places, torch.int64, values.device)] = values
    return grid.view(size)
