"""Reference of the tree ops: the accepted path, the token after it, ancestor masks."""

import torch
from torch import Tensor

from fastspec_kernels.reference.sampling import draw
from fastspec_kernels.reference.verify import (
    distributions,
    distributions_at,
    over_target_vocabulary,
    positive_or,
    prob_of,
)


def verify_tree(
    target_logits: Tensor,
    cu_rows: Tensor,
    tree_token_ids: Tensor,
    parents: Tensor,
    uniform_samples: Tensor,
    sibling_rule: str,
    draft_logits: Tensor | None,
    temperature: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    draft_token_map: Tensor | None,
    token_bitmask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Walk down from the root; children follow their parents, so one pass over nodes suffices."""
    batch, num_nodes = tree_token_ids.shape
    vocab = target_logits.shape[1]
    if batch == 0 or target_logits.shape[0] == 0:
        nothing = torch.full_like(tree_token_ids, -1)
        return nothing, nothing.clone(), nothing.new_zeros(batch), torch.zeros_like(nothing).float()

    cu_rows = cu_rows.long()
    node = torch.arange(num_nodes, device=target_logits.device)
    parents = _parents_or_padding(parents)
    exists = (parents >= 0) & (node < (cu_rows[1:] - cu_rows[:-1])[:, None])  # [B, N]
    params = (temperature, top_k, top_p, min_p)
    target = distributions_at(target_logits, cu_rows[:-1, None] + node, params, token_bitmask)
    greedy = torch.zeros_like(cu_rows[1:]) if temperature is None else temperature == 0
    # One rule covers greedy, too: with a one-hot target the siblings' masses add up to 0 or 1.
    by_mass = torch.ones_like(greedy.bool()) if sibling_rule == "target_only" else greedy.bool()
    draft_probs, draft_valid = torch.zeros_like(target.probs), torch.ones_like(target.valid)
    if draft_logits is not None:
        draft = distributions(draft_logits, params)
        draft_probs = over_target_vocabulary(draft.probs, draft_token_map, vocab)
        draft_valid = draft.valid | by_mass[:, None]

    uniform, tokens = uniform_samples.double(), tree_token_ids.long()
    sequence = torch.arange(batch, device=node.device)
    current = torch.zeros_like(sequence)  # [B], the last accepted node
    target_left, draft_left = target.probs[:, 0], draft_probs[:, 0]  # [B, V]
    mass = torch.zeros_like(uniform[:, 0])  # of the siblings seen so far
    valid = target.valid[:, 0]
    accepted = torch.zeros_like(exists)
    for i in range(1, num_nodes):
        is_child = exists[:, i] & (parents[:, i] == current)
        valid = valid & (draft_valid[sequence, current] | ~is_child)
        target_prob = prob_of(target_left, tokens[:, i])
        mass = torch.where(is_child, mass + target_prob, mass)
        within = (uniform[sequence, current] < mass) & (target_prob > 0)
        below = uniform[:, i] * prob_of(draft_left, tokens[:, i]) < target_prob
        accepts = is_child & torch.where(by_mass, within, below)
        rejects = is_child & ~accepts

        is_token = torch.arange(vocab, device=node.device) == tokens[:, i, None]
        rest = torch.where(
            by_mass[:, None],
            torch.where(is_token, 0.0, target_left),
            _normalised(positive_or(target_left - draft_left, target_left)),
        )
        target_left = torch.where(rejects[:, None], rest, target_left)
        target_left = torch.where(accepts[:, None], target.probs[:, i], target_left)
        if sibling_rule == "without_replacement":
            rest = _normalised(torch.where(is_token, 0.0, draft_left))
            draft_left = torch.where(rejects[:, None], rest, draft_left)
        draft_left = torch.where(accepts[:, None], draft_probs[:, i], draft_left)
        mass = torch.where(accepts, 0.0, mass)
        valid = valid & (target.valid[:, i] | ~accepts)
        current = torch.where(accepts, i, current)
        accepted[:, i] = accepts

    extra = draw(positive_or(target_left, target.probs[sequence, current]), uniform[:, -1])
    logprobs = prob_of(target.log_probs[sequence[:, None], parents.clamp(min=0)], tokens)
    extra_logprob = prob_of(target.log_probs[sequence, current], extra)
    present = cu_rows[1:] > cu_rows[:-1]
    accepted &= (present & valid)[:, None]
    accepted_len = accepted.sum(-1)
    ends = torch.where(present & valid, accepted_len, num_nodes)[:, None]
    place = torch.where(accepted, accepted.cumsum(-1) - 1, num_nodes)

    def along_path(values: Tensor, last: Tensor, empty: float) -> Tensor:
        """Move values [B, N] of accepted nodes to the front, append `last`, and pad."""
        row = torch.full((batch, num_nodes + 1), empty, dtype=values.dtype, device=node.device)
        return row.scatter(1, place, values).scatter(1, ends, last[:, None])[:, :num_nodes]

    path = along_path(node.expand(batch, -1), torch.full_like(extra, -1), -1)
    return (
        path.int(),
        along_path(tokens, extra, -1).int(),
        torch.where(valid | ~present, accepted_len, -1).int(),
        along_path(logprobs, extra_logprob, 0.0).float(),
    )


def build_tree(parents: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the depth of each node, and one bit for itself and for each of its ancestors."""
    batch, num_nodes = parents.shape
    words = (num_nodes + 63) // 64
    depths = torch.full_like(parents, -1, dtype=torch.int32)
    mask = torch.zeros((batch, num_nodes, words), dtype=torch.int64, device=parents.device)
    parents = _parents_or_padding(parents)
    sequence = torch.arange(batch, device=parents.device)
    for i in range(num_nodes):
        parent = parents[:, i].clamp(min=0)
        present = (parents[:, i] >= 0) & (depths[sequence, parent] >= 0) if i else parent >= 0
        depth = depths[sequence, parent] + 1 if i else torch.zeros_like(parent)
        own = torch.zeros_like(mask[:, i])
        own[:, i // 64] = -(2**63) if i % 64 == 63 else 1 << (i % 64)
        depths[:, i] = torch.where(present, depth, -1)
        mask[:, i] = torch.where(present[:, None], mask[sequence, parent] | own, 0)
    return depths, mask


def _parents_or_padding(parents: Tensor) -> Tensor:
    """Return parents [B, N] int64; -1 for the root and for anything but an earlier node."""
    node = torch.arange(parents.shape[1], device=parents.device)
    return torch.where((parents >= 0) & (parents < node), parents, -1).long()


def _normalised(weights: Tensor) -> Tensor:
    """Normalise rows [B, V] to sum 1; a row without mass stays zero."""
    total = weights.cumsum(-1)[:, -1:]
    return torch.where(total > 0, weights / total, 0.0)
