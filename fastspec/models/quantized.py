"""Linear layers whose weights are packed in 4 or 8 bits, for models that draft."""

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fastspec.models.flat import PACKED_WEIGHT, FlatLayer
from fastspec.models.huge_pages import places_for
from fastspec.models.twin import is_plain_linear
from fastspec_kernels import (
    PACKED_TILE,
    LayerWeights,
    backend_of,
    quantize_weight,
    quantized_linear,
)

_BIASES = [name for name in LayerWeights._fields if name.endswith("_bias")]

logger = logging.getLogger(__name__)


@torch.inference_mode()
def quantize_linear_layers(
    model: PreTrainedModel, layers: Sequence[FlatLayer], bits: int, backend: str
) -> None:
    """Let a model's plain linear layers, and those of its flat layers, use packed weights.

    The model's own weights stay as they are. Embeddings, norms and weights of other modules, such
    as fused experts, are not packed.

    Raises:
        ValueError: no layer can be packed, the backend has no kernel for packed weights, or one has
            a weight that is not finite.
    """
    name, device = type(model).__name__, model.device
    if device.type != "cpu" or backend_of("quantized_linear", device, backend) is None:
        where = f"with backend {backend!r}" if device.type == "cpu" else f"on {device}"
        raise ValueError(f"draft_bits: has kernels for CPUs only, {name} runs {where}")
    linear: list[Any] = [module for module in model.modules() if is_plain_linear(module)]
    _check_share(model, linear, bits)
    # Packed weights have whole tiles of outputs, from which heads could not be told otherwise.
    flat = [layer for layer in layers if len(layer.weights.query_weight) % PACKED_TILE == 0]
    weights = [module.weight for module in linear]
    weights += [weight for layer in flat for weight in _matrices(layer.weights).values()]
    distinct = {id(weight): weight for weight in weights}
    logger.info("packing %d weights of %s in %d bits", len(distinct), name, bits)
    try:
        packed = dict(zip(distinct, _packed(distinct.values(), bits), strict=True))
    except ValueError as error:
        raise ValueError(f"draft_bits: cannot quantize {name}: {error}") from error
    for module in linear:
        vars(module)[PACKED_WEIGHT] = weight = packed[id(module.weight)]
        vars(module)["forward"] = _forward(module, weight, backend)
    for layer in flat:
        changed = {name: packed[id(w)] for name, w in _matrices(layer.weights).items()}
        biases = {name: _float32(getattr(layer.weights, name)) for name in _BIASES}
        layer.weights = layer.weights._replace(**changed, **biases)


def _check_share(model: PreTrainedModel, linear: Sequence[Any], bits: int) -> None:
    """Warn if most weights that a pass reads are not in linear layers; ValueError if none are."""
    if not linear:
        name = type(model).__name__
        raise ValueError(f"draft_bits: {name} has no plain linear layers to quantize")
    # Of embeddings that are not the head as well, a pass reads a few rows.
    looked_up = {part.weight for part in model.modules() if type(part) is nn.Embedding}
    packed = {module.weight for module in linear}
    others = {*model.parameters()} - looked_up - packed
    size, rest = (sum(weight.numel() for weight in part) for part in (packed, others))
    if size < rest:
        logger.warning(
            "draft_bits: only %.0f %% of the weights of %s are in linear layers, which draft with"
            " %d bits; the rest, such as fused experts, is read in full",
            100 * size / (size + rest),
            type(model).__name__,
            bits,
        )


def _packed(weights: Iterable[Tensor], bits: int) -> list[Tensor]:
    packed = [quantize_weight(weight, bits) for weight in weights]
    for index, place in enumerate(places_for(packed) or ()):
        packed[index] = place.copy_(packed[index])
    return packed


def _forward(module: Any, weight: Tensor, backend: str) -> Callable[[Tensor], Tensor]:
    bias, num_outputs = _float32(module.bias), module.out_features

    def forward(x: Tensor) -> Tensor:
        return quantized_linear(x.contiguous(), weight, num_outputs, bias, backend=backend)

    return forward


def _matrices(weights: LayerWeights) -> dict[str, Tensor]:
    """Return the weights of a layer's products by name."""
    return {name: w for name, w in weights._asdict().items() if name.endswith("_weight")}


def _float32(bias: nn.Parameter | Tensor | None) -> Tensor | None:
    return None if bias is None else bias.detach().float().contiguous()
