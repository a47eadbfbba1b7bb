"""The target's side of a round with token trees: judge every node in one pass, keep one path."""

from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import pad

from fastspec.drafters import Proposal
from fastspec.models.transfer import device_tensor
from fastspec.outputs import StepTree
from fastspec.request import VERIFY_STREAM, Batch
from fastspec.runner import ModelRunner
from fastspec.token_tree import TreeLayout, packed
from fastspec.verification import (
    AcceptanceRule,
    Verdict,
    judged_spans,
    wanted_logprobs,
    with_newest,
)
from fastspec_kernels import verify_tree


def verify_trees(
    runner: ModelRunner, batch: Batch, proposal: Proposal, rule: AcceptanceRule
) -> list[Verdict]:
    """Judge the trees in one target pass, and move what it accepted behind the cached tokens.

    As with chains, a round's only copy from the device is made here.

    Raises:
        ValueError: a proposal without parents or rule, or a rule that judges only chains.
    """
    if proposal.parents is None or proposal.sibling_rule is None:
        raise ValueError("parents: expected those of trees, got None")
    if rule.method != "standard":
        raise ValueError(f"rejection_sample_method: {rule.method!r} judges chains, not token trees")
    if rule.lenience != 1:
        raise ValueError(f"relaxed_acceptance: {rule.lenience} judges chains, not token trees")
    counts, spans = judged_spans(batch, proposal)
    tree_ids = with_newest(batch, proposal)  # [B, N]
    parents = pad(proposal.parents.masked_fill(proposal.token_ids < 0, -1), (1, 0), value=-1)
    target_logits = runner.forward(
        packed(tree_ids.clamp(0, runner.vocab_size - 1).long(), counts),
        spans,
        tree=TreeLayout.of(parents, batch.backend),
    )
    path, output_ids, accepted_len, logprobs = verify_tree(
        target_logits,
        device_tensor([*accumulate(counts, initial=0)], torch.int32, batch.device),
        tree_ids,
        parents,
        _uniforms(batch, tree_ids.shape[1]),
        sibling_rule=proposal.sibling_rule,
        draft_logits=proposal.draft_logits,
        **batch.sampling,
        backend=batch.backend,
    )
    runner.compact(spans, path, accepted_len)
    lens = accepted_len[:, None].expand_as(path)
    table = torch.stack([lens, path, output_ids, tree_ids, parents], dim=1).tolist()
    logprob_rows = wanted_logprobs(batch, logprobs)
    return [_verdict(*columns) for columns in zip(table, counts, logprob_rows, strict=True)]


def _uniforms(batch: Batch, num_nodes: int) -> Tensor:
    """[B, N + 1]: a number for each node, and last that which chains have for their extra token.

    So a request that nothing is proposed for gets the same token, whether others have trees or not.
    """
    extra = batch.num_speculative_tokens  # the last column of a chain
    numbers = batch.uniforms(max(num_nodes, extra) + 1, VERIFY_STREAM)
    parts = [
        numbers[:, : min(extra, num_nodes)],
        numbers[:, extra + 1 : num_nodes + 1],
        numbers[:, extra : extra + 1],
    ]
    return torch.cat(parts, dim=1)


def _verdict(row: list[list[int]], count: int, logprobs: list[float] | None) -> Verdict:
    (accepted_len, *_), path, output_ids, token_ids, parents = row
    accepted, emitted = max(accepted_len, 0), accepted_len + 1
    tree = StepTree(tuple(token_ids[:count]), tuple(parents[:count]), tuple(path[:accepted]))
    depths = _depths(tree.parents)
    end = tree.path[-1] if accepted else 0
    extra_source = "recovered" if end in tree.parents else "bonus"
    return Verdict(
        max(depths),
        accepted_len,
        output_ids[:emitted],
        logprobs[:emitted] if logprobs else None,
        extra_source if max(depths) else "target",
        tree,
    )


def _depths(parents: tuple[int, ...]) -> list[int]:
    """Depth of each node, 0 for the root; -1 where there is none."""
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1 if parent >= 0 and depths[parent] >= 0 else -1)
    return depths
