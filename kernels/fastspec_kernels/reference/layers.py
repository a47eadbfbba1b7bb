"""Matrix products and the blocks around attention, in float64 and rounded once."""

import torch.nn.functional as F
from torch import Tensor


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply by the transposed weights and add the bias."""
    out = input.double() @ weight.double().T
    return (out if bias is None else out + bias.double()).to(input.dtype)


def rms_norm(input: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide by the root mean square, then scale."""
    x = input.double()
    return (x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()).float()


def gated_mlp(input: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor) -> Tensor:
    """Gate with silu, then project down."""
    x = input.double()
    hidden = F.silu(x @ gate_weight.double().T) * (x @ up_weight.double().T)
    return (hidden @ down_weight.double().T).float()
