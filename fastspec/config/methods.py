"""The methods of drafting by name: what `SpecConfig.method` may be, and which fields each reads."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Method:
    """One method.

    Attributes:
        name: what `SpecConfig.method` calls it.
        summary: one line for help texts and docs.
        fields: of SpecConfig, those that it reads beside those that every method reads.
        needs_draft: whether it runs a draft model.
    """

    name: str
    summary: str
    fields: frozenset[str] = frozenset()
    needs_draft: bool = False


_METHODS: dict[str, Method] = {}


def add_method(method: Method) -> None:
    """Make a method known; ValueError when its name is taken."""
    if method.name in _METHODS:
        raise ValueError(f"name: there is a method {method.name!r} already")
    _METHODS[method.name] = method


def methods() -> dict[str, Method]:
    """All methods by name, those of fastspec first."""
    return dict(_METHODS)


_SAMPLED = frozenset({"draft_sample_method"})
_CAPE = frozenset({"cape", "cape_bins"})

for _method in (
    Method("auto", "a draft model where one is given, else plain decoding", _SAMPLED | _CAPE),
    Method("none", "plain decoding; a drafter that is given is not loaded", _SAMPLED),
    Method("draft_model", "a smaller model with the same tokenizer", _SAMPLED | _CAPE, True),
    Method(
        "prompt_lookup",
        "copies what followed the last tokens where they stood before",
        frozenset({"prompt_lookup_min", "prompt_lookup_max"}),
    ),
    Method(
        "mag",
        "copies after the longest match, then follows a table of bigrams",
        frozenset({"bigram_path"}),
    ),
    Method(
        "ngram",
        "counts what followed the last tokens, in the text and in the target's choices",
        frozenset({"ngram_size", "filler_top_k"}),
    ),
    Method(
        "cascade",
        "draft models that review each other, and MaG last (CS-Drafting)",
        _SAMPLED | {"k_matrix", "lenience", "bigram_path"},
        True,
    ),
    Method("glide", "a draft model that reads the target's cache", _SAMPLED | _CAPE, True),
    Method(
        "tree",
        "token trees over a draft model",
        _SAMPLED
        | {"tree_width", "tree_nodes", "tree_paths", "tree_prompt_lookup"}
        | {"prompt_lookup_min", "prompt_lookup_max"},
        True,
    ),
):
    add_method(_method)
