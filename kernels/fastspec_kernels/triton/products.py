"""Matrix products of rows with the weights of a layer: ours for few rows, torch's for many."""

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from fastspec_kernels.triton.decoder_kernels import gate_kernel
from fastspec_kernels.triton.launch import launch
from fastspec_kernels.triton.product_kernels import few_rows_kernel, gated_kernel

FEW_ROWS = 16
GATE_BLOCK = 1024
# Fastest, or nearly, of about twenty choices for the layers of Llama 1B and 8B on an H200, see
# docs/kernels.md; up to 8 rows leave room for two more stages.
TILES = {"SLICES": 2, "BLOCK_N": 16, "BLOCK_K": 128, "num_warps": 2}
GATED_TILES = {"BLOCK_T": FEW_ROWS, "BLOCK_N": 32, "BLOCK_K": 128, "num_warps": 4, "num_stages": 3}


def linear(
    rows: Tensor, weights: tuple[Tensor, ...], biases: tuple[Tensor | None, ...]
) -> list[Tensor]:
    """Multiply rows [T, K] by each of the matrices [N_i, K].

    Few rows take one launch of our kernel. Many take one product of torch if the matrices lie next
    to each other, and so do the biases; its results [T, N_i] are column ranges of one tensor.
    """
    present = tuple(bias for bias in biases if bias is not None)
    if len(present) not in (0, len(weights)):  # one product has biases for all matrices or for none
        pairs = zip(weights, biases, strict=True)
        return [out for weight, bias in pairs for out in linear(rows, (weight,), (bias,))]
    if not _takes_kernel(rows):
        weight, bias = _joined(weights), _joined(present)
        if weight is None or (bias is None and present):
            return [F.linear(rows, *pair) for pair in zip(weights, biases, strict=True)]
        return [*F.linear(rows, weight, bias).split([*map(len, weights)], dim=1)]
    sizes = tuple(len(weight) for weight in weights)
    outs = tuple(rows.new_empty((len(rows), size)) for size in sizes)
    is_narrow = len(rows) <= 8
    launch(
        few_rows_kernel,
        sum(triton.cdiv(size, TILES["BLOCK_N"]) for size in sizes),
        rows,
        weights,
        present,
        outs,
        sizes,
        *rows.shape,
        BLOCK_T=8 if is_narrow else FEW_ROWS,
        INTERPRETED=rows.device.type == "cpu",
        num_stages=6 if is_narrow else 4,
        **TILES,
    )
    return list(outs)


def gated(rows: Tensor, gate_weight: Tensor, up_weight: Tensor, activation: str) -> Tensor:
    """Return activation(rows @ gate_weight.T) * (rows @ up_weight.T)."""
    options = {"SILU": activation == "silu", "INTERPRETED": rows.device.type == "cpu"}
    size = len(gate_weight)
    if _takes_kernel(rows):
        out = rows.new_empty((len(rows), size))
        num_programs = triton.cdiv(size, GATED_TILES["BLOCK_N"])
        tensors = rows, gate_weight, up_weight, out
        launch(gated_kernel, num_programs, *tensors, *rows.shape, size, **options, **GATED_TILES)
        return out
    gate, up = linear(rows, (gate_weight, up_weight), (None, None))
    grid = len(rows), triton.cdiv(size, GATE_BLOCK)
    sizes = size, gate.stride(0)
    launch(gate_kernel, grid, gate, up, *sizes, BLOCK=GATE_BLOCK, num_warps=4, **options)
    return gate


def _joined(parts: tuple[Tensor, ...]) -> Tensor | None:
    """View contiguous tensors as one, or return None if they do not follow each other in memory."""
    if len(parts) < 2:
        return parts[0] if parts else None
    first, place = parts[0], parts[0].data_ptr()
    storage = first.untyped_storage().data_ptr()
    for part in parts:
        is_like = part.dtype == first.dtype and part.shape[1:] == first.shape[1:]
        is_next = part.data_ptr() == place and part.untyped_storage().data_ptr() == storage
        if not (is_like and is_next and part.is_contiguous()):
            return None
        place += part.nbytes
    strides = (first.shape[-1], 1)[-first.dim() :]  # a tensor of one row may state another
    return first.as_strided((sum(map(len, parts)), *first.shape[1:]), strides)


def _takes_kernel(rows: Tensor) -> bool:
    """Whether our kernels take these rows; in float32 torch's products are as exact."""
    return len(rows) <= FEW_ROWS and rows.dtype != torch.float32
