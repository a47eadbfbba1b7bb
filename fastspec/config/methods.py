"""The methods of drafting by name: what `SpecConfig.method` may be, and which fields each reads.

It imports no torch, so that help texts and refusals need none: a method of fastspec names its
`build` function, which is imported when it is used.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

logger = logging.getLogger(__name__)

ENTRY_POINTS = "fastspec.drafters"


@dataclass(frozen=True)
class Method:
    """One method.

    Attributes:
        name: what `SpecConfig.method` calls it.
        summary: one line for help texts and docs.
        fields: of SpecConfig, those that it reads beside those that every method reads.
        needs_draft: whether it runs a draft model.
        build: makes its drafter, see `fastspec.drafters.register`; "module:function" is imported
            when it is first used, and None proposes nothing.
    """

    name: str
    summary: str = ""
    fields: frozenset[str] = frozenset()
    needs_draft: bool = False
    build: Callable[[Any], Any] | str | None = None


_SAMPLED = frozenset({"draft_sample_method"})
_CAPE = frozenset({"cape", "cape_bins"})

BUILT_IN = {
    method.name: method
    for method in (
        Method(
            "auto",
            "a draft model where one is given, else plain decoding",
            _SAMPLED | _CAPE,
            build="fastspec.drafters.auto:build",
        ),
        Method("none", "plain decoding; a drafter that is given is not loaded", _SAMPLED),
        Method(
            "draft_model",
            "a smaller model with the same tokenizer",
            _SAMPLED | _CAPE,
            needs_draft=True,
            build="fastspec.drafters.draft_model:build",
        ),
        Method(
            "prompt_lookup",
            "copies what followed the last tokens where they stood before",
            frozenset({"prompt_lookup_min", "prompt_lookup_max"}),
            build="fastspec.drafters.prompt_lookup:build",
        ),
        Method(
            "mag",
            "copies after the longest match, then follows a table of bigrams",
            frozenset({"bigram_path"}),
            build="fastspec.drafters.mag:build",
        ),
        Method(
            "ngram",
            "counts what followed the last tokens, in the text and in the target's choices",
            frozenset({"ngram_size", "filler_top_k"}),
            build="fastspec.drafters.ngram:build",
        ),
        Method(
            "cascade",
            "draft models that review each other, and MaG last (CS-Drafting)",
            _SAMPLED | {"k_matrix", "lenience", "bigram_path"},
            needs_draft=True,
            build="fastspec.drafters.cascade:build",
        ),
        Method(
            "glide",
            "a draft model that reads the target's cache",
            _SAMPLED | _CAPE,
            needs_draft=True,
            build="fastspec.drafters.glide.drafter:build",
        ),
        Method(
            "tree",
            "token trees over a draft model",
            _SAMPLED
            | {"tree_width", "tree_nodes", "tree_paths", "tree_prompt_lookup"}
            | {"prompt_lookup_min", "prompt_lookup_max"},
            needs_draft=True,
            build="fastspec.drafters.tree:build",
        ),
    )
}

# Fields that a method reads only if it says so; all others are read whatever the method.
FIELDS_OF_METHODS = frozenset().union(*(method.fields for method in BUILT_IN.values()))


class _Methods(Mapping[str, Method]):
    """Methods by name, those of fastspec first.

    Installed packages are asked for theirs when a name is unknown, and before all are listed.
    """

    def __init__(self):
        self._known = dict(BUILT_IN)
        self._asked: set[EntryPoint] = set()

    def __getitem__(self, name: str) -> Method:
        if name not in self._known:
            self._ask_packages()
        return self._known[name]

    def __iter__(self) -> Iterator[str]:
        self._ask_packages()
        return iter(tuple(self._known))

    def __len__(self) -> int:
        self._ask_packages()
        return len(self._known)

    def add(self, method: Method) -> None:
        if method.name in self._known:
            raise ValueError(f"name: there is a method {method.name!r} already")
        self._known[method.name] = method

    def remove(self, name: str) -> None:
        if name not in self._known or name in BUILT_IN:
            raise ValueError(f"name: no method {name!r} was registered")
        del self._known[name]

    def _ask_packages(self) -> None:
        for entry_point in entry_points(group=ENTRY_POINTS):
            if entry_point in self._asked:
                continue
            self._asked.add(entry_point)  # first, for it may ask for methods itself
            try:
                register = entry_point.load()
                if callable(register):
                    register()
            except Exception as error:  # another package's code: whatever it raises, others work
                package = entry_point.dist.name if entry_point.dist else "?"
                why = " ".join(f"{type(error).__name__}: {error}".split())
                place = f"package {package}: entry point {entry_point.name!r} of {ENTRY_POINTS}"
                logger.warning("%s left out: %s", place, why)


_METHODS = _Methods()


def methods() -> Mapping[str, Method]:
    """All methods by name, those of fastspec first."""
    return _METHODS


def add_method(method: Method) -> None:
    """Make a method known; ValueError when its name is taken."""
    _METHODS.add(method)


def remove_method(name: str) -> None:
    """Forget a method that was added; ValueError for any other name."""
    _METHODS.remove(name)


def method_named(name: object) -> Method:
    """The method of that name; ValueError, with all names that there are, for any other."""
    if not isinstance(name, str) or name not in _METHODS:
        raise ValueError(f"method: expected one of {tuple(_METHODS)}, got {name!r}")
    return _METHODS[name]
