"""Verification ops: from target logits and proposals to the tokens to emit."""

import math

import torch
from torch import Tensor

from fastspec_kernels import reference
from fastspec_kernels.backend import resolve
from fastspec_kernels.checks import check_logits, check_sampling, check_tensor


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
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Accept a prefix of each chain and draw one more token; outputs follow the target exactly.

    Proposal i is accepted while uniform_samples[b, i] * draft_prob < lenience * target_prob,
    strictly; the first failure stops. The extra token then comes from max(lenience * target -
    draft, 0) at that position, or from the target itself where that is all zero; with every
    proposal accepted, from the row after the last one. It is drawn by inverse CDF with the last
    uniform number. Both models' rows pass through the same temperature and filters (see
    `row_stats`). A greedy sequence (temperature 0) accepts while the proposal is the target's
    argmax, and reads neither draft rows nor uniform numbers.

    Sequence b owns the rows cu_rows[b]:cu_rows[b+1]: row i judges proposal i, and one row more
    follows. It has min(rows - 1, leading non-negative ids, K) proposals; with no rows at all it
    takes no part.

    Args:
        target_logits: [T, V] float32, bfloat16 or float16, any row stride.
        cu_rows: [B+1] int32, prefix sums of the rows of each sequence, from 0 to at most T; checked
            on the CPU only.
        draft_token_ids: [B, K] int32, padded with -1; an id outside the vocabulary is rejected.
        uniform_samples: [B, K+1] float32 in [0, 1).
        draft_logits: [B, K, draft V] float32, bfloat16 or float16, draft V <= V (ids beyond it have
            draft probability 0); must be the logits the proposals were drawn from. None means each
            proposal was certain.
        temperature, top_k, top_p, min_p: [B] each, see `row_stats`.
        lenience: finite, >= 1; above 1 more proposals pass and the output no longer follows the
            target (lossy).
        method: "standard".
        backend: "auto", "cpu", "cuda" or "reference".
    Returns:
        output_token_ids: [B, K+1] int32: accepted proposals, the extra token, then -1.
        accepted_len: [B] int32 in 0..K; -1 where a row in use is invalid (see `row_stats`), with no
            output.
        logprobs: [B, K+1] float32, the target's log-probability of each token as in `sample`, 0
            after the end.
    Raises:
        ValueError: a wrong dtype, shape, device, stride, lenience or method, or a backend that
            cannot run this.

    No host synchronisation; safe in CUDA graphs. A sequence's result never depends on the others in
    the batch.

    Sources: Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318; lenience
    as in arXiv 2312.11462.
    """
    check_logits("target_logits", target_logits, 2)
    device = target_logits.device
    check_tensor("draft_token_ids", draft_token_ids, (None, None), (torch.int32,), device)
    batch, num_draft = draft_token_ids.shape
    check_tensor("cu_rows", cu_rows, (batch + 1,), (torch.int32,), device)
    uniform_shape = (batch, num_draft + 1)
    check_tensor("uniform_samples", uniform_samples, uniform_shape, (torch.float32,), device)
    if draft_logits is not None:
        _check_draft_logits(draft_logits, target_logits, batch, num_draft)
    check_sampling(batch, device, temperature, top_k, top_p, min_p)
    if device.type == "cpu":
        _check_cu_rows(cu_rows.tolist(), target_logits.shape[0])
    if not 1 <= lenience < math.inf:
        raise ValueError(f"lenience: expected a finite number >= 1, got {lenience}")
    if method == "block":
        raise ValueError("method: 'block' is not supported yet, use 'standard'")
    if method != "standard":
        raise ValueError(f"method: expected 'standard', got {method!r}")

    if resolve("verify_chain", backend, device) == "reference":
        run = reference.verify_chain
    else:
        run = torch.ops.fastspec.verify_chain
    return run(
        target_logits,
        cu_rows.contiguous(),
        draft_token_ids.contiguous(),
        uniform_samples.contiguous(),
        draft_logits,
        temperature,
        top_k,
        top_p,
        min_p,
        lenience,
    )


def _check_draft_logits(logits: Tensor, target_logits: Tensor, batch: int, num_draft: int) -> None:
    """Check the shape of the draft rows against the proposals and the target's vocabulary."""
    check_logits("draft_logits", logits, 3, target_logits.device)
    if logits.shape[:2] != (batch, num_draft):
        raise ValueError(
            f"draft_logits: expected shape [{batch}, {num_draft}, *], got {list(logits.shape)}"
        )
    if logits.shape[2] > target_logits.shape[1]:
        raise ValueError(
            f"draft_logits: a vocabulary of {logits.shape[2]} is larger than "
            f"the target's {target_logits.shape[1]}"
        )


def _check_cu_rows(cu_rows: list[int], num_rows: int) -> None:
    """Check that the prefix sums start at 0, never fall, and end within the rows."""
    if cu_rows[0] != 0 or cu_rows != sorted(cu_rows) or cu_rows[-1] > num_rows:
        raise ValueError(
            f"cu_rows: expected prefix sums from 0 to at most {num_rows} rows, got {cu_rows}"
        )
