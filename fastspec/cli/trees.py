"""The token trees of a text's steps, drawn as they were judged."""

from collections.abc import Callable, Iterable

from rich.console import Group
from rich.text import Text
from rich.tree import Tree

from fastspec.engine.outputs import Verdict


def tree_pictures(trees: Iterable[Verdict], show_token: Callable[[int], str]) -> Group:
    """One picture for each step: accepted tokens bold after +, rejected ones dimmed after -.

    The root is the last token committed before the step.
    """
    return Group(*(_picture(number, tree, show_token) for number, tree in enumerate(trees, 1)))


def _picture(number: int, tree: Verdict, show_token: Callable[[int], str]) -> Tree:
    num_nodes = sum(parent >= 0 for parent in tree.parents)
    title = f"step {number}: {len(tree.path)} accepted of {num_nodes} nodes, after "
    picture = Tree(Text.assemble(title, (show_token(tree.token_ids[0]), "bold")))
    branches = {0: picture}
    for node, (token_id, parent) in enumerate(zip(tree.token_ids, tree.parents, strict=True)):
        if parent in branches:
            mark, style = ("+", "bold green") if node in tree.path else ("-", "dim")
            label = Text(f"{mark} {show_token(token_id)}", style=style)
            branches[node] = branches[parent].add(label, guide_style=style)
    return picture
