"""Edits of logits that depend on a sequence's text: bias and penalties."""

import torch
from torch import Tensor

from fastspec_kernels.backend import run_checked
from fastspec_kernels.checks import (
    check_logits,
    check_parents,
    check_sums,
    check_tensor,
    dense,
)

_INT = (torch.int32,)
_FLOAT = (torch.float32,)


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
    *,
    parents: Tensor | None = None,
    repetition_penalty: Tensor | None = None,
    presence_penalty: Tensor | None = None,
    frequency_penalty: Tensor | None = None,
    backend: str = "auto",
) -> None:
    """Apply bias and penalties to each row of logits by its own text, in place.

    Row r has the logits of the token after node i = row_node[r] of the tree of sequence
    b = row_sequence[r]. Its text is the committed text, which ends with node 0, and its path: the
    tokens of the nodes from i up to but not including node 0. The depth of the row is the number of
    nodes of its path.

    A token is seen if it is in the history or on the path; its count is its history count plus how
    often it is on the path. Each logit x is then changed in this order:

    1. x += bias[e] if entry e of b names the token and the row's depth is below bias_until[e];
    2. if the token is seen, x /= repetition_penalty where x > 0, else x *= repetition_penalty;
    3. if its count is above 0, x -= frequency_penalty * count + presence_penalty.

    This is computed in float32 and rounded once, to nearest even. -inf stays -inf, NaN stays NaN.
    Cost grows with history, bias and path, not with V: other logits are neither read nor written.

    Args:
        logits: [R, V] float32, bfloat16 or float16, any row stride without overlap.
        row_sequence: [R] int32, 0 <= row_sequence[r] < B.
        row_node: [R] int32, 0 <= row_node[r] < N.
        tree_token_ids: [B, N] int32, N >= 1; node 0 is the last committed token, and is not read.
        cu_history: [B+1] int32, prefix sums from 0 to at most H: entries
            cu_history[b]:cu_history[b+1] are the history of sequence b.
        history_ids: [H] int32, the distinct tokens of the committed text, ascending within a
            sequence.
        history_counts: [H] int32, count of each token in the output; 0 = in the prompt only.
        cu_bias: [B+1] int32, prefix sums of the bias entries, as cu_history, at most E.
        bias_ids: [E] int32, distinct and ascending within a sequence.
        bias: [E] float32, below inf; -inf bans the token.
        bias_until: [E] int32, the depth from which the entry is off; 0 = off for all rows.
        parents: [B, N] int32, the parent of each node, parents[b, i] < i; node 0's is not read, -1
            ends a path. None = a chain, i - 1.
        repetition_penalty: [B] float32, > 0; None or 1 = off.
        presence_penalty: [B] float32; None or 0 = off.
        frequency_penalty: [B] float32; None or 0 = off.
        backend: "auto", "cpu", "cuda", "triton" or "reference".
    Raises:
        ValueError: a wrong dtype, shape, device or stride, logits whose gradient is recorded, or a
            backend that cannot run this; for tensors on the CPU also rows, nodes, parents, prefix
            sums or ids that are out of range or order, and repetition penalties that are not above
            0, before anything is written.

    Token ids outside the vocabulary are ignored. No host synchronisation; safe in CUDA graphs. All
    backends give the same bits, independently of other rows. The order is that of Hugging Face and
    vLLM; sources of the penalties: Keskar et al., "CTRL", arXiv 1909.05858 (repetition), and
    OpenAI's API (presence, frequency).
    """
    penalties = {
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
    }
    history = {"history_ids": history_ids, "history_counts": history_counts}
    biases = {"bias_ids": bias_ids, "bias": bias, "bias_until": bias_until}

    def check():
        check_logits("logits", logits, 2)
        num_rows, vocab = logits.shape
        if num_rows > 1 and logits.stride(0) < vocab:
            raise ValueError(f"logits: the rows overlap, strides {logits.stride()}")
        device = logits.device
        check_tensor("tree_token_ids", tree_token_ids, (None, None), _INT, device)
        batch, num_nodes = tree_token_ids.shape
        if num_nodes == 0:
            raise ValueError(f"tree_token_ids: a tree needs its root, shape {[batch, num_nodes]}")
        _check_indices("row_sequence", row_sequence, num_rows, batch, device)
        _check_indices("row_node", row_node, num_rows, num_nodes, device)
        if parents is not None:
            check_parents(parents, (batch, num_nodes), device)
        _check_entries("cu_history", cu_history, batch, history, device)
        _check_entries("cu_bias", cu_bias, batch, biases, device)
        for name, value in penalties.items():
            if value is not None:
                check_tensor(name, value, (batch,), _FLOAT, device)
        if repetition_penalty is not None and device.type == "cpu":
            for b, value in enumerate(repetition_penalty.tolist()):
                if not value > 0:
                    raise ValueError(f"repetition_penalty[{b}]: expected a number > 0, got {value}")

    if torch.is_grad_enabled() and isinstance(logits, Tensor) and logits.requires_grad:
        raise ValueError("logits: require a gradient, which edits in place would falsify")
    run_checked(
        "penalize",
        backend,
        logits,
        (
            logits,
            *map(dense, (row_sequence, row_node, tree_token_ids)),
            *map(dense, (cu_history, *history.values())),
            *map(dense, (cu_bias, *biases.values())),
            *(None if value is None else dense(value) for value in (parents, *penalties.values())),
        ),
        check,
    )


def _check_indices(
    name: str, indices: Tensor, num_rows: int, end: int, device: torch.device
) -> None:
    """Check one index below `end` per row; the values only if that needs no synchronisation."""
    check_tensor(name, indices, (num_rows,), _INT, device)
    if device.type == "cpu":
        for row, index in enumerate(indices.tolist()):
            if not 0 <= index < end:
                raise ValueError(f"{name}[{row}]: expected 0 to {end - 1}, got {index}")


def _check_entries(
    sums_name: str, sums: Tensor, batch: int, lists: dict[str, Tensor], device: torch.device
) -> None:
    """Check lists of entries, ids first, and the prefix sums that assign them to sequences."""
    (ids_name, ids), *values = lists.items()
    check_tensor(ids_name, ids, (None,), _INT, device)
    for name, value in values:
        check_tensor(name, value, ids.shape, _FLOAT if name == "bias" else _INT, device)
    check_sums(sums_name, sums, batch, ids.shape[0], device)
    if device.type == "cpu":
        for b, own in enumerate(ids[: int(sums[-1])].split(sums.diff().tolist())):
            falls = (own.long().diff() <= 0).nonzero()
            if len(falls):
                at = int(falls[0])
                raise ValueError(
                    f"{ids_name}: expected ascending ids within a sequence, got {int(own[at])},"
                    f" {int(own[at + 1])} in sequence {b}"
                )
