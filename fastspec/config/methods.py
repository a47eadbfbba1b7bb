"""The methods of drafting by name: what `SpecConfig.method` may be, and which fields each reads.

It imports no torch, so that help texts and refusals need none. Users' methods and those of
installed packages are here too, see `fastspec.drafters.register`.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from fastspec.config.checks import require

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
        proposes: whether anything is drafted at all.
        chooses: whether it leaves the choice to what is given.
        takes_several: whether it runs several draft models, biggest first.
        sets_length: whether its own options say how many tokens it proposes.
        drafts_trees: whether it drafts trees whatever the options say.
        reads_target: what it reads of the target beside its text.
        own_writer: who drafts, in a sentence, where it is neither a draft model nor its name.
        is_tried: whether `tune` does so without being asked.
    """

    name: str
    summary: str = ""
    fields: frozenset[str] = frozenset()
    needs_draft: bool = False
    build: Callable[[Any], Any] | None = None
    proposes: bool = True
    chooses: bool = False
    takes_several: bool = False
    sets_length: bool = False
    drafts_trees: bool = False
    reads_target: str = ""
    own_writer: str = ""
    is_tried: bool = False

    @property
    def takes_draft(self) -> bool:
        """Whether a draft model may be given."""
        return self.needs_draft or self.chooses

    @property
    def has_own_drafts(self) -> bool:
        """Whether its draft models are of a kind that no other method runs."""
        return self.needs_draft and self.reads_target != ""

    @property
    def writer(self) -> str:
        """Who drafts, in a sentence."""
        return self.own_writer or ("the draft model" if self.takes_draft else self.name)

    @property
    def writes_chains(self) -> bool:
        """Whether it drafts as many tokens as it is asked for, one after the other."""
        return "confidence_threshold" in self.fields

    @property
    def reencodes(self) -> bool:
        """Whether the text of a draft model with another tokenizer may be encoded anew for it."""
        is_own = self.build is not None  # of a user, who loads the draft model
        return self.writes_chains and "heterogeneous_vocab" in self.fields and not is_own


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
        chooses=True,
    ),
    Method("none", "plain decoding; a drafter that is given is not loaded", proposes=False),
    Method(
        "draft_model",
        "a smaller model, best with the same tokenizer",
        _MODEL | _CHAIN | _TOKENIZER,
        needs_draft=True,
        is_tried=True,
    ),
    Method(
        "prompt_lookup",
        "copies what followed the last tokens where they stood before",
        _LOOKUP,
        is_tried=True,
    ),
    Method(
        "mag",
        "copies after the longest match, then follows a table of bigrams",
        frozenset({"bigram_path"}),
        is_tried=True,
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
        is_tried=True,
    ),
    Method(
        "cascade",
        "draft models that review each other, and MaG last (CS-Drafting)",
        _SAMPLED | _TOKENIZER | {"k_matrix", "lenience", "mag_surplus", "bigram_path"},
        needs_draft=True,
        takes_several=True,
        sets_length=True,
        own_writer="the cascade",
        is_tried=True,
    ),
    Method(
        "glide",
        "a draft model that reads the target's cache",
        _MODEL | _CHAIN,
        needs_draft=True,
        reads_target="the target's cache",
        own_writer="the GLIDE draft",
        is_tried=True,
    ),
    Method(
        "early_exit",
        "the target's own first layers",
        _MODEL | _CHAIN | {"exit_layer"},
        reads_target="the target's layers",
        is_tried=True,
    ),
    Method(
        "eagle3",
        "one layer that goes on from the target's hidden states, a chain or a tree",
        _MODEL | _CHAIN | _TREE | _LOOKUP,
        needs_draft=True,
        reads_target="the target's hidden states",
        own_writer="the EAGLE-3 draft",
        is_tried=True,
    ),
    Method(
        "tree",
        "token trees over a draft model",
        _MODEL | _TREE | _LOOKUP | _TOKENIZER,
        needs_draft=True,
        drafts_trees=True,
        is_tried=True,
    ),
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
        require("method", name, False, f"one of {tuple(methods())}")
    return _known[name]


def drafting_method(name: Any, field: str = "method") -> Method:
    """The method of that name; ValueError for those that propose nothing or leave the choice."""
    drafting = tuple(m.name for m in methods().values() if m.proposes and not m.chooses)
    require(field, name, name in drafting, f"one of {drafting}")
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
