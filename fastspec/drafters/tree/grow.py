"""Growing trees: passes of a draft model, nodes added from its logits, and nodes kept."""

from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import pad

from fastspec.config.tree_shapes import TreeShape
from fastspec.drafters.base import DRAFT_STREAM, Batch, Proposal, divisors, sampling_of_rows
from fastspec.drafters.copying import known_counts
from fastspec.drafters.draft_model import DraftModelDrafter
from fastspec.drafters.logit_rules import Rows
from fastspec.drafters.tree.copied import CopiedPaths, put_point_masses
from fastspec.drafters.tree.siblings import ConfidenceBins, SiblingCut, draw_siblings, top_tokens
from fastspec.models.layout import packed
from fastspec.models.reduced_vocabulary import DraftVocabulary
from fastspec.models.transfer import device_tensor
from fastspec_kernels import build_tree

Places = slice | Tensor  # places of rows [R] in a flat grid [B * E]; a slice means all
Nodes = tuple[Tensor, Tensor, Tensor]  # token_ids, parents and scores, see `best_nodes`

# A greedy target follows a draft's more probable tokens more often than a sampling one: of 0.35,
# 0.5, 0.7 and 1 this value gave the longest accepted paths on the bundled prompts.
_GREEDY_TEMPERATURE = 0.5


def grow(
    tree: "LikeliestTree | ShapedTree", draft: DraftModelDrafter, batch: Batch, depths: list[int]
) -> list[int]:
    """Grow a tree for each request of a batch, with one pass of the draft model per level.

    `tree.add` receives the logits after the last nodes read, E per request as far as there is room,
    and the vocabulary of their columns; these nodes are first the roots, then those that
    `tree.expanded` returns. A level is read together with all levels above it, because attention
    needs the whole tree; while each level has one node the tree is a chain, and only the new node
    is read.

    Args:
        batch: there is room for max_nodes[b] nodes of request b.
        depths: number of levels wanted for each request.
    Returns:
        The number of passes that each request took part in.
    """
    requests, runner = batch.requests, draft.runner
    num_passes = [0] * len(requests)
    roots = [request.token_ids[-1:] for request in requests]
    token_ids = device_tensor(roots, torch.int32, batch.device)  # [B, S], nodes read so far
    parents = torch.full_like(token_ids, -1)  # [B, S], places in token_ids
    first, vocab_size = 0, 0  # place of the first node of the newest level; V'
    is_chain = True
    for level in range(max(depths)):
        if level:
            new_ids, above = tree.expanded()
            if runner.paged_model.ranks is not None:  # of a chain; all ranks must read the same
                new_ids = runner.paged_model.ranks.broadcast(new_ids)
            parents = torch.cat([parents, (above + first).int()], dim=1)
            first = token_ids.shape[1]
            token_ids = torch.cat([token_ids, new_ids], dim=1)
        width = token_ids.shape[1] - first
        is_chain = is_chain and width == 1
        counts = [
            max(0, min(width, limit + 1 - first)) if depth > level else 0
            for limit, depth in zip(batch.max_nodes, depths, strict=True)
        ]
        reading = [b for b, count in enumerate(counts) if count]
        if not reading:
            break
        num_passes = [n + (count > 0) for n, count in zip(num_passes, counts, strict=True)]
        if level == 0:
            texts = [request.token_ids for request in requests]
            logits = draft.read(requests, texts, counts)
            vocab_size = logits.shape[1]
        else:
            chosen = slice(None)
            if len(reading) < len(requests):
                chosen = device_tensor(reading, torch.int64, batch.device)
            ids = token_ids[chosen].clamp(0, runner.vocab_size - 1).long()
            start = first if is_chain else 0
            lengths = [first - start + counts[b] for b in reading]
            spans = [
                requests[b].span(len(requests[b].token_ids) - 1 + start, length)
                for b, length in zip(reading, lengths, strict=True)
            ]
            rows = shape = None
            if not is_chain:
                ends = zip(accumulate(lengths), reading, strict=True)
                rows = [row for end, b in ends for row in range(end - counts[b], end)]
                shape = parents[chosen]
            logits = runner.forward(packed(ids[:, start:], lengths), spans, rows, shape)
            logits = logits[:, :vocab_size]
            if any(request.rules is not None for request in requests):
                owners = [b for b in reading for _ in range(counts[b])]
                nodes = [first + place for b in reading for place in range(counts[b])]
                logits = draft.ruled(requests, logits, Rows(owners, nodes, token_ids, parents))
        places = slice(None)
        if sum(counts) < len(counts) * width:
            filled = [b * width + e for b in reading for e in range(counts[b])]
            places = device_tensor(filled, torch.int64, batch.device)
        tree.add(logits, places, draft.vocabulary)
    return num_passes


class LikeliestTree:
    """Expands the `width` most probable nodes per level by `num_children` top tokens each.

    Of all nodes grown, those with the highest cumulative draft probability form the tree. With
    `bins` a node's most probable child has only as many siblings as its own probability asks for.

    Sources: EAGLE-2 (Li et al., arXiv 2406.16858); with bins and width 1 CaPE (Du et al., arXiv
    2402.02082).
    """

    def __init__(
        self,
        batch: Batch,
        width: int,
        num_children: int,
        max_nodes: int,
        bins: ConfidenceBins | None = None,
    ):
        self.max_depth = batch.num_speculative_tokens
        self._batch = batch
        self._width = width
        self._num_children = num_children
        self._max_nodes = max_nodes
        self._temperature = batch.sampling["temperature"]
        if self._temperature is not None:
            greedy = _GREEDY_TEMPERATURE if bins is None else 1.0
            self._temperature = self._temperature.masked_fill(self._temperature == 0, greedy)
        self._cut = None if bins is None else SiblingCut(bins, num_children, batch.device)
        root = torch.zeros((len(batch.requests), 1), dtype=torch.int64, device=batch.device)
        self._nodes, self._scores = root, root.float()  # [B, E], of the last nodes read
        # A candidate that is never chosen, for trees to which no node is added.
        self._grown = [((root - 1).int(), root, torch.full_like(self._scores, -torch.inf))]
        self._count = 1

    def add(self, logits: Tensor, places: Places, vocabulary: DraftVocabulary) -> None:
        num_requests, width = self._scores.shape
        size = num_requests, width, self._num_children
        temperature = self._temperature
        if temperature is not None:
            temperature = temperature.repeat_interleave(width)[places]
        token_ids, logprobs = top_tokens(logits, size[2], temperature, self._batch.backend)
        token_ids = _spread(vocabulary.tokens(token_ids), places, size, -1).flatten(1)
        parents = self._nodes[:, :, None].expand(size).flatten(1)
        above = self._scores[:, :, None]
        scores = above + _spread(logprobs, places, size, -torch.inf)
        if self._cut is not None:
            scores = scores.masked_fill(self._cut.of((scores[:, :, :1] - above).exp()), -torch.inf)
        self._grown.append((token_ids, parents, scores.flatten(1)))
        self._count += parents.shape[1]

    def expanded(self) -> tuple[Tensor, Tensor]:
        """Return tokens [B, E] of the nodes to read next, and their parents among the last ones."""
        token_ids, _, scores = self._grown[-1]
        self._scores, chosen = scores.topk(self._width, dim=1)
        self._nodes = chosen + (self._count - scores.shape[1] + 1)
        return token_ids.gather(1, chosen), chosen // self._num_children

    def add_branch(self, token_ids: Tensor) -> None:
        """Add a chain [B, K] of another drafter, -1 after its end, to every tree."""
        self._grown = [with_chain(_joined(self._grown), token_ids, self.max_depth)]

    def proposal(self) -> Proposal:
        limits = device_tensor(self._batch.max_nodes, torch.int64, self._batch.device)
        token_ids, parents = best_nodes(_joined(self._grown), self._max_nodes, limits)
        counts = known_counts(token_ids)
        return Proposal(token_ids, parents, num_tokens=counts, sibling_rule="target_only")


_REACH = 14.0  # in nats


class ShapedTree:
    """A tree of a fixed shape, of a draft model's most probable tokens or of drawn ones.

    Tokens are drawn without replacement among siblings. With `bins`, for shapes that expand one
    node per level, tokens are drawn and a node has fewer children the surer the draft model is: how
    many are kept depends on the distribution they are drawn from, never on the tokens. With
    `copied` one path of each tree should contain copied tokens; then there are no bins, and
    siblings are drawn, but not by coupled noise.
    """

    def __init__(
        self,
        batch: Batch,
        shape: TreeShape,
        draws: bool,
        bins: ConfidenceBins | None = None,
        copied: CopiedPaths | None = None,
    ):
        num = batch.num_speculative_tokens
        self.max_depth = min(shape.depth, num)
        self._batch = batch
        self._shape = shape
        size = (len(batch.requests), shape.num_nodes(num))
        self._token_ids = torch.full(size, -1, dtype=torch.int32, device=batch.device)
        most = max(level.num_children for level in shape.levels)
        self._cut = None if bins is None else SiblingCut(bins, most, batch.device)
        self._copied = copied
        self._branch: Tensor | None = None
        # The number that draws a node determines the text of a seed: with bins the number of its
        # place, otherwise the next one.
        skipped = int(bins is None)
        numbers = batch.uniforms(size[1] + skipped, DRAFT_STREAM) if draws else None
        self._uniforms = None if numbers is None else numbers[:, skipped:]  # [B, N]
        self._drawn_from: list[tuple[Tensor, Tensor, Tensor]] = []  # requests, nodes, logits
        self._token_map: Tensor | None = None
        self._newest = self._read = torch.zeros_like(self._token_ids[:, :1])  # any token
        self._num_levels = 0

    def add(self, logits: Tensor, places: Places, vocabulary: DraftVocabulary) -> None:
        level = self._shape.levels[self._num_levels]
        self._num_levels += 1
        backend, device, num_requests = self._batch.backend, logits.device, len(self._token_ids)
        size = (num_requests, len(level.expanded), level.num_children)
        kept = device_tensor(level.kept, torch.int64, device)
        first = level.children[0] - 1
        added = slice(first, first + len(level.kept))
        if self._uniforms is None:
            token_ids, _ = top_tokens(logits, level.num_children, None, backend)
            token_ids = vocabulary.tokens(token_ids)
        else:
            requests = torch.arange(num_requests, device=device).repeat_interleave(size[1])[places]
            nodes = device_tensor(level.expanded, torch.int64, device).repeat(num_requests)[places]
            sampling = sampling_of_rows(self._batch.sampling, requests)
            uniforms = self._uniforms.new_zeros((num_requests, size[1] * size[2]))
            uniforms[:, kept] = self._uniforms[:, added]
            uniforms = uniforms.view(-1, size[2])[places]
            if self._batch.is_coupled:
                keys = self._batch.keys[:, requests]
                keys[1] += self._num_levels - 1
                logits = vocabulary.whole(logits)  # noise belongs to token ids, not columns
                token_ids = draw_siblings(logits, uniforms, sampling, backend, keys)
            else:
                if self._copied is not None:
                    rows = requests, nodes, self._num_levels - 1
                    token_map = vocabulary.token_map
                    logits = self._copied.tilted(logits, rows, sampling, token_map, backend)
                logits = _within_reach(logits, sampling["temperature"])
                self._drawn_from.append((requests, nodes, logits))
                self._token_map = vocabulary.token_map
                token_ids = draw_siblings(logits, uniforms, sampling, backend)
                token_ids = vocabulary.tokens(token_ids)
            if self._cut is not None:
                temperature = divisors(sampling["temperature"])
                _, logprobs = top_tokens(logits, 1, temperature, backend)
                token_ids = token_ids.masked_fill(self._cut.of(logprobs.exp()), -1)
            if self._moves_gaps:  # no token follows one that could not be drawn
                token_ids = token_ids.masked_fill(self._read.view(-1, 1)[places] < 0, -1)
        self._newest = _spread(token_ids, places, size, -1).flatten(1)
        self._token_ids[:, added] = self._newest[:, kept]
        if self._copied is not None:
            parents = device_tensor(self._shape.parents[added], torch.int64, device)
            new_ids = self._token_ids[:, added]
            self._copied.follow(new_ids, parents, first + 1, self._num_levels - 1)

    def expanded(self) -> tuple[Tensor, Tensor]:
        """Return tokens [B, E] of the nodes to read next, and their parents among the last ones."""
        above, level = self._shape.levels[self._num_levels - 1 : self._num_levels + 1]
        places = device_tensor(level.places, torch.int64, self._newest.device)
        self._read = self._newest[:, places]
        return self._read, (places // above.num_children).expand_as(self._read)

    def add_branch(self, token_ids: Tensor) -> None:
        """Add a chain [B, K] of another drafter, -1 after its end, to every tree.

        If siblings are drawn, only with coupled noise: other rules must know how each was chosen.
        """
        self._branch = token_ids

    def proposal(self) -> Proposal:
        token_ids = self._token_ids
        device = token_ids.device
        parents = device_tensor(self._shape.parents[: token_ids.shape[1]], torch.int64, device)
        parents, number_of, counts = parents.expand_as(token_ids), None, None
        if self._branch is not None:
            return self._with_branch(parents, self._branch)
        beyond = None
        if self._copied is not None and self._drawn_from and self._copied.num_beyond:
            beyond = self._copied.beyond(token_ids, parents)
            token_ids = torch.cat([token_ids, beyond[0]], dim=1)
            parents = torch.cat([parents, beyond[1]], dim=1)
        num_requests, num_nodes = token_ids.shape
        if self._moves_gaps:  # nodes that are missing come last
            is_missing, order = (token_ids < 0).sort(dim=1, stable=True)
            numbers = torch.arange(1, num_nodes + 1, device=device).expand_as(order)
            number_of = order.new_zeros((num_requests, num_nodes + 1))
            number_of[:, 1:].scatter_(1, order, numbers)
            token_ids = token_ids.gather(1, order)
            parents = number_of.gather(1, parents.gather(1, order)).masked_fill(is_missing, -1)
            counts = known_counts(token_ids) if self._num_levels else [0] * num_requests
        draft_logits = None
        for requests, nodes, logits in self._drawn_from:
            if draft_logits is None:
                draft_logits = logits.new_zeros((num_requests, num_nodes + 1, logits.shape[1]))
            rows = nodes if number_of is None else number_of[requests, nodes]
            draft_logits[requests, rows] = logits
        if draft_logits is not None and number_of is not None and beyond is not None:
            rows = number_of.gather(1, beyond[1])
            # If no copy continues, write to the row of a node without children instead.
            rows[:, :1] = rows[:, :1].where(beyond[0][:, :1] >= 0, number_of[:, -1:])
            put_point_masses(draft_logits, rows, beyond[0], self._token_map)
        rule = "target_only" if draft_logits is None else "without_replacement"
        token_map = None if draft_logits is None else self._token_map
        return Proposal(
            token_ids, parents.int(), draft_logits, counts, rule, draft_token_map=token_map
        )

    @property
    def _moves_gaps(self) -> bool:
        """Whether to move nodes that could not be drawn behind all others."""
        return self._cut is not None or self._copied is not None

    def _with_branch(self, parents: Tensor, branch: Tensor) -> Proposal:
        """Return a proposal of the tree with a chain merged into it."""
        token_ids, device = self._token_ids, self._token_ids.device
        links = pad(parents.masked_fill(token_ids < 0, -1), (1, 0), value=-1)
        depths, _ = build_tree(links.int(), backend=self._batch.backend)
        scores = torch.zeros_like(token_ids, dtype=torch.float32)
        scores = scores.masked_fill(depths[:, 1:] < 0, -torch.inf)
        nodes = with_chain((token_ids, parents, scores), branch, self.max_depth)
        limits = device_tensor(self._batch.max_nodes, torch.int64, device)
        most = token_ids.shape[1] + branch.shape[1]
        token_ids, parents = best_nodes(nodes, most, limits)
        counts = known_counts(token_ids)
        return Proposal(token_ids, parents, num_tokens=counts, sibling_rule="target_only")


def _within_reach(logits: Tensor, temperature: Tensor | None) -> Tensor:
    """Mask tokens in logits [R, V] that are e^14 times less probable than the best one.

    After rejected siblings, `verify_tree` weighs the rest in units of the best token, and has no
    precision left for tokens far below it. The mask depends only on the row, so never drawing these
    is exact.
    """
    reach = torch.full_like(logits[:, 0], _REACH, dtype=torch.float32)
    if temperature is not None:
        reach = (reach * temperature).masked_fill(temperature == 0, torch.inf)
    best = logits.float().amax(dim=1)
    return logits.masked_fill(logits < (best - reach)[:, None], -torch.inf)


def best_nodes(nodes: Nodes, max_nodes: int, limits: Tensor) -> tuple[Tensor, Tensor]:
    """Select the trees of the limits[b] <= max_nodes nodes with the best scores.

    Args:
        nodes: [B, M] each, parents first; node i + 1 is at place i. token_ids int32; parents int64,
            0 = the root, the last committed token; scores float32, none above its parent's, -inf
            where there is no token.
        limits: [B].
    Returns:
        token_ids, parents [B, max_nodes] int32, -1 after the last node. A tree contains the parents
        of all its nodes, because these score no less and come earlier.
    """
    token_ids, parents, scores = nodes
    count, device = scores.shape[1], scores.device
    ordered, order = scores.sort(dim=1, descending=True, stable=True)
    is_out = (torch.arange(count, device=device) >= limits[:, None]) | (ordered == -torch.inf)
    chosen = order.masked_fill(is_out, count)[:, :max_nodes].sort(dim=1).values
    chosen = pad(chosen, (0, max_nodes - chosen.shape[1]), value=count)
    numbers = torch.arange(1, max_nodes + 1, device=device).expand_as(chosen)
    number_of = chosen.new_zeros((len(chosen), count + 2))
    number_of.scatter_(1, chosen + 1, numbers)
    is_node, index = chosen < count, chosen.clamp(max=count - 1)
    chosen_parents = number_of.gather(1, parents.gather(1, index)).where(is_node, -1)
    return token_ids.gather(1, index).where(is_node, -1).int(), chosen_parents.int()


def with_chain(nodes: Nodes, chain: Tensor, depth: int) -> Nodes:
    """Add a chain [B, K] after the root, -1 after its end, preferred to all other nodes.

    It shares nodes with an existing branch as far as they begin alike. No node is more than `depth`
    levels below the root.
    """
    current = torch.zeros_like(nodes[1][:, 0])  # [B], the node that the chain has reached
    for token in chain[:, :depth].unbind(1):
        token_ids, parents, scores = nodes
        is_same = (parents == current[:, None]) & (token_ids == token[:, None])
        is_same &= (token >= 0)[:, None]
        found = is_same.any(dim=1)
        new = token.masked_fill(found, -1)[:, None]
        score = torch.zeros_like(scores[:, :1]).masked_fill(new < 0, -torch.inf)
        preferred = token_ids, parents, scores.masked_fill(is_same, 0.0)
        nodes = _joined([preferred, (new, current[:, None], score)])
        current = torch.where(found, is_same.int().argmax(dim=1) + 1, nodes[2].shape[1])
    rest, count = chain[:, depth:], nodes[2].shape[1]
    if not rest.shape[1]:
        return nodes
    following = torch.arange(count + 1, count + rest.shape[1], device=rest.device)
    parents = torch.cat([current[:, None], following.expand(len(rest), -1)], dim=1)
    scores = torch.zeros_like(rest, dtype=torch.float32).masked_fill(rest < 0, -torch.inf)
    return _joined([nodes, (rest, parents, scores)])


def _joined(parts: list[Nodes]) -> Nodes:
    """Concatenate nodes, whose numbers continue from part to part."""
    token_ids, parents, scores = (torch.cat(c, dim=1) for c in zip(*parts, strict=True))
    return token_ids, parents, scores


def _spread(values: Tensor, places: Places, size: tuple[int, int, int], empty: float) -> Tensor:
    """Put rows [R, C] at their places of a grid [B, E, C] that is `empty` elsewhere."""
    if isinstance(places, slice):
        return values.view(size)
    grid = values.new_full((size[0] * size[1], size[2]), empty)
    grid[places] = values
    return grid.view(size)
