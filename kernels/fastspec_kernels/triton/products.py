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
# The best of some twenty for sizes of Llama models of 1 and 8 billion weights on an H200.
TILES = {"SLICES": 2, "BLOCK_N": 16, "BLOCK_K": 128, "num_warps": 2}
GATED_TILES = {"BLOCK_T": FEW_ROWS, "BLOCK_N": 32, "BLOCK_K": 128, "num_warps": 4, "num_stages": 3}


def linear(
    rows: Tensor, weights: tuple[Tensor, ...], biases: tuple[Tensor | None, ...]
) -> list[Tensor]:
    """Multiply rows [T, K] by each of the matrices [N_i, K], in one launch if rows are few."""
    if not _are_few(rows):
        return [F.linear(rows, *pair) for pair in zip(weights, biases, strict=True)]
    given = tuple(bias for bias in biases if bias is not None)
    if len(given) not in (0, len(weights)):  # one launch has biases for all matrices or for none
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
        given,
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
    if _are_few(rows):
        out, num_programs = (
            rows.new_empty((len(rows), size)),
            triton.cdiv(size, GATED_TILES["BLOCK_N"]),
        )
        given = rows, gate_weight, up_weight, out, *rows.shape, size
        launch(gated_kernel, num_programs, *given, **options, **GATED_TILES)
        return out
    gate, up = F.linear(rows, gate_weight), F.linear(rows, up_weight)
    num_programs = triton.cdiv(gate.numel(), GATE_BLOCK)
    given = gate, up, gate.numel()
    launch(gate_kernel, num_programs, *given, BLOCK=GATE_BLOCK, num_warps=4, **options)
    return gate


def _are_few(rows: Tensor) -> bool:
    """Whether the kernels for few rows take these; with float32 torch's products are as exact."""
    return len(rows) <= FEW_ROWS and rows.dtype != torch.float32
