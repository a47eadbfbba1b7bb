"""Prompt lookup: copies what followed an earlier occurrence of a text's last tokens."""

import torch
from torch import Tensor

from fastspec_kernels.backend import run_checked
from fastspec_kernels.checks import (
    check_choice,
    check_dense_rows,
    check_int,
    check_tensor,
    dense,
)

RULES = ("latest", "earliest_longest")
_MOST_TOKENS = 2**30  # columns of a result; int32 counts beyond their end


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
    """Copy what follows an earlier occurrence of each sequence's longest recurring suffix.

    Sequence b is the first n = lengths[b] tokens of its row. Among its suffixes of `min_match` to
    `max_match` tokens, the longest one is used that also ends before some position e < n; the two
    may overlap. The result is tokens e, e+1, ... up to token n-1.

    Args:
        token_ids: [B, S] int32, any row stride, last dimension contiguous; tokens after the first
            lengths[b] are not read.
        lengths: [B] int32, 0 <= lengths[b] <= S; checked on the CPU, clamped elsewhere.
        min_match: minimum number of matching tokens, >= 1.
        max_match: maximum number of tokens compared, >= min_match; S or more = no limit.
        num_tokens: columns of the result, 0 <= num_tokens <= 2**30.
        rule: which occurrence of the longest suffix to use: "latest" the one with the largest e,
            "earliest_longest" the one with the smallest.
        backend: "auto", "cpu", "triton" or "reference".
    Returns:
        [B, num_tokens] int32, -1 after the last token; all -1 without a match.
    Raises:
        ValueError: a wrong dtype, shape, device, stride or range, or a backend that cannot run
            this.

    No host synchronisation; safe in CUDA graphs. On the CPU, time is linear in the text's length.
    """
    check_int("min_match", min_match, 1)
    check_int("max_match", max_match, min_match)
    check_int("num_tokens", num_tokens, 0, _MOST_TOKENS)

    def check():
        check_dense_rows("token_ids", token_ids, (None, None), (torch.int32,), None)
        batch, width = token_ids.shape
        check_tensor("lengths", lengths, (batch,), (torch.int32,), token_ids.device)
        check_choice("rule", rule, RULES)
        if lengths.device.type == "cpu":
            for row, length in enumerate(lengths.tolist()):
                if not 0 <= length <= width:
                    raise ValueError(f"lengths[{row}]: expected 0 to {width}, got {length}")

    arguments = (token_ids, dense(lengths), min_match, max_match, num_tokens, rule)
    return run_checked("match_suffix", backend, token_ids, arguments, check)
