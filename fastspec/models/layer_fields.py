"""Fields of a decoder's configuration, also where its layers differ."""

from typing import Any

_SIZES = {"intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"}


def last_layer_field(config: Any, name: str) -> Any:
    """Return a field of a text config, None if it has none; a size is that of the last layer."""
    if name not in _SIZES:
        return getattr(config, name, None)
    layers = getattr(config, "per_layer_config", None)  # of some heterogeneous models
    value = getattr(layers[-1] if layers else config, name, None)
    return value[-1] if isinstance(value, (list, tuple)) else value
