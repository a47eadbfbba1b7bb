"""Token trees of a fixed shape: how many of the best, or first drawn, tokens follow each node."""

from collections.abc import Sequence
from functools import cache
from heapq import heappop, heappush
from typing import NamedTuple

Path = tuple[int, ...]

# How often the first token drawn at a node is accepted, and each further one relative to the one
# before it: rough, they only shape the tree.
_FIRST_RATE = 0.65
_NEXT_RATE = 0.25


class ShapeLevel(NamedTuple):
    """What one drafting pass adds to a tree.

    Attributes:
        expanded: nodes of the level above that have children.
        places: their places among all candidates of the level above, see `kept`.
        num_children: maximum number of children of one of them.
        children: nodes, in the order of their numbers.
        kept: their places among the candidates, num_children for each expanded node.
    """

    expanded: list[int]
    places: list[int]
    num_children: int
    children: list[int]
    kept: list[int]


class TreeShape:
    """A tree given by the paths to its nodes, each a list of ranks among siblings from 0.

    Nodes are numbered level by level from 1, the root is 0; any shorter list of the first nodes is
    also a tree.

    Raises:
        ValueError: a path that is not a list of ranks, is given twice, or lacks its parent or its
            preceding sibling.
    """

    def __init__(self, paths: Sequence[Sequence[int]]):
        ordered = sorted((tuple(path) for path in paths), key=lambda path: (len(path), path))
        _check(ordered)
        number = {path: node for node, path in enumerate([(), *ordered])}
        self.parents = [number[path[:-1]] for path in ordered]
        self.levels: list[ShapeLevel] = []
        places: dict[Path, int] = {(): 0}
        for depth in range(1, len(ordered[-1]) + 1):
            children = [path for path in ordered if len(path) == depth]
            expanded = sorted({path[:-1] for path in children})
            width = max(path[-1] for path in children) + 1
            kept = [expanded.index(path[:-1]) * width + path[-1] for path in children]
            self.levels.append(
                ShapeLevel(
                    [number[path] for path in expanded],
                    [places[path] for path in expanded],
                    width,
                    [number[path] for path in children],
                    kept,
                )
            )
            places = dict(zip(children, kept, strict=True))

    @property
    def depth(self) -> int:
        """Number of tokens in the longest path."""
        return len(self.levels)

    def num_nodes(self, depth: int) -> int:
        """Number of nodes up to `depth` tokens after the root."""
        return sum(len(level.children) for level in self.levels[:depth])


@cache
def balanced_shape(width: int, max_nodes: int, depth: int) -> TreeShape:
    """The nodes most likely to be accepted when siblings are drawn, whichever tokens they get.

    No node has more than `width` children, and no path more than `depth` tokens. The idea is from
    Sequoia (Chen et al., arXiv 2402.12374).
    """
    paths: list[Path] = []
    heap: list[tuple[float, Path]] = [(-_FIRST_RATE, (0,))]
    while heap and len(paths) < max_nodes:
        value, path = heappop(heap)
        paths.append(path)
        if path[-1] + 1 < width:
            heappush(heap, (value * _NEXT_RATE, (*path[:-1], path[-1] + 1)))
        if len(path) < depth:
            heappush(heap, (value * _FIRST_RATE, (*path, 0)))
    return TreeShape(paths)


def _check(paths: list[Path]) -> None:
    if not paths:
        raise ValueError("tree_paths: expected at least one path, got none")
    known: set[Path] = {()}
    for path in paths:
        is_path = path and all(type(rank) is int and rank >= 0 for rank in path)
        if not is_path or path in known:
            raise ValueError(f"tree_paths: expected distinct lists of ints >= 0, got {path}")
        before = path[:-1] if path[-1] == 0 else (*path[:-1], path[-1] - 1)
        if before not in known:
            raise ValueError(f"tree_paths: {list(path)} needs the path {list(before)}")
        known.add(path)
