"""Reference of verify_chain: the accepted proposals of a chain, and the token after them."""

from typing import NamedTuple

import torch
from torch import Tensor

from fastspec_kernels.reference.sampling import (
    INF,
    RowDistributions,
    draw,
    only_allowed,
    row_distributions,
)

Parameters = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


class Draft(NamedTuple):
    """The drafter's probabilities, including step K, which has no proposal."""

    probs: Tensor  # [B, K+1, V], over the target's vocabulary
    proposal_prob: Tensor  # [B, K+1]
    valid: Tensor  # [B, K+1] bool, whether proposal_prob is valid
    row_valid: Tensor  # [B, K+1] bool, whether probs is valid


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
    method: str,
    draft_logsumexp: Tensor | None,
    draft_token_map: Tensor | None,
    token_bitmask: Tensor | None,
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
    num_proposals = torch.minimum(leading, cu_rows[1:] - cu_rows[:-1] - 1).clamp(min=0)
    rows = cu_rows[:-1, None] + torch.minimum(step, num_proposals[:, None])

    params = (temperature, top_k, top_p, min_p)
    target = distributions_at(target_logits, rows, params, token_bitmask)
    tokens = torch.nn.functional.pad(draft_token_ids, (0, 1), value=vocab).long()  # [B, K+1]
    if draft_logits is None:
        draft = _certain_draft(tokens, vocab)
    else:
        draft = _drawn_draft(draft_logits, tokens, vocab, params, draft_logsumexp, draft_token_map)
    greedy = torch.zeros_like(present) if temperature is None else temperature == 0
    draft_used = (step < num_proposals[:, None]) & ~greedy[:, None]
    usable = target.valid & (draft.valid | ~draft_used)  # [B, K+1]
    # A chain ends at the first invalid row; the sequence fails if it gets there.
    num_proposals = torch.minimum(num_proposals, usable.long().cumprod(-1).sum(-1))
    proposed = step < num_proposals[:, None]
    draft_used = draft_used & proposed
    draft_probs = torch.where(draft_used[..., None], draft.probs, 0.0)

    target_prob = prob_of(target.probs, tokens)
    uniform = uniform_samples.double()
    accepted = uniform * draft.proposal_prob < lenience * target_prob
    accepted = torch.where(greedy[:, None], target_prob > 0, accepted) & proposed
    accepted_len = accepted.cumprod(-1).sum(-1)  # [B]
    weight = torch.full_like(uniform[:, 0], lenience)
    if method == "block":
        scales = _block_scales(target_prob, draft.proposal_prob)
        block_len = _block_len(scales, target.probs, draft_probs, uniform, num_proposals)
        accepted_len = torch.where(greedy, accepted_len, block_len)
        weight = scales.gather(-1, accepted_len[:, None])[:, 0]

    sequence = torch.arange(batch, device=step.device)
    valid = usable[sequence, accepted_len]  # [B]
    valid = valid & (draft.row_valid | ~draft_used)[sequence, accepted_len]
    target_row = target.probs[sequence, accepted_len]  # [B, V]
    residual = weight[:, None] * target_row - draft_probs[sequence, accepted_len]
    extra = draw(positive_or(residual, target_row), uniform[:, -1])

    output = torch.where(step < accepted_len[:, None], tokens, extra[:, None])
    logprobs = prob_of(target.log_probs, output)
    emitted = (step <= accepted_len[:, None]) & (present & valid)[:, None]
    accepted_len = torch.where(present, torch.where(valid, accepted_len, -1), 0)
    return (
        torch.where(emitted, output, -1).int(),
        accepted_len.int(),
        torch.where(emitted, logprobs, 0.0).float(),
    )


def distributions(logits: Tensor, params: Parameters) -> RowDistributions:
    """Return distributions [B, S, ...] of S rows per sequence, which share its parameters."""
    per_row = [None if p is None else p.repeat_interleave(logits.shape[1]) for p in params]
    flat = row_distributions(logits.flatten(0, 1), *per_row)
    return RowDistributions(*(field.unflatten(0, logits.shape[:2]) for field in flat))


def distributions_at(
    logits: Tensor, rows: Tensor, params: Parameters, token_bitmask: Tensor | None
) -> RowDistributions:
    """Return distributions of the rows [B, S] of logits [T, V], under each row's bitmask."""
    rows = rows.clamp(0, logits.shape[0] - 1)
    mask = None if token_bitmask is None else token_bitmask[rows.flatten()]
    allowed = only_allowed(logits[rows.flatten()], mask)
    return distributions(allowed.unflatten(0, rows.shape), params)


def over_target_vocabulary(values: Tensor, draft_token_map: Tensor | None, vocab: int) -> Tensor:
    """Map draft values [..., draft V] to target tokens; 0 where the drafter has no token."""
    draft_vocab = values.shape[-1]
    if draft_token_map is None:
        return torch.nn.functional.pad(values, (0, vocab - draft_vocab))
    column = draft_token_map.long()  # [V]
    known = (column >= 0) & (column < draft_vocab)
    return torch.where(known, values[..., column.clamp(0, draft_vocab - 1)], 0.0)


def prob_of(values: Tensor, tokens: Tensor) -> Tensor:
    """Return the value [...] of one token in each row [..., V]; 0 outside the vocabulary."""
    vocab = values.shape[-1]
    found = values.gather(-1, tokens.clamp(0, vocab - 1)[..., None])[..., 0]
    return torch.where((tokens >= 0) & (tokens < vocab), found, 0.0)


def positive_or(weights: Tensor, otherwise: Tensor) -> Tensor:
    """Return the positive part of each row of weights, or the other row if nothing is positive."""
    weights = weights.clamp(min=0)
    return torch.where((weights > 0).any(-1, keepdim=True), weights, otherwise)


def _certain_draft(tokens: Tensor, vocab: int) -> Draft:
    """Put all mass on each proposal."""
    one_hot = torch.arange(vocab, device=tokens.device) == tokens[..., None]
    valid = torch.ones_like(tokens, dtype=torch.bool)
    return Draft(one_hot.double(), prob_of(one_hot.double(), tokens), valid, valid)


def _drawn_draft(
    logits: Tensor,
    tokens: Tensor,
    vocab: int,
    params: Parameters,
    logsumexp: Tensor | None,
    draft_token_map: Tensor | None,
) -> Draft:
    """Return the distributions that the proposals were drawn from; step K has no mass."""
    rows = distributions(logits, params)
    row_valid = torch.nn.functional.pad(rows.valid, (0, 1), value=True)
    probs = rows.probs
    if logsumexp is not None:
        temperature = torch.ones_like(rows.threshold) if params[0] is None else params[0][:, None]
        scaled = logits.double() / temperature.double()[..., None]
        scaled = torch.where(logits == -INF, -INF, scaled)  # also at an infinite temperature
        weights = (scaled - logsumexp.double()[..., None]).exp()  # [B, K, draft V], no filter
        probs = torch.where(logits >= rows.threshold[..., None], weights, 0.0)
    probs = over_target_vocabulary(probs, draft_token_map, vocab)
    probs = torch.nn.functional.pad(probs, (0, 0, 0, 1))  # [B, K+1, V]
    if logsumexp is None:
        return Draft(probs, prob_of(probs, tokens), row_valid, row_valid)
    weights = over_target_vocabulary(weights, draft_token_map, vocab)
    proposal_prob = prob_of(torch.nn.functional.pad(weights, (0, 0, 0, 1)), tokens)
    finite = torch.nn.functional.pad(logsumexp.isfinite(), (0, 1), value=True)
    return Draft(probs, proposal_prob, finite & (proposal_prob < INF), row_valid)


def _block_scales(target_prob: Tensor, draft_prob: Tensor) -> Tensor:
    """Return [B, K+1]: target over draft probability of each prefix, clamped to 1 at each step."""
    scales = [torch.ones_like(target_prob[:, 0])]
    for i in range(target_prob.shape[1] - 1):
        grown = scales[-1] * target_prob[:, i]
        ratio = torch.where(grown < draft_prob[:, i], grown / draft_prob[:, i], 1.0)
        scales.append(torch.where(grown == 0, 0.0, ratio))
    return torch.stack(scales, dim=-1)


def _block_len(
    scales: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor,
    uniform_samples: Tensor,
    num_proposals: Tensor,
) -> Tensor:
    """Return [B]: the longest prefix whose uniform number is below its acceptance probability."""
    length = torch.zeros_like(num_proposals)
    for i in range(1, scales.shape[1]):
        scale = scales[:, i]
        # cumsum, unlike sum, adds in the same order for any batch and number of threads.
        rest = (scale[:, None] * target_probs[:, i] - draft_probs[:, i]).clamp(min=0).cumsum(-1)
        rest = rest[:, -1]
        denominator = rest + 1 - scale
        threshold = torch.where(denominator > 0, rest / denominator, 1.0)
        threshold = torch.where(num_proposals == i, scale, threshold)
        accepted = (uniform_samples[:, i - 1] < threshold) & (num_proposals >= i)
        length = torch.where(accepted, i, length)
    return length
