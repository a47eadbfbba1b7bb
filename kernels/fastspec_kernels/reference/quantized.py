"""Weights of 4 or 8 bits: their format, and products whose rows are quantized as well."""

import torch
from torch import Tensor
from torch.nn.functional import pad

TILE, DEPTH = 16, 64  # outputs and inputs of a block of weights
GROUP = DEPTH // 2  # inputs that share a scale
SCALE_BYTES = 2 * TILE * torch.bfloat16.itemsize
# Bytes of a block, by bits of a weight.
BLOCK_BYTES = {bits: SCALE_BYTES + TILE * DEPTH * bits // 8 for bits in (4, 8)}


def quantize_weight(weight: Tensor, bits: int) -> Tensor:
    """Round to multiples of a scale per output and group, and pack; see the public function."""
    most = 2 ** (bits - 1)
    rows, columns = -weight.shape[0] % TILE, -weight.shape[1] % DEPTH
    groups = pad(weight.float(), (0, columns, 0, rows)).unflatten(1, (-1, GROUP))
    places = groups.abs().argmax(-1, keepdim=True)
    least = -most if bits == 4 else 1 - most  # symmetric, as kernels negate 8-bit values
    scales = groups.gather(-1, places) / least
    values = _multiples(groups, scales, least)
    if bits == 4:  # the scale that fits these values best, and then the best values
        squares = values.square().sum(-1, keepdim=True).clamp(min=1)
        scales = (groups * (values / squares)).sum(-1, keepdim=True)  # does not overflow
        values = _multiples(groups, scales, least)
    scales = scales.bfloat16() + 0.0  # zero gets no sign
    codes = (values + most).to(torch.uint8)
    codes = codes.view(len(codes) // TILE, TILE, -1, 2, GROUP // 4, 4)  # tile, output, block, half
    if bits == 4:
        codes = codes[:, :, :, :1] | codes[:, :, :, 1:] << 4
    codes = codes.permute(0, 2, 3, 4, 1, 5).flatten(2)
    scales = scales.view(len(codes), TILE, -1, 2).permute(0, 2, 3, 1).flatten(2)
    return torch.cat([scales.contiguous().view(torch.uint8), codes], dim=-1)


def dequantize_weight(weight: Tensor) -> Tensor:
    """Return the matrix [16 tiles, 64 blocks] that packed weights stand for, in float64."""
    tiles, blocks, size = weight.shape
    scales, codes = weight.split([SCALE_BYTES, size - SCALE_BYTES], dim=-1)
    scales = scales.clone(memory_format=torch.contiguous_format)  # at an even address
    scales = scales.view(torch.bfloat16).view(tiles, blocks, 2, TILE)
    zero = 128 if size == BLOCK_BYTES[8] else 8
    codes = codes.reshape(tiles, blocks, -1, GROUP // 4, TILE, 4)  # half or both, quad, output
    if zero == 8:
        codes = torch.cat([codes & 15, codes >> 4], dim=2)
    values = codes.permute(0, 4, 1, 2, 3, 5).double() - zero
    values = values.flatten(4) * scales.permute(0, 3, 1, 2)[..., None]
    return values.flatten(2).flatten(0, 1)


def quantized_rows(input: Tensor) -> Tensor:
    """Round each group of a row to multiples of its greatest magnitude / 127, in float64."""
    groups = pad(input.float(), (0, -input.shape[-1] % GROUP)).unflatten(-1, (-1, GROUP))
    most = groups.abs().amax(-1, keepdim=True)
    inverse = torch.full_like(most, 127) / most  # torch would compute 127 / most by a reciprocal
    values = torch.where(most < 1e-30, 0.0, (groups * inverse).round())
    scales = torch.where(most < 1e-30, 0.0, most / 127)
    rows = values.double() * scales.double()
    return torch.where(most.isfinite(), rows, torch.nan).flatten(-2)[..., : input.shape[-1]]


def quantized_linear(
    input: Tensor, weight: Tensor, num_outputs: int, bias: Tensor | None = None
) -> Tensor:
    """Multiply quantized rows by quantized weights and add the bias."""
    matrix = dequantize_weight(weight)[:num_outputs, : input.shape[-1]]
    out = quantized_rows(input) @ matrix.T
    return (out if bias is None else out + bias.double()).to(input.dtype)


def _multiples(groups: Tensor, scales: Tensor, least: int) -> Tensor:
    """Return the nearest multiples of the scales as packed, 0 where a scale is 0."""
    scales = scales.bfloat16().float()
    most = 7 if least == -8 else -least
    return torch.where(scales == 0, 0.0, groups / scales).round().clamp(least, most)
