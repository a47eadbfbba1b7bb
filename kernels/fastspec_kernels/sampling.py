"""Ops on rows of logits: the filtered distribution, and one draw from it."""

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
    """Reduce each row to the two numbers that give the probability of any of its tokens.

    probability(x) = exp(x / temperature - logsumexp) where x >= threshold, else 0. Filters apply in
    the order temperature, top-k, top-p, min-p. Ties at the k-th logit are kept, the token that
    crosses top-p is kept, the best token is never dropped. A greedy row (temperature 0) gives its
    largest logit as threshold and the unfiltered logsumexp at temperature 1; its distribution is
    one-hot at the largest logit, lowest id on ties.

    Args:
        logits: [R, V] float32, bfloat16 or float16, any row stride; -inf means probability 0.
        temperature: [R] float32, >= 0, inf for uniform over the finite logits; None means 1.
        top_k: [R] int32; <= 0, >= V or None is off.
        top_p: [R] float32; >= 1 or None is off, <= 0 keeps only the largest logit.
        min_p: [R] float32; <= 0 or None is off, >= 1 keeps only the largest logit.
        token_bitmask: [R, ceil(V/32)] int32, any row stride; bit i % 32 of word i // 32 allows
            token i, and a token that is not allowed counts as a logit of -inf. None allows all.
        backend: "auto", "cpu", "triton" or "reference".
    Returns:
        logsumexp: [R] float32.
        threshold: [R] float32, a raw logit, -inf where no filter is on.
    Raises:
        ValueError: a wrong dtype, shape, device or stride, or a backend that cannot run this.

    A row with NaN or +inf, without a finite logit, or with a negative or NaN temperature gives NaN,
    NaN. No host synchronisation; safe in CUDA graphs. A row's result never depends on the other
    rows.
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
    """Write out the filtered distribution of each row.

    The rule and the arguments are those of `row_stats`. Decoding never needs this array; it is for
    inspection and for tools that ask for probabilities.

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
    number; greedy rows take their largest logit, lowest id on ties. The rule of the filters is that
    of `row_stats`.

    Args:
        logits: [R, V] float32, bfloat16 or float16, any row stride.
        uniform_samples: [R] float32 in [0, 1); not read for greedy rows.
        temperature, top_k, top_p, min_p, token_bitmask: [R, ...] each, see `row_stats`.
        backend: "auto", "cpu", "triton" or "reference".
    Returns:
        token_ids: [R] int32, -1 for an invalid row.
        logprobs: [R] float32, log of the filtered probability of the token; at temperature 1 and
            unfiltered for greedy rows; NaN for an invalid row.
    Raises:
        ValueError: a wrong dtype, shape, device or stride, or a backend that cannot run this.

    No host synchronisation; safe in CUDA graphs. A row's result never depends on the other rows.
    Backends give the same token unless the uniform number or a filter's bound lies within 1e-5 of a
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

    The token x is the one with the largest logit / temperature + g(x) of those that the filters
    keep, lowest id on ties, where g is Gumbel noise that depends on seed[r], position[r] and x
    alone. Two models that read the same (seed, position) meet the same noise: where they agree on
    a distribution they draw the same token, and where they do not, they still do with a probability
    of at least (1 - d) / (1 + d), d their total variation distance. Greedy rows take their largest
    logit. The rule of the filters is that of `row_stats`.

    g(x) = -log(e(x)), where the e are independent and exponential. Tokens with the same x // 256
    and x % 16 draw them together: word w of Philox4x32-10 says which of the sixteen has the least,
    w % 16, and that this is -log((w // 16 + 0.5) / 2**28) / 16; the others have -log((w' + 0.5) /
    2**32) more, w' a word of their own. So a group whose best logit cannot win with its largest
    noise costs one word. Words are numbered as in `uniform`, on two streams of this op's own.

    Args:
        logits: [R, V] float32, bfloat16 or float16, any row stride.
        seed: [R] int64.
        position: [R] int64, of the token that is drawn; a row with the same (seed, position) as
            another is not independent of it.
        temperature, top_k, top_p, min_p, token_bitmask: [R, ...] each, see `row_stats`.
        backend: "auto", "cpu", "triton" or "reference".
    Returns:
        token_ids: [R] int32, -1 for an invalid row.
        logprobs: [R] float32, as those of `sample`.
    Raises:
        ValueError: a wrong dtype, shape, device or stride, or a backend that cannot run this.

    No host synchronisation; safe in CUDA graphs. A row's result never depends on the other rows.
    Backends give the same token unless the two largest sums, or a filter and its bound, lie within
    1e-5. What is less likely than about 2**-32 is drawn too rarely.

    Sources: Maddison et al., "A* sampling", NIPS 2014 (Gumbel-max); Daliri et al., "Coupling
    without communication and drafter-invariant speculative decoding", arXiv 2408.07978 (what shared
    noise gives).
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
    """Raise ValueError naming the first argument that does not fit."""
    check_logits("logits", logits, 2)
    check_sampling(logits.shape[0], logits.device, temperature, top_k, top_p, min_p)
    check_token_bitmask(token_bitmask, logits.shape[0], logits)
