"""Hidden states of a model between its layers, caught on their way."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

LAST_STATE = -1  # in the place of a layer: what the head reads, after the final norm


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The layers of a decoder.

    Raises:
        ValueError: it keeps them elsewhere than transformers' decoders do.
    """
    layers: Any = getattr(model.get_decoder(), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ValueError(f"target: {type(model).__name__} has no list of decoder layers")
    return layers


def usual_layers(num_layers: int) -> list[int]:
    """The layers whose inputs published EAGLE-3 drafts read: early, in the middle, late."""
    return [2, num_layers // 2, num_layers - 3]


@contextmanager
def capturing(layers: nn.ModuleList, indices: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """What these layers are given in the passes of the block, by index; the last pass counts."""
    inputs: dict[int, Tensor] = {}

    def note(index: int) -> Any:
        def hook(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            inputs[index] = args[0] if args else kwargs["hidden_states"]

        return hook

    handles = [
        layers[index].register_forward_pre_hook(note(index), with_kwargs=True) for index in indices
    ]
    try:
        yield inputs
    finally:
        for handle in handles:
            handle.remove()
