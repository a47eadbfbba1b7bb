"""Verification of chains: from target logits and proposals to the tokens to emit."""

import torch
from torch import Tensor

from fastspec_kernels.backend import run_checked
from fastspec_kernels.checks import (
    check_choice,
    check_cu_rows,
    check_dense,
    check_draft_rows,
    check_draft_token_map,
    check_logits,
    check_number,
    check_sampling,
    check_tensor,
    check_token_bitmask,
    dense,
)

METHODS = ("standard", "block")


def verify_chain(
    target_logits: Tensor,
    cu_rows: Tensor,
    draft_token_ids: Tensor,
    uniform_samples: Tensor,
    *,
    draft_logits: Tensor | None = None,
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    lenience: float = 1.0,
    method: str = "standard",
    draft_logsumexp: Tensor | None = None,
    draft_token_map: Tensor | None = None,
    token_bitmask: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Accept a prefix of each chain and draw one more token; output follows the target exactly.

    "standard": proposal i is accepted while uniform_samples[b, i] * draft_prob < lenience *
    target_prob, strictly; the first failure stops. The extra token then comes from max(lenience *
    target - draft, 0) at that position, or from the target itself if that is all zero; if every
    proposal was accepted, from the row after the last one. It is drawn by inverse CDF with the last
    uniform number. Both models' rows use the same temperature and filters (see `row_stats`). A
    greedy sequence (temperature 0) accepts while the proposal is the target's argmax, and reads
    neither draft rows nor uniform numbers.

    "block": verifies whole prefixes, and on average accepts at least as many tokens. scale_0 = 1
    and scale_i = min(1, scale_{i-1} * target_prob_i / draft_prob_i) for proposal i = 1..n; with
    rest_i the sum of max(scale_i * target - draft, 0) over the row after proposal i, prefix i
    passes if uniform_samples[b, i-1] < rest_i / (rest_i + 1 - scale_i), the last one if it is
    < scale_n. The longest prefix that passes is accepted; the extra token comes from max(scale *
    target - draft, 0). Greedy sequences are as in "standard".

    Sequence b owns the rows cu_rows[b]:cu_rows[b+1]: row i verifies proposal i, and one more row
    follows. It has min(rows - 1, leading non-negative ids, K) proposals; without rows it takes no
    part.

    Args:
        target_logits: [T, V] float32, bfloat16 or float16, any row stride.
        cu_rows: [B+1] int32, prefix sums of the rows of each sequence, from 0 to at most T; checked
            on the CPU only.
        draft_token_ids: [B, K] int32, padded with -1; ids outside the vocabulary are rejected.
        uniform_samples: [B, K+1] float32 in [0, 1).
        draft_logits: [B, K, draft V] float32, bfloat16 or float16, draft V <= V; must be the logits
            that the proposals were drawn from. None = each proposal is a point mass.
        temperature, top_k, top_p, min_p: [B] each, see `row_stats`.
        lenience: finite, >= 1; above 1 more proposals are accepted and the output no longer follows
            the target (lossy: no token's probability exceeds lenience times the target's). Must be
            1 with "block".
        method: "standard" or "block".
        draft_logsumexp: [B, K] float32, contiguous, logsumexp of the draft rows from `row_stats`.
            With it only the draft row at the first rejection is read, and only that one can be
            found invalid. It is rounded to float32, so draft probabilities have a relative error of
            up to 1e-7 times its magnitude. "standard" only.
        draft_token_map: [V] int32, contiguous, the column of each target token in the draft rows; a
            number outside 0..draft V - 1 means that the drafter does not have the token. None =
            column x for token x, and draft probability 0 from draft V on.
        token_bitmask: [T, ceil(V/32)] int32, allowed tokens of the target rows, see `row_stats`.
        backend: "auto", "cpu", "triton" or "reference".
    Returns:
        output_token_ids: [B, K+1] int32: accepted proposals, the extra token, then -1.
        accepted_len: [B] int32 in 0..K; -1, with no output, if the text reaches an invalid row of
            either model (see `row_stats`); such a row ends the chain, and rows after a rejection do
            not matter.
        logprobs: [B, K+1] float32, the target's log-probability of each token as in `sample`, 0
            after the end.
    Raises:
        ValueError: a wrong dtype, shape, device, stride, lenience or method, or a backend that
            cannot run this.

    No host synchronisation; safe in CUDA graphs. A sequence's result never depends on the others in
    the batch.

    Sources: Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318; lenience
    as in arXiv 2312.11462; block verification: Sun et al., arXiv 2403.10444.
    """
    lenience = check_number("lenience", lenience, 1.0, "a finite number >= 1")

    def check():
        check_logits("target_logits", target_logits, 2)
        device = target_logits.device
        check_tensor("draft_token_ids", draft_token_ids, (None, None), (torch.int32,), device)
        batch, num_draft = draft_token_ids.shape
        check_cu_rows(cu_rows, batch, target_logits)
        uniform_shape = (batch, num_draft + 1)
        check_tensor("uniform_samples", uniform_samples, uniform_shape, (torch.float32,), device)
        check_draft_rows(draft_logits, (batch, num_draft), target_logits)
        check_sampling(batch, device, temperature, top_k, top_p, min_p)
        _check_method(method, lenience)
        if draft_logsumexp is not None:
            _check_draft_logsumexp(draft_logsumexp, draft_logits, (batch, num_draft), method)
        check_draft_token_map(draft_token_map, draft_logits, target_logits)
        check_token_bitmask(token_bitmask, target_logits.shape[0], target_logits)

    arguments = (
        target_logits,
        dense(cu_rows),
        dense(draft_token_ids),
        dense(uniform_samples),
        draft_logits,
        temperature,
        top_k,
        top_p,
        min_p,
        lenience,
        method,
        draft_logsumexp,
        draft_token_map,
        token_bitmask,
    )
    return run_checked("verify_chain", backend, target_logits, arguments, check)


def _check_method(method: str, lenience: float) -> None:
    """Check the acceptance rule and its lenience."""
    check_choice("method", method, METHODS)
    if method == "block" and lenience != 1:
        raise ValueError(f"lenience: expected 1 with method 'block', got {lenience}")


def _check_draft_logsumexp(
    draft_logsumexp: Tensor, draft_logits: Tensor | None, shape: tuple[int, int], method: str
) -> None:
    """Check the log-sum-exp of the draft rows, and that it can be used."""
    if draft_logits is None:
        raise ValueError("draft_logsumexp: needs draft_logits")
    if method == "block":
        raise ValueError("draft_logsumexp: method 'block' reads every draft row; pass None")
    dtypes = (torch.float32,)
    check_dense("draft_logsumexp", draft_logsumexp, shape, dtypes, draft_logits.device)
