"""The drafting methods by name: the values of `SpecConfig.method`, and the fields each one uses.

It does not import torch, so help texts and errors in options do not need it. Users' methods and
those of installed packages are included, see `fastspec.drafters.register`.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from fastspec.config.checks import require_one_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Method:
    """One method.

    Attributes:
        name: its value of `SpecConfig.method`.
        summary: one line for help texts and docs.
        fields: fields of SpecConfig that it uses in addition to those that every method uses.
        needs_draft: whether it runs a draft model.
        build: makes its drafter; None = the function `build` of `fastspec.drafters.<name>`.
        proposes: whether anything is drafted at all.
        chooses: whether it selects a method by the drafter that is given.
        takes_several: whether it runs several draft models, biggest first.
        sets_length: whether its own options determine how many tokens it proposes.
        drafts_trees: whether it always drafts trees.
        reads_target: what it reads from the target in addition to its text.
        own_writer: what to call its drafter in a sentence, if not "the draft model" or its name.
        changes_target: whether the target itself drafts, as one of its options changes it.
        is_tried: whether `tune` tries it by default.
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
    changes_target: bool = False
    is_tried: bool = False

    @property
    def takes_draft(self) -> bool:
        """Whether a draft model may be given."""
        return self.needs_draft or self.chooses

    @property
    def writer(self) -> str:
        """What to call its drafter in a sentence."""
        return self.own_writer or ("the draft model" if self.takes_draft else self.name)

    @property
    def writes_chains(self) -> bool:
        """Whether it drafts as many tokens as requested, one after the other."""
        return "confidence_threshold" in self.fields

    @property
    def reencodes(self) -> bool:
        """Whether the text of a draft model with another tokenizer may be re-encoded for it."""
        is_own = self.build is not None  # of a user, who loads the draft model
        return self.writes_chains and "heterogeneous_vocab" in self.fields and not is_own


_SAMPLED = frozenset({"draft_sample_method"})
_CHAIN = frozenset({"cape", "cape_bins", "confidence_threshold"})
LOOKUP_FIELDS = frozenset({"prompt_lookup_min", "prompt_lookup_max"})
TREE_FIELDS = frozenset(
    {"tree_width", "tree_nodes", "tree_paths", "tree_prompt_lookup", "tree_suffix"}
)
SUFFIX_FIELDS = frozenset(
    {"suffix_max_spec_factor", "suffix_min_token_prob", "suffix_max_cached_tokens"}
)
_MODEL = _SAMPLED | SUFFIX_FIELDS | {"suffix_tokens"}
_TOKENIZER = frozenset({"heterogeneous_vocab"})
_BITS = frozenset({"draft_bits"})

BUILT_IN = (
    Method(
        "auto",
        "a draft model if one is given or comes with the target, else plain decoding",
        _MODEL | _CHAIN | _TOKENIZER | _BITS,
        chooses=True,
    ),
    Method("none", "plain decoding; a given drafter is not loaded", proposes=False),
    Method(
        "draft_model",
        "a smaller model, best with the same tokenizer",
        _MODEL | _CHAIN | _TOKENIZER | _BITS,
        needs_draft=True,
        is_tried=True,
    ),
    Method(
        "prompt_lookup",
        "copies what followed an earlier occurrence of the last tokens",
        LOOKUP_FIELDS,
        is_tried=True,
    ),
    Method(
        "mag",
        "copies what followed the longest match, then follows a bigram table",
        frozenset({"bigram_path"}),
        is_tried=True,
    ),
    Method(
        "ngram",
        "counts what followed the last tokens, in the text and among the target's top tokens",
        frozenset(
            {"ngram_size", "filler_top_k", "ngram_one_level", "ngram_store", "ngram_guesses"}
        ),
    ),
    Method(
        "suffix",
        "copies what most often followed the last tokens, here and in earlier outputs",
        SUFFIX_FIELDS | {"tree_nodes"},
        is_tried=True,
    ),
    Method(
        "cascade",
        "draft models that review each other's drafts, with MaG last (CS-Drafting)",
        _SAMPLED | _TOKENIZER | _BITS | {"k_matrix", "lenience", "mag_surplus", "bigram_path"},
        needs_draft=True,
        takes_several=True,
        sets_length=True,
        own_writer="the cascade",
        is_tried=True,
    ),
    Method(
        "glide",
        "a draft model that reads the target's cache",
        _MODEL | _CHAIN | _BITS,
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
        changes_target=True,
        is_tried=True,
    ),
    Method(
        "quantized",
        "the target itself with weights of 4 or 8 bits, on a CPU",
        _MODEL | _CHAIN | _BITS,
        reads_target="the target's weights",
        own_writer="the quantized copy",
        changes_target=True,
        is_tried=True,
    ),
    Method(
        "eagle3",
        "one layer that continues from the target's hidden states, as a chain or a tree",
        _MODEL | _CHAIN | TREE_FIELDS | LOOKUP_FIELDS | _BITS,
        needs_draft=True,
        reads_target="the target's hidden states",
        own_writer="the EAGLE-3 draft",
        is_tried=True,
    ),
    Method(
        "dflash",
        "a draft that guesses a block of tokens in one pass, from the target's hidden states",
        _MODEL | _BITS | {"confidence_threshold"},
        needs_draft=True,
        reads_target="the target's hidden states",
        own_writer="the DFlash draft",
        is_tried=True,
    ),
    Method(
        "mtp",
        "the target's own layer for multi-token prediction (MTP), as a chain or a tree",
        _MODEL | _CHAIN | TREE_FIELDS | LOOKUP_FIELDS | _BITS,
        reads_target="the target's hidden states",
        own_writer="the MTP layer",
    ),
    Method(
        "gemma_assistant",
        "a Gemma 4 assistant, which reads the target's cache and hidden states",
        _MODEL | _CHAIN | TREE_FIELDS | LOOKUP_FIELDS,
        needs_draft=True,
        reads_target="the target's cache and hidden states",
        own_writer="the assistant",
        is_tried=True,
    ),
    Method(
        "tree",
        "token trees from a draft model",
        _MODEL | TREE_FIELDS | LOOKUP_FIELDS | _TOKENIZER | _BITS,
        needs_draft=True,
        drafts_trees=True,
        is_tried=True,
    ),
)
# What to call the kinds of drafts that only the method of the same name runs.
OWN_DRAFTS = {
    "glide": "a GLIDE model",
    "eagle3": "an EAGLE draft",
    "dflash": "a DFlash draft",
    "gemma_assistant": "a Gemma 4 assistant",
}
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
    """The method of that name; ValueError, with the names of all methods, if there is none."""
    if not isinstance(name, str) or (name not in _known and name not in methods()):
        require_one_of("method", name, methods())
    return _known[name]


def drafting_method(name: Any, field: str = "method") -> Method:
    """The method of that name; ValueError for those that propose nothing or only choose one."""
    drafting = [m.name for m in methods().values() if m.proposes and not m.chooses]
    require_one_of(field, name, drafting)
    return _known[name]


def add_method(method: Method) -> None:
    """Register a method; ValueError if its name is taken."""
    if method.name in _known:
        raise ValueError(f"name: there is already a method {method.name!r}")
    _known[method.name] = method


def unregister(name: str) -> None:
    """Remove a method that `register` added; engines that use it are unaffected.

    Raises:
        ValueError: there is no such method, or it is built in.
    """
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
