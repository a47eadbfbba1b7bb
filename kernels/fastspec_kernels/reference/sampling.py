"""Reference of the row ops: the filtered distribution of each row of logits, and draws from it."""

from typing import NamedTuple

import torch
from torch import Tensor

from fastspec_kernels.reference.rng import gumbel

INF = float("inf")


class RowDistributions(NamedTuple):
    """The filtered distributions of R rows; float64; meaningless where `valid` is false."""

    probs: Tensor  # [R, V], one-hot for greedy rows
    log_probs: Tensor  # [R, V], at temperature 1 and unfiltered for greedy rows
    logsumexp: Tensor  # [R]
    threshold: Tensor  # [R], the lowest kept logit, -inf where no filter is on
    valid: Tensor  # [R] bool


def row_distributions(
    logits: Tensor,
    temperature: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
) -> RowDistributions:
    """Apply temperature, top-k, top-p and min-p, in this order, to each row."""
    logits = logits.double()  # [R, V]
    if temperature is None:
        temperature = logits.new_ones(logits.shape[0])
    temperature = temperature.double()[:, None]  # [R, 1]
    valid = (logits < INF).all(-1) & (logits > -INF).any(-1) & (temperature >= 0)[:, 0]
    greedy = temperature == 0
    scale = torch.where(greedy, 1.0, temperature)
    best = logits.amax(-1, keepdim=True)
    scaled = _scale(logits, best, scale)

    threshold = torch.full_like(best, -INF)
    if top_k is not None or top_p is not None:
        descending = logits.sort(-1, descending=True).values
        threshold = _apply_top_k(descending, threshold, top_k)
        threshold = _apply_top_p(descending, scale, threshold, top_p)
    threshold = _apply_min_p(logits, best, scale, threshold, min_p)
    threshold = torch.where(greedy, best, threshold)

    kept = torch.where((logits >= threshold) | greedy, scaled, -INF)
    # cumsum, unlike sum, adds in the same order for any batch and number of threads.
    total = kept.exp().cumsum(-1)[:, -1:]
    argmax = logits.argmax(-1, keepdim=True)  # the lowest id on ties
    one_hot = torch.arange(logits.shape[-1], device=logits.device) == argmax
    return RowDistributions(
        probs=torch.where(greedy, one_hot.double(), kept.exp() / total),
        log_probs=kept - total.log(),
        logsumexp=(best / scale + total.log())[:, 0],
        threshold=threshold[:, 0],
        valid=valid,
    )


def only_allowed(logits: Tensor, token_bitmask: Tensor | None) -> Tensor:
    """Set the logits of tokens whose bit is not set to -inf."""
    if token_bitmask is None:
        return logits
    token = torch.arange(logits.shape[-1], device=logits.device)
    bits = token_bitmask[:, token // 32] >> (token % 32).int()
    return torch.where((bits & 1) == 1, logits, -INF)


def draw(weights: Tensor, uniform_samples: Tensor) -> Tensor:
    """Draw by inverse CDF in id order; if rounding leaves no id, the last with positive weight."""
    cumulative = weights.cumsum(-1)
    target = uniform_samples.double()[:, None] * cumulative[:, -1:]
    passed = (cumulative > target) & (weights > 0)
    last = weights.shape[-1] - 1 - (weights > 0).flip(-1).int().argmax(-1)
    return torch.where(passed.any(-1), passed.int().argmax(-1), last)  # [R] int64


def row_stats(
    logits: Tensor,
    temperature: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    token_bitmask: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the two numbers that turn a logit into its probability."""
    logits = only_allowed(logits, token_bitmask)
    rows = row_distributions(logits, temperature, top_k, top_p, min_p)
    nan = float("nan")
    logsumexp = torch.where(rows.valid, rows.logsumexp, nan)
    threshold = torch.where(rows.valid, rows.threshold, nan)
    return logsumexp.float(), threshold.float()


def logits_to_probs(
    logits: Tensor,
    temperature: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    token_bitmask: Tensor | None,
) -> Tensor:
    """Return the probabilities."""
    logits = only_allowed(logits, token_bitmask)
    rows = row_distributions(logits, temperature, top_k, top_p, min_p)
    return torch.where(rows.valid[:, None], rows.probs, float("nan")).float()


def sample(
    logits: Tensor,
    uniform_samples: Tensor,
    temperature: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    token_bitmask: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Draw one token per row, with its log-probability."""
    logits = only_allowed(logits, token_bitmask)
    rows = row_distributions(logits, temperature, top_k, top_p, min_p)
    return _drawn(rows, draw(rows.probs, uniform_samples))


def sample_coupled(
    logits: Tensor,
    seed: Tensor,
    position: Tensor,
    temperature: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    token_bitmask: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Draw one token per row by Gumbel-max, with its log-probability; a one-hot row's is fixed."""
    logits = only_allowed(logits, token_bitmask)
    rows = row_distributions(logits, temperature, top_k, top_p, min_p)
    scores = rows.probs.log() + gumbel(seed, position, logits.shape[-1])
    return _drawn(rows, scores.argmax(-1))


def _drawn(rows: RowDistributions, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tokens drawn from rows and their log-probabilities, -1 and NaN if invalid."""
    logprobs = rows.log_probs.gather(-1, token_ids[:, None])[:, 0]
    token_ids = torch.where(rows.valid, token_ids, -1)
    return token_ids.int(), torch.where(rows.valid, logprobs, float("nan")).float()


def _scale(logits: Tensor, best: Tensor, scale: Tensor) -> Tensor:
    """Return log-weights, 0 for the best logit; -inf stays -inf at every temperature."""
    return torch.where(logits > -INF, (logits - best) / scale, -INF)


def _apply_top_k(descending: Tensor, threshold: Tensor, top_k: Tensor | None) -> Tensor:
    """Raise the threshold to the k-th largest logit."""
    if top_k is None:
        return threshold
    k = top_k.long()[:, None]
    on = (k > 0) & (k < descending.shape[-1])
    return torch.where(on, descending.gather(-1, torch.where(on, k, 1) - 1), threshold)


def _apply_top_p(
    descending: Tensor, scale: Tensor, threshold: Tensor, top_p: Tensor | None
) -> Tensor:
    """Raise the threshold to the lowest logit with less than top_p of the mass above it."""
    if top_p is None:
        return threshold
    share = top_p.double()[:, None]
    mass = _scale(descending, descending[:, :1], scale).exp() * (descending >= threshold)
    cumulative = mass.cumsum(-1)
    # Within a tie the first entry decides, because its sum is the smallest.
    kept = cumulative - mass < share * cumulative[:, -1:]
    kept[:, 0] = True
    lowest = torch.where(kept, descending, INF).amin(-1, keepdim=True)
    return torch.where(share < 1, torch.maximum(lowest, threshold), threshold)


def _apply_min_p(
    logits: Tensor, best: Tensor, scale: Tensor, threshold: Tensor, min_p: Tensor | None
) -> Tensor:
    """Raise the threshold to the lowest logit whose weight is at least min_p of the best one's."""
    if min_p is None:
        return threshold
    share = min_p.double()[:, None]
    bound = torch.where(share >= 1, best, best + scale * share.log())
    lowest = torch.where(logits >= bound, logits, INF).amin(-1, keepdim=True)
    return torch.where(share > 0, torch.maximum(lowest, threshold), threshold)
