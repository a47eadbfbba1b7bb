"""Products with weights of 4 or 8 bits, for draft models: they read a fraction of the bytes."""

from functools import partial

import torch
from torch import Tensor

from fastspec_kernels.backend import run_checked
from fastspec_kernels.checks import LOGITS_DTYPES, check_dense, check_int, check_tensor, check_width
from fastspec_kernels.reference import quantized as reference

_VALUES_AT_ONCE = 2**20  # of a weight while it is packed, so that they stay in nearby caches


def quantize_weight(weight: Tensor, bits: int) -> Tensor:
    """Pack a weight matrix into blocks of 4- or 8-bit integers with a scale for every 32 inputs.

    Each group of 32 neighbouring inputs of an output becomes integers times one bfloat16 scale.
    With 8 bits they range from -127 to 127, and the scale is the greatest magnitude / 127, signed
    so that it becomes -127. With 4 bits they range from -8 to 7, and the scale is the one that fits
    the rounded values best (least squares). The scales add half a bit per weight.

    Args:
        weight: [N, K] float32, bfloat16 or float16, finite.
        bits: 4 or 8.
    Returns:
        [ceil(N / 16), ceil(K / 64), 64 + 128 * bits] uint8 on the weight's device: blocks of 16
        (`PACKED_TILE`) outputs and 64 inputs, padded with zeros. A block holds the scales [2, 16]
        of either half of its inputs, then 4 neighbouring inputs of each of the 16 outputs, the
        next 4, and so on: 8-bit values plus 128; or 4-bit values plus 8, of the first half in the
        low bits of a byte and of the second half in the high bits.
    Raises:
        ValueError: a wrong dtype, shape or number of bits, or values that are not finite.

    Source: block formats like ggml's Q8_0 and Q4_0, arranged for products of many outputs at once.
    """
    check_tensor("weight", weight, (None, None), LOGITS_DTYPES, None)
    check_width("weight", min(weight.shape))
    if type(bits) is not int or bits not in reference.BLOCK_BYTES:
        raise ValueError(f"bits: expected 4 or 8, got {bits!r:.60}")
    if not weight.isfinite().all():
        raise ValueError("weight: expected finite values")
    rows = max(1, _VALUES_AT_ONCE // weight.shape[1] // reference.TILE) * reference.TILE
    parts = weight.detach().split(rows)
    return torch.cat([reference.quantize_weight(part, bits) for part in parts])


def quantized_linear(
    input: Tensor,
    weight: Tensor,
    num_outputs: int,
    bias: Tensor | None = None,
    *,
    backend: str = "auto",
) -> Tensor:
    """Multiply rows by packed weights, after quantizing the rows to 8 bits.

    Each group of 32 neighbouring values of a row becomes integers from -127 to 127 times its
    greatest magnitude / 127. The products of a group are summed as integers, exactly; these sums
    are scaled and added in float32, in order. An approximate result is enough for a draft, because
    verification makes the output exact.

    Args:
        input: [..., K] float32, bfloat16 or float16, contiguous.
        weight: [ceil(N / 16), ceil(K / 64), 576 or 1088] uint8 of `quantize_weight`, contiguous.
        num_outputs: N >= 1.
        bias: [N] float32, contiguous, or None.
        backend: "auto", "cpu" or "reference".
    Returns:
        [..., N], dtype of input. A row is NaN if one of its inputs is not finite; it may
        also be if a weight's and an input's magnitude multiply to more than float32 holds.
    Raises:
        ValueError: a wrong dtype, shape, device or stride, or a backend that cannot run this.

    A row's bits do not depend on the other rows. No host synchronisation.
    """
    check_int("num_outputs", num_outputs, 1)
    arguments = (input, weight, num_outputs, bias)
    check = partial(_check_linear, *arguments)
    return run_checked("quantized_linear", backend, weight, arguments, check)


def check_quantized(
    name: str, weight: Tensor, num_outputs: int, depth: int, device: torch.device | None
) -> None:
    """Check packed weights of a matrix [num_outputs, depth]."""
    shape = (-(-num_outputs // reference.TILE), -(-depth // reference.DEPTH), None)
    check_dense(name, weight, shape, (torch.uint8,), device)
    sizes = reference.BLOCK_BYTES.values()
    if weight.shape[2] not in sizes:
        expected = " or ".join(map(str, sizes))
        raise ValueError(f"{name}: expected blocks of {expected} bytes, got {weight.shape[2]}")


def _check_linear(input: Tensor, weight: Tensor, num_outputs: int, bias: Tensor | None) -> None:
    if not isinstance(weight, Tensor):
        check_tensor("weight", weight, (None,) * 3, (torch.uint8,), None)
    leading = (None,) * input.dim() if isinstance(input, Tensor) else (None,)
    check_dense("input", input, leading, LOGITS_DTYPES, weight.device)
    if input.dim() == 0 or input.shape[-1] == 0:
        raise ValueError(f"input: expected rows of at least one value, got {list(input.shape)}")
    check_quantized("weight", weight, num_outputs, input.shape[-1], input.device)
    if bias is not None:
        check_dense("bias", bias, (num_outputs,), (torch.float32,), input.device)
