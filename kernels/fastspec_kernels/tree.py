"""Token trees: verification of a tree, and the structure that attention needs."""

import torch
from torch import Tensor

from fastspec_kernels.backend import run_checked
from fastspec_kernels.checks import (
    check_choice,
    check_cu_rows,
    check_draft_rows,
    check_draft_token_map,
    check_logits,
    check_parents,
    check_sampling,
    check_tensor,
    check_token_bitmask,
    dense,
)

SIBLING_RULES = ("target_only", "without_replacement", "with_replacement")


def verify_tree(
    target_logits: Tensor,
    cu_rows: Tensor,
    tree_token_ids: Tensor,
    parents: Tensor,
    uniform_samples: Tensor,
    *,
    sibling_rule: str,
    draft_logits: Tensor | None = None,
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    draft_token_map: Tensor | None = None,
    token_bitmask: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Accept one path of each tree and draw one more token; output follows the target exactly.

    The walk starts at node 0, the last committed token. At each node it tries the children in the
    order of their indices, moves to the first accepted one, and ends if none is. Which rule is
    exact depends on how siblings were chosen, so `sibling_rule` has no default:

    - "target_only": distinct siblings, chosen independently of the random numbers of this step (for
      example the k most probable). Child c is accepted if uniform_samples[b, node] is below the
      target probability of c and its earlier siblings together. The extra token comes from the
      target without the siblings' tokens. A token that repeats an earlier sibling's is skipped.
    - "without_replacement": siblings drawn from the node's draft row, each without the tokens of
      the earlier ones. Child c is accepted if uniform_samples[b, c] * draft < target, strictly, at
      its token; otherwise target becomes max(target - draft, 0), and the token is removed from
      draft, both normalised. The extra token comes from the remaining target.
    - "with_replacement": siblings drawn independently from the node's draft row; as above, but
      draft does not change.

    The extra token is drawn by inverse CDF with the last uniform number; if nothing of the target
    remains, from the target itself. Both models' rows use the same temperature and filters (see
    `row_stats`). A greedy sequence (temperature 0) moves to the first child that is the target's
    argmax, and reads neither draft rows nor uniform numbers.

    Args:
        target_logits: [T, V] float32, bfloat16 or float16, any row stride. Sequence b owns the
            rows cu_rows[b]:cu_rows[b+1]; its row i verifies the children of node i, and nodes
            without a row do not exist. A sequence without rows takes no part.
        cu_rows: [B+1] int32, prefix sums of the rows of each sequence, from 0 to at most T; checked
            on the CPU only.
        tree_token_ids: [B, N] int32, N >= 1; node 0's is not read; ids outside the vocabulary are
            rejected.
        parents: [B, N] int32, parents[b, i] < i; -1 for padding; node 0's is not read. Checked on
            the CPU only; elsewhere an invalid parent means padding.
        uniform_samples: [B, N+1] float32 in [0, 1).
        sibling_rule: see above.
        draft_logits: [B, N, draft V] float32, bfloat16 or float16, draft V <= V: the children of
            node i were drawn from row i. Must be None for "target_only", and only then. Without
            replacement, give tokens that are e^14 times less probable than the row's best one
            logits of -inf before drawing: what remains after that one is rejected is computed to
            about 2^-23 of its probability, so rarer siblings would be accepted too often.
        temperature, top_k, top_p, min_p: [B] each, see `row_stats`.
        draft_token_map: [V] int32, contiguous, the column of each target token in the draft rows,
            see `verify_chain`. With "without_replacement" every column that siblings can be drawn
            from must belong to exactly one target token.
        token_bitmask: [T, ceil(V/32)] int32, allowed tokens of the target rows, see `row_stats`.
        backend: "auto", "cpu", "cuda", "triton" or "reference".
    Returns:
        path: [B, N] int32, the accepted nodes after the root, then -1.
        output_token_ids: [B, N] int32, their tokens, the extra token, then -1.
        accepted_len: [B] int32 in 0..N-1; -1, with no output, if a row that the walk used is
            invalid (see `row_stats`).
        logprobs: [B, N] float32, the target's log-probability of each token as in `sample`, 0 after
            the end.
    Raises:
        ValueError: a wrong dtype, shape, device, stride, parent or sibling rule, draft rows that do
            not match the rule, or a backend that cannot run this.

    No host synchronisation; safe in CUDA graphs. A sequence's result never depends on the others in
    the batch.

    Sources: the rules of SpecInfer (arXiv 2305.09781, with replacement) and Sequoia (arXiv
    2402.12374, without).
    """

    def check():
        check_logits("target_logits", target_logits, 2)
        device = target_logits.device
        check_tensor("tree_token_ids", tree_token_ids, (None, None), (torch.int32,), device)
        batch, num_nodes = tree_token_ids.shape
        if num_nodes == 0:
            raise ValueError(f"tree_token_ids: a tree needs its root, shape {[batch, num_nodes]}")
        check_cu_rows(cu_rows, batch, target_logits)
        check_parents(parents, (batch, num_nodes), device)
        uniform_shape = (batch, num_nodes + 1)
        check_tensor("uniform_samples", uniform_samples, uniform_shape, (torch.float32,), device)
        _check_sibling_rule(sibling_rule, draft_logits)
        check_draft_rows(draft_logits, (batch, num_nodes), target_logits)
        check_sampling(batch, device, temperature, top_k, top_p, min_p)
        check_draft_token_map(draft_token_map, draft_logits, target_logits)
        check_token_bitmask(token_bitmask, target_logits.shape[0], target_logits)

    arguments = (
        target_logits,
        dense(cu_rows),
        dense(tree_token_ids),
        dense(parents),
        dense(uniform_samples),
        sibling_rule,
        draft_logits,
        temperature,
        top_k,
        top_p,
        min_p,
        draft_token_map,
        token_bitmask,
    )
    return run_checked("verify_tree", backend, target_logits, arguments, check)


def build_tree(parents: Tensor, *, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """Compute the depths and ancestor masks of each tree's nodes.

    Args:
        parents: [B, N] int32, parents[b, i] < i; -1 for padding; that of node 0, the root, is not
            read. Checked on the CPU only; elsewhere an invalid parent means padding.
        backend: "auto", "cpu", "cuda", "triton" or "reference".
    Returns:
        depths: [B, N] int32, 0 for the root; -1 for padding and its descendants.
        ancestor_mask: [B, N, ceil(N/64)] int64; bit j % 64 of word j // 64 is set if node j is the
            node itself or one of its ancestors; 0 for padding.
    Raises:
        ValueError: a wrong dtype, shape or parent, or a backend that cannot run this.

    No host synchronisation; safe in CUDA graphs.
    """

    def check():
        check_tensor("parents", parents, (None, None), (torch.int32,), None)
        check_parents(parents, (parents.shape[0], parents.shape[1]), parents.device)

    return run_checked("build_tree", backend, parents, (dense(parents),), check)


def _check_sibling_rule(sibling_rule: str, draft_logits: Tensor | None) -> None:
    """Check that the rule exists and has the draft rows it needs."""
    check_choice("sibling_rule", sibling_rule, SIBLING_RULES)
    if sibling_rule == "target_only" and draft_logits is not None:
        raise ValueError("draft_logits: expected None with sibling_rule 'target_only'")
    if sibling_rule != "target_only" and draft_logits is None:
        raise ValueError(f"draft_logits: required with sibling_rule {sibling_rule!r}")
