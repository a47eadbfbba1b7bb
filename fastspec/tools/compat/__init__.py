"""The functions and classes of published scripts, under their names, on top of the engine."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastspec.tools.compat.colossal import *  # noqa: F403
    from fastspec.tools.compat.cs_drafting import *  # noqa: F403
    from fastspec.tools.compat.romsto import *  # noqa: F403
    from fastspec.tools.compat.sampling import *  # noqa: F403
    from fastspec.tools.csd import csd as csd

# Imported when a name is used: they import torch and transformers.
_MODULES = {
    "fastspec.tools.csd": ("csd",),
    "fastspec.tools.compat.colossal": (
        "InferenceConfig",
        "InferenceEngine",
    ),
    "fastspec.tools.compat.cs_drafting": (
        "CSDraftingDecoderModel",
        "CSDraftingDecoderModelKVCache",
        "CSDraftingEncoderDecoderModel",
        "CSDraftingMaGModel",
        "CSDraftingModel",
        "CountedCSDraftingCachedDecoderModel",
        "CountedCSDraftingCachedEncoderDecoderModel",
        "CountedCSDraftingDecoderModel",
        "CountedCSDraftingDecoderModelKVCache",
        "CountedCSDraftingEncoderDecoderModel",
        "DummyModel",
        "get_mag_model",
    ),
    "fastspec.tools.compat.romsto": (
        "GreedyProcessor",
        "LogitsProcessor",
        "MultinomialProcessor",
        "NGramStorage",
        "NucleusProcessor",
        "OneLevelNGramStorage",
        "TopKNucleusProcessor",
        "TopKProcessor",
        "autoregressive_generate",
        "autoregressive_generate_encoder_decoder",
        "beam_search_generate",
        "ngram_assisted_speculative_generate",
        "speculative_generate",
        "speculative_generate_encoder_decoder",
    ),
    "fastspec.tools.compat.sampling": (
        "autoregressive_sampling",
        "speculative_sampling",
        "speculative_sampling_v2",
    ),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}

__all__ = sorted(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fastspec.compat' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
