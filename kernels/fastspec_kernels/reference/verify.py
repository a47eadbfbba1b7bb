"""Reference of the verification ops: which proposals are accepted, and the token after them."""

import torch
from torch import Tensor

from fastspec_kernels.reference.sampling import draw, row_distributions


def verify_chain(
    target_logits: Tensor,
    cu_rows: Tensor,
    draft_token_ids: Tensor,
    uniform_samples: Tensor,
    draft_logits: Tensor | None,
    temperature: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    lenience: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Speculative sampling of a chain: accept a prefix, then draw one more token."""
    batch, num_draft = draft_token_ids.shape
    num_rows, vocab = target_logits.shape
    step = torch.arange(num_draft + 1, device=target_logits.device)  # [K+1]
    if batch == 0 or num_rows == 0:
        nothing = draft_token_ids.new_full((batch, num_draft + 1), -1)
        return nothing, draft_token_ids.new_zeros(batch), nothing.new_zeros(nothing.shape).float()

    cu_rows = cu_rows.long()
    present = cu_rows[1:] > cu_rows[:-1]
    leading = (draft_token_ids >= 0).cumprod(-1).sum(-1)
    num_proposals = torch.minimum(leading, cu_rows[1:] - cu_rows[:-1] - 1).clamp(min=0)[:, None]
    proposed = step < num_proposals  # [B, K+1]
    rows = (cu_rows[:-1, None] + torch.minimum(step, num_proposals)).clamp(0, num_rows - 1)

    params = (temperature, top_k, top_p, min_p)
    target_probs, target_log_probs, valid = _distributions(target_logits[rows], *params)
    valid = valid.all(-1)  # [B]
    greedy = torch.zeros_like(present) if temperature is None else temperature == 0

    # The proposals of step K, and the draft probabilities of steps without a proposal, are zero.
    tokens = torch.nn.functional.pad(draft_token_ids, (0, 1), value=vocab).long()  # [B, K+1]
    use_draft = proposed & ~greedy[:, None]
    if draft_logits is None:
        draft_probs = (torch.arange(vocab, device=step.device) == tokens[..., None]).double()
    else:
        probs, _, draft_valid = _distributions(draft_logits, *params)
        draft_probs = torch.zeros_like(target_probs)
        draft_probs[:, :num_draft, : draft_logits.shape[-1]] = probs
        valid &= (draft_valid | ~use_draft[:, :num_draft]).all(-1)
    draft_probs = torch.where(use_draft[..., None], draft_probs, 0.0)

    column = tokens.clamp(0, vocab - 1)[..., None]
    target_prob = torch.where(tokens < vocab, target_probs.gather(-1, column)[..., 0], 0.0)
    draft_prob = torch.where(tokens < vocab, draft_probs.gather(-1, column)[..., 0], 0.0)
    accepted = uniform_samples.double() * draft_prob < lenience * target_prob
    accepted = torch.where(greedy[:, None], target_prob > 0, accepted) & proposed
    accepted_len = accepted.cumprod(-1).sum(-1)  # [B]

    sequence = torch.arange(batch, device=step.device)
    target_row = target_probs[sequence, accepted_len]  # [B, V]
    residual = (lenience * target_row - draft_probs[sequence, accepted_len]).clamp(min=0)
    has_residual = (residual.sum(-1) > 0)[:, None]
    extra = draw(torch.where(has_residual, residual, target_row), uniform_samples[:, -1])

    output = torch.where(step < accepted_len[:, None], tokens, extra[:, None])
    logprobs = target_log_probs.gather(-1, output[..., None])[..., 0]
    emitted = (step <= accepted_len[:, None]) & (present & valid)[:, None]
    accepted_len = torch.where(present, torch.where(valid, accepted_len, -1), 0)
    return (
        torch.where(emitted, output, -1).int(),
        accepted_len.int(),
        torch.where(emitted, logprobs, 0.0).float(),
    )


def _distributions(
    logits: Tensor,
    temperature: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities [B, S, V], their logarithms, and validity [B, S] of S rows per sequence."""
    per_row = [
        None if param is None else param.repeat_interleave(logits.shape[1])
        for param in (temperature, top_k, top_p, min_p)
    ]
    flat = row_distributions(logits.flatten(0, 1), *per_row)
    shape = logits.shape
    return flat.probs.view(shape), flat.log_probs.view(shape), flat.valid.view(shape[:2])
