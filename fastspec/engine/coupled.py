"""Verification by coupled draws: the target draws every token by its place, drafts only save time.

A token is the argmax of logit / temperature plus Gumbel noise that seed and place in the text
determine. So a text is the same with any drafter, any number of drafts, or none; and a draft model
that reads the same noise often draws the same token. Source: Daliri, Musco and Suresh, "Coupling
without communication and drafter-invariant speculative decoding", arXiv 2408.07978.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from fastspec.drafters.base import Batch
from fastspec.drafters.draft_model import of_rows
from fastspec_kernels import build_tree, sample_coupled


def judge_coupled(
    target_logits: Tensor,
    places: Tensor,
    ids: Tensor,
    parents: Tensor | None,
    batch: Batch,
    token_bitmask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw a token after each row [T], and follow the draws through the trees as far as they go.

    Args:
        places: [2, T] int64, the sequence and the node that each row stands after.
        ids: [B, N] int32, node 0 is the last committed token.
        parents: [B, N] int32, None = chains.
    Returns:
        path, output ids, accepted_len and logprobs, as `fastspec_kernels.verify_tree` gives them.
    """
    owners, nodes = places
    num_requests, width = ids.shape
    chain = torch.arange(-1, width - 1, device=ids.device)
    depths = (chain + 1).expand_as(ids)
    if parents is not None:
        depths, _ = build_tree(parents, backend=batch.backend)
    parents = chain.expand_as(ids) if parents is None else parents
    seeds, lengths = batch.keys
    picked, logprobs = sample_coupled(
        target_logits,
        seeds[owners],
        lengths[owners] + depths[owners, nodes],
        **of_rows(batch.sampling, owners),
        token_bitmask=token_bitmask,
        backend=batch.backend,
    )
    choices = torch.full_like(ids, -1)  # [B, N], -1 after nodes that are not judged
    choices[owners, nodes] = picked
    logprob_of = logprobs.new_zeros(ids.shape)
    logprob_of[owners, nodes] = logprobs
    is_judged = torch.zeros_like(ids, dtype=torch.bool)
    is_judged[owners, nodes] = True

    node = torch.zeros((num_requests, 1), dtype=torch.int64, device=ids.device)
    is_going = torch.ones_like(node, dtype=torch.bool)
    path, tokens, values = [node], [choices[:, :1]], [logprob_of[:, :1]]
    for _ in range(min(batch.num_speculative_tokens, width - 1)):
        choice = choices.gather(1, node)
        follows = (parents == node) & (ids == choice) & is_judged & (choice >= 0)
        is_going = is_going & follows.any(1, keepdim=True)
        node = torch.where(is_going, follows.int().argmax(1, keepdim=True), node)
        path.append(torch.where(is_going, node, -1))
        tokens.append(torch.where(is_going, choices.gather(1, node), -1))
        values.append(torch.where(is_going, logprob_of.gather(1, node), 0.0))
    steps = torch.cat(path, dim=1)
    accepted_len = (steps >= 0).sum(1) - 1
    is_valid = choices.gather(1, node) >= 0  # [B, 1], of the row that the text gets to
    accepted_len = torch.where(is_valid[:, 0], accepted_len, -1).int()
    missing = width - steps.shape[1]
    return (
        pad(steps[:, 1:].int().where(is_valid, -1), (0, missing + 1), value=-1),
        pad(torch.cat(tokens, dim=1).where(is_valid, -1), (0, missing), value=-1),
        accepted_len,
        pad(torch.cat(values, dim=1).where(is_valid, 0.0), (0, missing)),
    )
