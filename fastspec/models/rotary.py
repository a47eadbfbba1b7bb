"""Rotary embeddings in packed passes: cached by position, or dependent on the text's length."""

import inspect
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fastspec.models.layout import PagedStep

_LEAST_KEPT, _MOST_KEPT = 1 << 10, 1 << 15  # positions; up to a few MiB of factors


class RotaryTable:
    """Cosines and sines of a model's rotation, cached for the first positions.

    Nothing is cached for a rotation that `RotaryLengths` has replaced, which depends on more than
    positions.

    Attributes:
        cos, sin: [P, R] float32, those of the positions cached so far.
    """

    def __init__(self, rotary: nn.Module):
        self._rotary = rotary
        self.cos = self.sin = torch.empty((0, 0))

    def factors(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin [T, R] float32 for positions [T]; cached only on the CPU."""
        if positions.device.type != "cpu" or "forward" in vars(self._rotary):
            return self._computed(positions)
        if (end := int(positions.max()) + 1) > _MOST_KEPT:
            return self._computed(positions)
        if end > len(self.cos):
            num = max(_LEAST_KEPT, 1 << (end - 1).bit_length())
            self.cos, self.sin = self._computed(torch.arange(num, device=positions.device))
        return self.cos[positions], self.sin[positions]

    def _computed(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        like = torch.zeros((), dtype=torch.float32, device=positions.device)
        cos, sin = self._rotary(like, positions[None])
        return cos[0].float(), sin[0].float()


class RotaryLengths:
    """Rotates each token of a packed pass as in a pass over only its own text.

    transformers looks at the largest position of a pass: if that is beyond the original training
    length, LongRoPE uses other factors for all tokens of the pass. Here the token at position p of
    a prompt of L tokens uses the long factors if max(L, p + 1) is above that length, regardless of
    what else is in the pass and of how the prompt is split. `generate` behaves the same when it
    reads a prompt in one pass and then decodes token by token.

    For Phi3 and similar models, `generate` additionally drops all keys when a text grows beyond
    that length, and rereads it with the long factors. `rereads_above` is then that length; callers
    must do the same, and from then on L is the text's length at that time. Before transformers 5.20
    `generate` drops the keys but rereads only the last token; that is not imitated.

    Dynamic NTK stretches its frequencies only above max_position_embeddings, which no text of an
    engine reaches. They keep their initial values, whatever the model has read before.

    Args:
        twin: the model to run, in which rotations of these two kinds are replaced.
        source: the user's model, whose `generate` is inspected.
    Attributes:
        limit: the smallest length above which rotations change; None = they never do.
        rereads_above: see above; None = `generate` never drops keys.
    Raises:
        ValueError: LongRoPE in a form whose factors cannot be chosen per token.
    """

    def __init__(self, twin: PreTrainedModel, source: PreTrainedModel):
        self._reach = torch.zeros(0)  # [T], of the current pass
        limits = [limit for module in twin.modules() for limit in self._adapt(module)]
        self.limit: int | None = min(limits, default=None)
        self.rereads_above: int | None = self.limit if _generate_rereads(source) else None

    def begin(self, positions: Tensor, step: PagedStep) -> None:
        """Record the text length that each token [T] of the next pass is rotated for."""
        tokens = torch.arange(len(positions), dtype=torch.int32, device=positions.device)
        sequences = torch.searchsorted(step.cu_rows[1:], tokens, right=True)
        self._reach = torch.maximum(positions + 1, step.first_read_lens[sequences])

    def _adapt(self, module: Any) -> list[int]:
        """Replace a pass-dependent rotation; return the lengths above which factors are long."""
        kinds = getattr(module, "rope_type", None)
        by_layer_type = isinstance(kinds, dict)
        names: dict[str | None, Any] = dict(kinds) if by_layer_type else {None: kinds}
        limits: dict[str | None, int] = {}
        for layer_type, kind in names.items():
            prefix = f"{layer_type}_" if by_layer_type else ""
            if isinstance(kind, str) and "dynamic" in kind:
                original = getattr(module, f"{prefix}original_inv_freq")
                device = getattr(module, f"{prefix}inv_freq").device
                setattr(module, f"{prefix}inv_freq", original.to(device))
                names[layer_type] = "default"
            elif kind == "longrope":
                # Each pass writes them, and the user's model may run at the same time.
                frequencies = getattr(module, f"{prefix}inv_freq").clone()
                setattr(module, f"{prefix}inv_freq", frequencies)
                parameters = module.config.rope_parameters
                parameters = parameters[layer_type] if by_layer_type else parameters
                limits[layer_type] = int(parameters["original_max_position_embeddings"])
        if isinstance(kinds, (dict, str)):
            module.rope_type = names if by_layer_type else names[None]  # makes the update a no-op
        if limits:
            module.__dict__["forward"] = partial(self._rotate, module, limits)
        return list(limits.values())

    def _rotate(
        self,
        module: Any,
        limits: dict[str | None, int],
        x: Tensor,
        position_ids: Tensor,
        layer_type: str | None = None,
    ) -> tuple[Tensor, ...]:
        """Return cos and sin of each token; x determines dtype and device.

        The module is called twice, with positions that select one set of factors and then the
        other, because some also scale cos and sin by the length.
        """
        forward = partial(type(module).forward, module, x)
        if layer_type is not None:
            forward = partial(forward, layer_type=layer_type)
        limit = limits.get(layer_type)
        if limit is None:
            return forward(position_ids=position_ids)
        beyond = torch.full_like(position_ids[..., :1], limit)
        short = forward(position_ids=position_ids.clamp(max=limit - 1))
        long = forward(position_ids=torch.cat([position_ids, beyond], dim=-1))
        if not isinstance(short, tuple):
            name = type(module).__name__
            raise ValueError(f"{name}: LongRoPE on complex numbers is not supported")
        is_long = (self._reach > limit)[:, None]
        pairs = zip(short, long, strict=True)
        return tuple(torch.where(is_long, after[..., :-1, :], before) for before, after in pairs)


def _generate_rereads(model: Any) -> bool:
    """Whether `generate` drops the cache at original_max_position_embeddings, as Phi3's does."""
    name = "original_max_position_embeddings"
    prepare: Any = inspect.unwrap(type(model).prepare_inputs_for_generation)
    return name in prepare.__code__.co_names and hasattr(model.config, name)
