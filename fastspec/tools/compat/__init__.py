"""The functions of published scripts, by their names and arguments, over the engine."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastspec.tools.compat.colossal import InferenceConfig, InferenceEngine
    from fastspec.tools.compat.romsto import (
        GreedyProcessor,
        LogitsProcessor,
        MultinomialProcessor,
        NGramStorage,
        NucleusProcessor,
        OneLevelNGramStorage,
        TopKNucleusProcessor,
        TopKProcessor,
        autoregressive_generate,
        autoregressive_generate_encoder_decoder,
        beam_search_generate,
        ngram_assisted_speculative_generate,
        speculative_generate,
        speculative_generate_encoder_decoder,
    )
    from fastspec.tools.compat.sampling import (
        autoregressive_sampling,
        speculative_sampling,
        speculative_sampling_v2,
    )

__all__ = [
    "GreedyProcessor",
    "InferenceConfig",
    "InferenceEngine",
    "LogitsProcessor",
    "MultinomialProcessor",
    "NGramStorage",
    "NucleusProcessor",
    "OneLevelNGramStorage",
    "TopKNucleusProcessor",
    "TopKProcessor",
    "autoregressive_generate",
    "autoregressive_generate_encoder_decoder",
    "autoregressive_sampling",
    "beam_search_generate",
    "ngram_assisted_speculative_generate",
    "speculative_generate",
    "speculative_generate_encoder_decoder",
    "speculative_sampling",
    "speculative_sampling_v2",
]

# Imported when a name is used: they import torch and transformers. All others are of romsto.
_MODULES = {
    "InferenceConfig": "colossal",
    "InferenceEngine": "colossal",
    "autoregressive_sampling": "sampling",
    "speculative_sampling": "sampling",
    "speculative_sampling_v2": "sampling",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES.get(name, 'romsto')}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
