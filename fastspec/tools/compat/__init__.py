"""The functions of published scripts, by their names and arguments, over the engine."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
_SAMPLING = ("autoregressive_sampling", "speculative_sampling", "speculative_sampling_v2")


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "sampling" if name in _SAMPLING else "romsto"
    return getattr(import_module(f"fastspec.tools.compat.{module}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
