"""Linear layers whose weights are packed in 4 or 8 bits, for models that draft."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fastspec.models.flat import FlatLayer
from fastspec.models.twin import is_plain_linear
from fastspec_kernels import LayerWeights, quantize_weight, quantized_linear

_OUTPUT_TILE = 16  # packed weights have whole tiles of outputs

logger = logging.getLogger(__name__)


@torch.inference_mode()
def quantize_linear_layers(
    model: PreTrainedModel, layers: Sequence[FlatLayer], bits: int, backend: str
) -> None:
    """Let a model's plain linear layers, and those of its flat layers, use packed weights.

    The model's own weights stay as they are. Embeddings, norms and weights of other modules, such
    as fused experts, are not packed.

    Raises:
        ValueError: no layer can be packed.
    """
    packed: dict[int, Tensor] = {}

    def pack(weight: Tensor) -> Tensor:
        if id(weight) not in packed:
            packed[id(weight)] = quantize_weight(weight, bits)
        return packed[id(weight)]

    linear = [module for module in model.modules() if is_plain_linear(module)]
    for module in linear:
        module.__dict__["forward"] = _forward(module, pack(module.weight), backend)
    for layer in layers:
        if layer.weights.query_weight.shape[0] % _OUTPUT_TILE == 0:  # else its heads are not known
            layer.weights = _packed(layer.weights, pack)
    total = sum(weight.numel() for weight in model.parameters())
    share = sum(module.weight.numel() for module in linear) / max(total, 1)
    if not linear:
        raise ValueError(f"method: {type(model).__name__} has no plain linear layers to quantize")
    if share < 0.5:
        logger.warning(
            "method: only %.0f %% of the weights of %s are in linear layers, which draft with %d"
            " bits; the rest, such as fused experts, is read in full",
            100 * share,
            type(model).__name__,
            bits,
        )


def _forward(module: Any, weight: Tensor, backend: str) -> Callable[[Tensor], Tensor]:
    bias, num_outputs = _float32(module.bias), module.out_features

    def forward(x: Tensor) -> Tensor:
        return quantized_linear(x.contiguous(), weight, num_outputs, bias, backend=backend)

    return forward


def _packed(weights: LayerWeights, pack: Callable[[Tensor], Tensor]) -> LayerWeights:
    named = weights._asdict().items()
    changed = {name: pack(weight) for name, weight in named if name.endswith("_weight")}
    changed |= {name: _float32(bias) for name, bias in named if name.endswith("_bias")}
    return weights._replace(**changed)


def _float32(bias: nn.Parameter | Tensor | None) -> Tensor | None:
    return None if bias is None else bias.detach().float().contiguous()
