"""Ops on rows of logits: the filtered distribution, and a sample from it."""

from functools import partial

import torch
from torch import Tensor

from fastspec_kernels.backend import run_checked
from fastspec_kernels.checks import (
    check_logits,
    check_sampling,
    check_tensor,
    check_token_bitmask,
    dense,
)


def row_stats(
    logits: Tensor,
    *,
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    token_bitmask: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Reduce each row to the two numbers that determine the probability of each of its tokens.

    probability(x) = exp(x / temperature - logsumexp) if x >= threshold, else 0. Filters apply in
    the order temperature, top-k, top-p, min-p. Ties at the k-th logit are kept, the token that
    crosses top-p is kept with all of the same logit, and the best token is never dropped. A greedy
    row (temperature 0) returns its largest logit as threshold and the unfiltered logsumexp at
    temperature 1; its distribution is one-hot at the largest logit, lowest id on ties.

    Args:
        logits: [R, V] float32, bfloat16 or float16, any row stride; -inf = probability 0.
        temperature: [R] float32, contiguous, >= 0; inf = uniform over the finite logits; None = 1.
            Logits further than 3.4e38 below the best count as -inf, on Triton at any temperature,
            on the CPU unless it is inf; there temperatures in (0, 4.3e-39) act as 4.3e-39.
        top_k: [R] int32, contiguous; <= 0, >= V or None = off.
        top_p: [R] float32, contiguous; >= 1, NaN or None = off, <= 0 keeps only the largest logit.
        min_p: [R] float32, contiguous; <= 0, NaN or None = off, >= 1 keeps only the largest logit.
        token_bitmask: [R, ceil(V/32)] int32, any row stride; bit i % 32 of word i // 32 allows
            token i; tokens that are not allowed are treated as a logit of -inf. None allows all.
        backend: "auto", "cpu", "triton" or "reference".
    Returns:
        logsumexp: [R] float32.
        threshold: [R] float32, in units of the raw logits; -inf if no filter is on. It lies between
            the lowest kept logit, inclusive, and the highest dropped one; where depends on the
            backend.
    Raises:
        ValueError: a wrong dtype, shape, device or stride, or a backend that cannot run this.

    A row with NaN or +inf, without a finite logit, or with a negative or NaN temperature returns
    NaN for both. No host synchronisation; safe in CUDA graphs. A row's result never depends on the
    other rows.
    """
    arguments = (logits, temperature, top_k, top_p, min_p, token_bitmask)
    return run_checked("row_stats", backend, logits, arguments, partial(_check, *arguments))


def logits_to_probs(
    logits: Tensor,
    *,
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    token_bitmask: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Compute the filtered distribution of each row.

    Rule and arguments are as in `row_stats`. Decoding never needs this array; it is for inspection
    and for tools that require probabilities.

    Args:
        logits: [R, V] float32, bfloat16 or float16, any row stride.
        temperature, top_k, top_p, min_p, token_bitmask: [R, ...] each, see `row_stats`.
        backend: "auto", "cpu", "triton" or "reference".
    Returns:
        [R, V] float32; rows sum to 1; greedy rows are one-hot, invalid rows NaN.
    Raises:
        ValueError: a wrong dtype, shape, device or stride, or a backend that cannot run this.

    No host synchronisation; safe in CUDA graphs. A row's result never depends on the other rows.
    """
    arguments = (logits, temperature, top_k, top_p, min_p, token_bitmask)
    return run_checked("logits_to_probs", backend, logits, arguments, partial(_check, *arguments))


def sample(
    logits: Tensor,
    uniform_samples: Tensor,
    *,
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    token_bitmask: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Draw one token per row from its filtered distribution by inverse CDF.

    The token is the lowest id whose cumulative probability, in id order, exceeds the uniform
    number; greedy rows take their largest logit, lowest id on ties. Filters are as in `row_stats`.

    Args:
        logits: [R, V] float32, bfloat16 or float16, any row stride.
        uniform_samples: [R] float32 in [0, 1); not read for greedy rows.
        temperature, top_k, top_p, min_p, token_bitmask: [R, ...] each, see `row_stats`.
        backend: "auto", "cpu", "triton" or "reference".
    Returns:
        token_ids: [R] int32, -1 for an invalid row.
        logprobs: [R] float32, log of the token's filtered probability (for greedy rows unfiltered,
            at temperature 1); NaN for an invalid row.
    Raises:
        ValueError: a wrong dtype, shape, device or stride, or a backend that cannot run this.

    No host synchronisation; safe in CUDA graphs. A row's result never depends on the other rows.
    Backends return the same token unless the uniform number or a filter's bound is within 1e-5 of a
    decision.
    """

    def check():
        _check(logits, temperature, top_k, top_p, min_p, token_bitmask)
        shape, device = logits.shape[:1], logits.device
        check_tensor("uniform_samples", uniform_samples, shape, (torch.float32,), device)

    params = (temperature, top_k, top_p, min_p, token_bitmask)
    return run_checked("sample", backend, logits, (logits, dense(uniform_samples), *params), check)


def sample_coupled(
    logits: Tensor,
    seed: Tensor,
    position: Tensor,
    *,
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    token_bitmask: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Draw one token per row from its filtered distribution by Gumbel-max with shared noise.

    The token x is the one with the largest logit / temperature + g(x) among those that the filters
    keep, lowest id on ties, where g is Gumbel noise that depends only on seed[r], position[r] and
    x. Two models with the same (seed, position) share the noise: if their distributions agree, they
    draw the same token, and otherwise they still do with a probability of at least
    (1 - d) / (1 + d), where d is their total variation distance. Greedy rows take their largest
    logit. Filters are as in `row_stats`.

    g(x) = -log(e(x)), where the e are independent and exponential. Tokens with the same x // 256
    and x % 16 draw them together: word w of Philox4x32-10 determines which of the sixteen has the
    smallest, w % 16, and its value, -log((w // 16 + 0.5) / 2**28) / 16; the others add
    -log((w' + 0.5) / 2**32) to it, with a word w' of their own. So a group whose best logit cannot
    win with its largest noise costs one word. Words are numbered as in `uniform`, on two separate
    streams.

    Args:
        logits: [R, V] float32, bfloat16 or float16, any row stride.
        seed: [R] int64.
        position: [R] int64, position of the drawn token; rows with the same (seed, position) are
            not independent.
        temperature, top_k, top_p, min_p, token_bitmask: [R, ...] each, see `row_stats`.
        backend: "auto", "cpu", "triton" or "reference".
    Returns:
        token_ids: [R] int32, -1 for an invalid row.
        logprobs: [R] float32, as in `sample`.
    Raises:
        ValueError: a wrong dtype, shape, device or stride, or a backend that cannot run this.

    No host synchronisation; safe in CUDA graphs. A row's result never depends on the other rows.
    Backends return the same token unless the two largest sums, or a filter and its bound, are
    within 1e-5. Tokens less probable than about 2**-32 are drawn too rarely.

    Sources: Maddison et al., "A* sampling", NIPS 2014 (Gumbel-max); Daliri et al., "Coupling
    without communication and drafter-invariant speculative decoding", arXiv 2408.07978 (shared
    noise).
    """

    def check():
        _check(logits, temperature, top_k, top_p, min_p, token_bitmask)
        for name, value in (("seed", seed), ("position", position)):
            check_tensor(name, value, logits.shape[:1], (torch.int64,), logits.device)

    params = (temperature, top_k, top_p, min_p, token_bitmask)
    arguments = (logits, dense(seed), dense(position), *params)
    return run_checked("sample_coupled", backend, logits, arguments, check)


def _check(
    logits: Tensor,
    temperature: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    token_bitmask: Tensor | None,
) -> None:
    """Raise ValueError that names the first invalid argument."""
    check_logits("logits", logits, 2)
    check_sampling(logits.shape[0], logits.device, temperature, top_k, top_p, min_p)
    check_token_bitmask(token_bitmask, logits.shape[0], logits)
