"""Verification that tosses a coin, to measure speed at a rate of acceptance: LOSSY."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from fastspec.drafters.base import SamplingTensors
from fastspec.drafters.draft_model import of_rows
from fastspec_kernels import row_stats, sample


def judge_synthetic(
    target_logits: Tensor,
    cu_rows: Tensor,
    draft_token_ids: Tensor,
    uniforms: Tensor,
    rate: float,
    sampling: SamplingTensors,
    token_bitmask: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Accept each draft token after accepted ones with probability `rate`, whatever its own is.

    Only a token that the bitmask forbids is never accepted. The token after the accepted ones is
    the target's own. Arguments, results and the rows read are those of
    `fastspec_kernels.verify_chain`; greedy requests toss coins too.
    """
    num_requests, width = draft_token_ids.shape
    device = target_logits.device
    places, first = torch.arange(width, device=device), cu_rows[:-1, None].long()
    counts = cu_rows.diff().long()
    stands = (places < counts[:, None] - 1) & (draft_token_ids >= 0)
    rows = torch.where(stands, first + places, first)
    tokens = draft_token_ids.clamp(min=0).long()
    if token_bitmask is not None:
        stands &= (token_bitmask[rows, tokens // 32] >> (tokens % 32) & 1) == 1
    accepted = (stands & (uniforms[:, :width] < rate)).int().cumprod(1).sum(1)

    owners = torch.arange(num_requests, device=device).repeat_interleave(counts)
    given = {**of_rows(sampling, owners), "token_bitmask": token_bitmask, "backend": backend}
    logsumexp, _ = row_stats(target_logits, **given)
    scale = sampling["temperature"]
    values = target_logits[rows, tokens].float()
    if scale is not None:
        values = values / torch.where(scale == 0, 1.0, scale)[:, None]
    logprobs = values - logsumexp[rows]

    last = first[:, 0] + accepted
    mask = None if token_bitmask is None else token_bitmask[last]
    given = {**sampling, "token_bitmask": mask, "backend": backend}
    extra, extra_logprob = sample(target_logits[last], uniforms[:, width], **given)
    is_kept = places < accepted[:, None]
    ids = pad(draft_token_ids.where(is_kept, -1), (0, 1), value=-1)
    ids = ids.scatter(1, accepted[:, None], extra[:, None])
    logprobs = pad(logprobs.where(is_kept, 0.0), (0, 1))
    logprobs = logprobs.scatter(1, accepted[:, None], extra_logprob[:, None])
    accepted = torch.where(extra < 0, -1, accepted)
    return ids, accepted.int(), logprobs
