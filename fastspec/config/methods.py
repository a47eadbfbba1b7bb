"""The methods of drafting by name: what `SpecConfig.method` may be, and which fields each reads.

It imports no torch, so that help texts and refusals need none. Users' methods and those of
installed packages are here too, see `fastspec.drafters.register`.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Method:
    """One method.

    Attributes:
        name: what `SpecConfig.method` calls it.
        summary: one line for help texts and docs.
        fields: of SpecConfig, those that it reads beside those that every method reads.
        needs_draft: whether it runs a draft model.
        build: makes its drafter; None = the function `build` of `fastspec.drafters.<name>`.
    """

    name: str
    summary: str = ""
    fields: frozenset[str] = frozenset()
    needs_draft: bool = False
    build: Callable[[Any], Any] | None = None


_SAMPLED = frozenset({"draft_sample_method"})
_CHAIN = frozenset({"cape", "cape_bins", "confidence_threshold"})
_LOOKUP = frozenset({"prompt_lookup_min", "prompt_lookup_max"})
_TREE = frozenset({"tree_width", "tree_nodes", "tree_paths", "tree_prompt_lookup", "tree_suffix"})
_SUFFIX = frozenset({"suffix_max_spec_factor", "suffix_min_token_prob", "suffix_max_cached_tokens"})
_MODEL = _SAMPLED | _SUFFIX | {"suffix_tokens"}
_TOKENIZER = frozenset({"heterogeneous_vocab"})

BUILT_IN = (
    Method(
        "auto",
        "a draft model where one is given, else plain decoding",
        _MODEL | _CHAIN | _TOKENIZER,
    ),
    Method("none", "plain decoding; a drafter that is given is not loaded"),
    Method(
        "draft_model",
        "a smaller model, best with the same tokenizer",
        _MODEL | _CHAIN | _TOKENIZER,
        True,
    ),
    Method(
        "prompt_lookup", "copies what followed the last tokens where they stood before", _LOOKUP
    ),
    Method(
        "mag",
        "copies after the longest match, then follows a table of bigrams",
        frozenset({"bigram_path"}),
    ),
    Method(
        "ngram",
        "counts what followed the last tokens, in the text and in the target's choices",
        frozenset(
            {"ngram_size", "filler_top_k", "ngram_one_level", "ngram_store", "ngram_guesses"}
        ),
    ),
    Method(
        "suffix",
        "copies what most often followed the last tokens, here and in earlier outputs",
        _SUFFIX | {"tree_nodes"},
    ),
    Method(
        "cascade",
        "draft models that review each other, and MaG last (CS-Drafting)",
        _SAMPLED | _TOKENIZER | {"k_matrix", "lenience", "mag_surplus", "bigram_path"},
        True,
    ),
    Method("glide", "a draft model that reads the target's cache", _MODEL | _CHAIN, True),
    Method("early_exit", "the target's own first layers", _MODEL | _CHAIN | {"exit_layer"}),
    Method(
        "eagle3",
        "one layer that goes on from the target's hidden states, a chain or a tree",
        _MODEL | _CHAIN | _TREE | _LOOKUP,
        True,
    ),
    Method("tree", "token trees over a draft model", _MODEL | _TREE | _LOOKUP | _TOKENIZER, True),
)
# Fields that a method reads only if it says so; all others are read whatever the method, except
# FIELDS_OF_DRAFTS, which method none refuses.
FIELDS_OF_METHODS = frozenset().union(*(method.fields for method in BUILT_IN))
FIELDS_OF_DRAFTS = frozenset(
    {
        "schedule",
        "step_costs",
        "disable_by_batch_size",
        "relaxed_acceptance",
        "synthetic_acceptance_rate",
    }
)

_known = {method.name: method for method in BUILT_IN}
_asked: set[EntryPoint] = set()


def methods() -> dict[str, Method]:
    """All methods by name, those of fastspec first."""
    _ask_packages()
    return dict(_known)


def method_named(name: Any) -> Method:
    """The method of that name; ValueError, with the names of all methods, when there is none."""
    if not isinstance(name, str) or (name not in _known and name not in methods()):
        raise ValueError(f"method: expected one of {tuple(methods())}, got {name!r}")
    return _known[name]


def add_method(method: Method) -> None:
    """Make a method known; ValueError when its name is taken."""
    if method.name in _known:
        raise ValueError(f"name: there is a method {method.name!r} already")
    _known[method.name] = method


def remove_method(name: str) -> None:
    """Forget a method that was added; ValueError for any other name."""
    if name not in _known or _known[name] in BUILT_IN:
        raise ValueError(f"name: no method {name!r} was registered")
    del _known[name]


def _ask_packages() -> None:
    """Let each installed package with an entry point add its methods, once."""
    for entry_point in entry_points(group="fastspec.drafters"):
        if entry_point in _asked:
            continue
        _asked.add(entry_point)
        try:
            if callable(add := entry_point.load()):
                add()
        except Exception as error:  # another package's code: whatever it raises, the others work
            package = entry_point.dist.name if entry_point.dist else "?"
            why = " ".join(f"{type(error).__name__}: {error}".split())
            logger.warning("package %s: method %s left out: %s", package, entry_point.name, why)


def drafts_of(draft: str | None, method: str) -> str | list[str] | None:
    """What --draft names: of a cascade several, biggest first, with commas between them."""
    return draft.split(",") if draft is not None and method == "cascade" else draft
