"""The product of a few rows with a weight matrix."""

import torch
from torch import Tensor

from fastspec_kernels import reference
from fastspec_kernels.backend import resolve
from fastspec_kernels.checks import LOGITS_DTYPES, check_contiguous, check_tensor


def linear(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, *, backend: str = "auto"
) -> Tensor:
    """Multiply few rows by a weight matrix, each row's result independent of the other rows.

    out[..., n] = sum over k of input[..., k] * weight[n, k], plus bias[n]: torch's linear, made for
    the 1 to about 64 rows of decoding and verification, where reading the weights is all the cost.

    Args:
        input: [..., K] float32, bfloat16 or float16, contiguous.
        weight: [N, K], dtype of input, contiguous.
        bias: [N], dtype of input, contiguous, or None.
        backend: "auto", "cpu" or "reference".
    Returns:
        [..., N], dtype of input, accumulated in float32 (reference: float64).
    Raises:
        ValueError: a wrong dtype, shape, device or stride, or a backend that cannot run this.

    A row's bits do not depend on how many rows are in the call, so a token's logits are the same
    whether it is decoded alone or verified with others. No host synchronisation.
    """
    try:
        if resolve("linear", backend, weight.device) != "reference":
            return torch.ops.fastspec.linear.default(input, weight, bias)
    except (AttributeError, RuntimeError, ValueError):
        _check_tensors(input, weight, bias)  # names the argument that the kernel refused
        raise
    _check_tensors(input, weight, bias)
    return reference.linear(input, weight, bias)


def _check_tensors(input: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    check_tensor("weight", weight, (None, None), LOGITS_DTYPES, getattr(weight, "device", None))
    num_outputs, depth = weight.shape
    leading = (None,) * (input.dim() - 1) if isinstance(input, Tensor) else ()
    check_tensor("input", input, (*leading, depth), (weight.dtype,), weight.device)
    check_contiguous("input", input)
    check_contiguous("weight", weight)
    if bias is not None:
        check_tensor("bias", bias, (num_outputs,), (weight.dtype,), weight.device)
        check_contiguous("bias", bias)
