"""The specification of bias and penalties."""

import torch
from torch import Tensor


def penalize(
    logits: Tensor,
    row_sequence: Tensor,
    row_node: Tensor,
    tree_token_ids: Tensor,
    cu_history: Tensor,
    history_ids: Tensor,
    history_counts: Tensor,
    cu_bias: Tensor,
    bias_ids: Tensor,
    bias: Tensor,
    bias_until: Tensor,
    parents: Tensor | None,
    repetition_penalty: Tensor | None,
    presence_penalty: Tensor | None,
    frequency_penalty: Tensor | None,
) -> None:
    """Spread every list over the vocabulary, then edit whole rows, in float32 as the kernels do."""
    num_rows, vocab = logits.shape
    owner = row_sequence.long()
    if parents is None:
        parents = torch.arange(-1, tree_token_ids.shape[1] - 1, device=logits.device)
        parents = parents.expand(tree_token_ids.shape)

    def over_vocabulary(cu: Tensor, ids: Tensor, values: Tensor) -> Tensor:
        """Return the values [R, V] of each row's own entries, 0 where there is none."""
        entry = torch.arange(len(ids), device=ids.device)
        sequence = torch.searchsorted(cu[1:].contiguous(), entry, right=True)
        spread = values.new_zeros((len(cu), vocab + 1))  # the last of both collects ignored entries
        column = torch.where((ids >= 0) & (ids < vocab), ids, vocab).long()
        spread[sequence, column] = values
        return spread[owner, :vocab]

    on_path = torch.zeros((num_rows, vocab + 1), dtype=torch.int32, device=logits.device)
    depth = torch.zeros_like(owner)
    node = row_node.long()
    for _ in range(tree_token_ids.shape[1] - 1):
        inside = node > 0
        token = tree_token_ids[owner, node.clamp(min=0)].long()
        column = torch.where(inside & (token >= 0) & (token < vocab), token, vocab)
        on_path.scatter_add_(1, column[:, None], torch.ones_like(on_path[:, :1]))
        depth = depth + inside
        node = torch.where(inside, parents[owner, node.clamp(min=0)].long(), node)
    on_path = on_path[:, :vocab]

    is_known = over_vocabulary(cu_history, history_ids, torch.ones_like(history_ids))
    count = over_vocabulary(cu_history, history_ids, history_counts) + on_path
    seen = (is_known > 0) | (on_path > 0)
    biased = depth[:, None] < over_vocabulary(cu_bias, bias_ids, bias_until)

    x = logits.float()
    x = torch.where(biased, x + over_vocabulary(cu_bias, bias_ids, bias), x)
    if repetition_penalty is not None:
        repetition = repetition_penalty[owner, None]
        x = torch.where(seen, torch.where(x > 0, x / repetition, x * repetition), x)
    share = torch.zeros_like(x)
    if frequency_penalty is not None:
        share = frequency_penalty[owner, None] * count
    if presence_penalty is not None:
        share = share + presence_penalty[owner, None]
    x = torch.where(count > 0, x - share, x)
    logits.copy_(torch.where(biased | seen, x.to(logits.dtype), logits))
