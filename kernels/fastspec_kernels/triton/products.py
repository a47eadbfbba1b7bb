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
    """Multiply rows [T, K] by each of the matrices [N_i, K], in one launch if rows are few."""
    if not _takes_kernel(rows):
        return [F.linear(rows, *pair) for pair in zip(weights, biases, strict=True)]
    present = tuple(bias for bias in biases if bias is not None)
    if len(present) not in (0, len(weights)):  # one launch has biases for all matrices or for none
        pairs = zip(weights, biases, strict=True)
        return [out for weight, bias in pairs for out in linear(rows, (weight,), (bias,))]
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
    gate, up = F.linear(rows, gate_weight), F.linear(rows, up_weight)
    num, num_programs = gate.numel(), triton.cdiv(gate.numel(), GATE_BLOCK)
    launch(gate_kernel, num_programs, gate, up, num, BLOCK=GATE_BLOCK, num_warps=4, **options)
    return gate


def _takes_kernel(rows: Tensor) -> bool:
    """Whether our kernels take these rows; in float32 torch's products are as exact."""
    return len(rows) <= FEW_ROWS and rows.dtype != torch.float32
