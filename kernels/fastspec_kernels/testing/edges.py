"""Single cases of verify_chain and verify_tree with only one right answer, and their checks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

Rows = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class ChainEdge:
    """One sequence for verify_chain, and the expected result.

    Attributes:
        name: the mistake of a verifier that fails.
        target, draft: rows of logits; draft None for point masses.
        proposals, uniforms: draft_token_ids [K] and uniform_samples [K+1].
        output, accepted_len: the right answer.
        parameters: sampling parameters of the sequence.
    """

    name: str
    target: Rows
    draft: Rows | None
    proposals: tuple[int, ...]
    uniforms: tuple[float, ...]
    output: tuple[int, ...]
    accepted_len: int
    parameters: Mapping[str, float] = field(default_factory=dict)

    def arguments(self, device: str = "cpu") -> dict[str, Any]:
        """Make the arguments of verify_chain."""
        return {
            "target_logits": torch.tensor(self.target, device=device),
            "cu_rows": torch.tensor([0, len(self.target)], dtype=torch.int32, device=device),
            "draft_token_ids": _int32(self.proposals, device),
            "uniform_samples": torch.tensor([self.uniforms], device=device),
            "draft_logits": _optional_rows(self.draft, device),
            **_parameters(self.parameters, device),
        }


@dataclass(frozen=True)
class TreeEdge:
    """One sequence for verify_tree, and the expected result.

    Attributes:
        name: the mistake of a verifier that fails.
        sibling_rule: see `verify_tree`.
        target, draft: rows of logits, one per node; draft None with "target_only".
        tokens, parents: [N], one per node.
        uniforms: uniform_samples [N+1].
        path, output: the right answer, without padding.
        parameters: sampling parameters of the sequence.
    """

    name: str
    sibling_rule: str
    target: Rows
    draft: Rows | None
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    uniforms: tuple[float, ...]
    path: tuple[int, ...]
    output: tuple[int, ...]
    parameters: Mapping[str, float] = field(default_factory=dict)

    def arguments(self, device: str = "cpu") -> dict[str, Any]:
        """Make the arguments of verify_tree."""
        return {
            "target_logits": torch.tensor(self.target, device=device),
            "cu_rows": torch.tensor([0, len(self.target)], dtype=torch.int32, device=device),
            "tree_token_ids": _int32(self.tokens, device),
            "parents": _int32(self.parents, device),
            "uniform_samples": torch.tensor([self.uniforms], device=device),
            "sibling_rule": self.sibling_rule,
            "draft_logits": _optional_rows(self.draft, device),
            **_parameters(self.parameters, device),
        }


def assert_chain_edge(verify: Callable[..., Any], edge: ChainEdge, device: str = "cpu") -> None:
    """Check one edge case.

    Args:
        verify: called like verify_chain.
        edge: the case.
        device: device of the tensors.
    Raises:
        AssertionError: names the case and the wrong result.
    """
    output, accepted_len = verify(**edge.arguments(device))[:2]
    seen = tuple(output[0].tolist()), int(accepted_len[0])
    wanted = edge.output, edge.accepted_len
    assert seen == wanted, f"{edge.name}: output and accepted_len {seen}, expected {wanted}"


def assert_tree_edge(verify: Callable[..., Any], edge: TreeEdge, device: str = "cpu") -> None:
    """Check one edge case.

    Args:
        verify: called like verify_tree.
        edge: the case.
        device: device of the tensors.
    Raises:
        AssertionError: names the case and the wrong result.
    """
    path, output, accepted_len = verify(**edge.arguments(device))[:3]
    padding = (-1,) * len(edge.tokens)
    seen = tuple(path[0].tolist()), tuple(output[0].tolist()), int(accepted_len[0])
    wanted = (
        (edge.path + padding)[: len(padding)],
        (edge.output + padding)[: len(padding)],
        len(edge.path) if edge.output else -1,
    )
    assert seen == wanted, f"{edge.name}: path, output, accepted_len {seen}, expected {wanted}"


def _int32(values: tuple[int, ...], device: str) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.int32, device=device).reshape(1, -1)


def _optional_rows(rows: Rows | None, device: str) -> torch.Tensor | None:
    return None if rows is None else torch.tensor([rows], device=device)


def _parameters(parameters: Mapping[str, float], device: str) -> dict[str, torch.Tensor]:
    return {
        name: torch.tensor(
            [value], dtype=torch.int32 if name == "top_k" else torch.float32, device=device
        )
        for name, value in parameters.items()
    }
