"""Matrix products."""

from torch import Tensor


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Accumulate in float64, round once."""
    out = input.double() @ weight.double().T
    return (out if bias is None else out + bias.double()).to(input.dtype)
