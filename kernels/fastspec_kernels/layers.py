"""The parts of a decoder layer other than attention, fused for the few rows of a decoding step."""

from functools import partial

import torch
from torch import Tensor

from fastspec_kernels.backend import run_checked
from fastspec_kernels.checks import LOGITS_DTYPES, check_dense, check_positive, check_width


def linear(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, *, backend: str = "auto"
) -> Tensor:
    """Multiply rows by a weight matrix; each row's result is independent of the other rows.

    out[..., n] = sum over k of input[..., k] * weight[n, k], plus bias[n]. This is torch's linear,
    optimised for the few rows of decoding and verification, where reading the weights dominates;
    with more rows it matches torch on AVX-512 and takes up to 1.4 times as long in float32 on AVX2.

    Args:
        input: [..., K] float32, bfloat16 or float16, contiguous.
        weight: [N, K], dtype of input, contiguous.
        bias: [N], dtype of input, contiguous, or None.
        backend: "auto", "cpu" or "reference".
    Returns:
        [..., N], dtype of input, accumulated in float32 (reference: float64).
    Raises:
        ValueError: a wrong dtype, shape, device or stride, or a backend that cannot run this.

    A row's bits do not depend on the number of rows, so a token's logits are the same whether it is
    decoded alone or verified with others. Processors that multiply bfloat16 (avx512_bf16, amx) take
    subnormal numbers for zero. No host synchronisation.
    """
    arguments = (input, weight, bias)
    return run_checked("linear", backend, weight, arguments, partial(_check_linear, *arguments))


def rms_norm(input: Tensor, weight: Tensor, eps: float, *, backend: str = "auto") -> Tensor:
    """Divide each row by its root mean square and scale it.

    out = input / sqrt(mean(input**2) + eps) * weight, over the last dimension.

    Args:
        input: [..., K] float32, bfloat16 or float16, contiguous.
        weight: [K], dtype of input, contiguous.
        eps: added to the mean square, > 0 in float32.
        backend: "auto", "cpu" or "reference".
    Returns:
        [..., K], dtype of input, computed in float32 (reference: float64).
    Raises:
        ValueError: a wrong dtype, shape, device, stride or eps, or a backend that cannot run this.

    A row's bits do not depend on the other rows. Source: Zhang and Sennrich, 1910.07467.
    """
    arguments = (input, weight, check_positive("eps", eps))
    check = partial(_check_norm, input, weight)
    return run_checked("rms_norm", backend, weight, arguments, check)


def gated_mlp(
    input: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    *,
    backend: str = "auto",
) -> Tensor:
    """Apply a SwiGLU feed-forward block in one call.

    out = (silu(input @ gate_weight.T) * (input @ up_weight.T)) @ down_weight.T

    Args:
        input: [..., K] float32, bfloat16 or float16, contiguous.
        gate_weight: [I, K], dtype of input, contiguous.
        up_weight: [I, K], dtype of input, contiguous.
        down_weight: [K, I], dtype of input, contiguous.
        backend: "auto", "cpu" or "reference".
    Returns:
        [..., K], dtype of input, accumulated in float32 (reference: float64).
    Raises:
        ValueError: a wrong dtype, shape, device or stride, or a backend that cannot run this.

    On processors that multiply bfloat16, the input of the last product is rounded to it. A row's
    bits do not depend on the other rows. Source: Shazeer, 2002.05202.
    """
    tensors = (input, gate_weight, up_weight, down_weight)
    return run_checked("gated_mlp", backend, gate_weight, tensors, partial(_check_mlp, *tensors))


def _check_input(input: Tensor, size: int, dtype: torch.dtype, device: torch.device) -> None:
    leading = (None,) * (input.dim() - 1) if isinstance(input, Tensor) else ()
    check_dense("input", input, (*leading, size), (dtype,), device)


def _check_linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    check_dense("weight", weight, (None, None), LOGITS_DTYPES, None)
    num_outputs, depth = weight.shape
    _check_input(input, depth, weight.dtype, weight.device)
    if bias is not None:
        check_dense("bias", bias, (num_outputs,), (weight.dtype,), weight.device)


def _check_norm(input: Tensor, weight: Tensor) -> None:
    check_dense("weight", weight, (None,), LOGITS_DTYPES, None)
    check_width("weight", weight.shape[0])
    _check_input(input, weight.shape[0], weight.dtype, weight.device)


def _check_mlp(input: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor) -> None:
    check_dense("gate_weight", gate_weight, (None, None), LOGITS_DTYPES, None)
    (hidden, size), dtypes = gate_weight.shape, (gate_weight.dtype,)
    check_width("gate_weight", size)
    check_dense("up_weight", up_weight, (hidden, size), dtypes, gate_weight.device)
    check_dense("down_weight", down_weight, (size, hidden), dtypes, gate_weight.device)
    _check_input(input, size, gate_weight.dtype, gate_weight.device)
