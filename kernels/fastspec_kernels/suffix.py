"""Prompt lookup: what followed the last tokens of a text where they stood before."""

import torch
from torch import Tensor

from fastspec_kernels.backend import implementation
from fastspec_kernels.checks import (
    INT32_MAX,
    check_choice,
    check_int,
    check_last_contiguous,
    check_tensor,
)

RULES = ("latest", "earliest_longest")


def match_suffix(
    token_ids: Tensor,
    lengths: Tensor,
    *,
    min_match: int,
    max_match: int,
    num_tokens: int,
    rule: str = "latest",
    backend: str = "auto",
) -> Tensor:
    """Copy what follows the longest suffix of each sequence that occurs in it once more.

    Sequence b is the first n = lengths[b] tokens of its row. Of the suffixes of `min_match` to
    `max_match` tokens the longest one counts that also ends before some position e < n; the two may
    overlap. The result is what stands there: tokens e, e+1, ... up to token n-1.

    Args:
        token_ids: [B, S] int32, any row stride, last dimension contiguous; what stands after the
            first lengths[b] tokens is not read.
        lengths: [B] int32, 0 <= lengths[b] <= S; checked on the CPU only, elsewhere clamped.
        min_match: tokens that must match, >= 1.
        max_match: tokens that are compared, >= min_match; S or more is no limit.
        num_tokens: columns of the result, 0 <= num_tokens < 2**31.
        rule: among the occurrences of the longest suffix, "latest" takes the one with the largest
            e, "earliest_longest" the one with the smallest.
        backend: "auto", "cpu", "triton" or "reference".
    Returns:
        [B, num_tokens] int32, -1 after the last token, and everywhere without a match.
    Raises:
        ValueError: a wrong dtype, shape, device, stride or range, or a backend that cannot run
            this.

    No host synchronisation; safe in CUDA graphs. On the CPU linear in the length of the text.
    """
    check_tensor("token_ids", token_ids, (None, None), (torch.int32,), None)
    check_last_contiguous("token_ids", token_ids)
    batch, width = token_ids.shape
    check_tensor("lengths", lengths, (batch,), (torch.int32,), token_ids.device)
    check_int("min_match", min_match, 1)
    check_int("max_match", max_match, min_match)
    check_int("num_tokens", num_tokens, 0, INT32_MAX)
    check_choice("rule", rule, RULES)
    if lengths.device.type == "cpu":
        for row, length in enumerate(lengths.tolist()):
            if not 0 <= length <= width:
                raise ValueError(f"lengths[{row}]: expected 0 to {width}, got {length}")
    run = implementation("match_suffix", backend, token_ids.device)
    return run(token_ids, lengths.contiguous(), min_match, max_match, num_tokens, rule)
