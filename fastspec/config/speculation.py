"""How drafts are made and verified."""

from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass
from pathlib import Path
from typing import Any

from fastspec.config.checks import (
    config_of,
    is_int,
    normalise_factor,
    normalise_ints,
    refuse,
    reject_unsupported,
    require,
)
from fastspec.config.k_matrix import KMatrix, as_k_matrix, most_draft_tokens
from fastspec.config.methods import FIELDS_OF_METHODS, method_named
from fastspec.config.schedule import as_step_costs
from fastspec.config.token_trees import check_trees

_LOOKUP_FIELDS = ("prompt_lookup_min", "prompt_lookup_max")
MAX_DRAFT_TOKENS = 1024  # beyond it a step is a mistake, or no step
_MAX_NGRAM_SIZE, _MAX_FILLERS = 64, 1024
_DEFAULT_SPECULATIVE_TOKENS = 5
_DEFAULT_LOOKUP_TOKENS = 5
_DEFAULT_NGRAM_SIZE = 4
_DEFAULT_FILLERS = 3
_DEFAULT_K_MATRIX = ((1, 14), (0, 0))  # of those tried, the fastest with the bundled pair, greedily


@dataclass(frozen=True)
class SpecConfig:
    """How drafts are made and verified.

    A field that is None is not given, and has the default of its method; what is given is obeyed or
    refused.

    Args:
        method: "auto" (a draft model when one is given, else none), "none" (plain
            decoding, a drafter that is given is not loaded), "draft_model", "prompt_lookup" (copy
            what followed the last tokens where they stood before), "mag" (the same after the
            longest match, then by a table of bigrams), "ngram" (what most often followed the last
            tokens, in the text and in the target's choices so far), "cascade" (drafters that review
            each other: draft models, and MaG last), "glide" (a draft model that also attends to the
            target's cache, trained for it) or "tree" (token trees over a draft model).
            "prompt_lookup", "mag" and "ngram" need no second model.
        num_speculative_tokens: K, tokens proposed in each step, from 1 to 1024; by default 5, or as
            many as the k_matrix of a cascade asks for.
        draft_sample_method: of draft models: "probabilistic", the default, samples drafts from the
            drafter's own distribution under the request's parameters; "greedy" takes its argmax and
            verifies it as a point mass. Both are exact.
        ngram_size: of "ngram": tokens of the longest n-grams that are counted, from 2 to 64, by
            default 4.
        filler_top_k: of "ngram": how many of the target's likeliest tokens are counted at each
            place that it judges, from 1 to 1024, by default 3; 1 counts only what was said.
        k_matrix: of "cascade", lists or a tensor, n x n: what each level asks of those below it,
            see `fastspec.drafters.CascadeDrafter`. It says what num_speculative_tokens is. None is
            [[1, 14], [0, 0]], for a draft model and MaG.
        lenience: of "cascade", between its drafters only, >= 1. The output is exact whatever it is;
            above 1 the target accepts fewer of the drafts, and gets them sooner.
        rejection_sample_method: "standard" judges draft tokens one by one; "block" judges whole
            prefixes, accepts at least as many on average, and reads the rows once more. Both are
            exact, and the same at temperature 0.
        prompt_lookup_min, prompt_lookup_max: last tokens that must, and that can, agree for a copy,
            1 <= min <= max; the longest match counts. One given alone is both; by default 5.
        bigram_path: table of "mag", also in a cascade: a JSON list whose entry i is the id that
            follows token i; None takes bigram.json in the target's folder if there is one, else
            copies alone.
        schedule: "constant" (K in every step), "adaptive" (as many as pay off by what was accepted
            lately, none where drafts fail; see `fastspec.engine.schedule`), or an object like
            these.
        step_costs: of "adaptive", K + 1 costs of steps with 0 to K draft tokens, in any unit; None
            measures them when the drafter is turned on, and assumes some for sampled requests.
        tree_width, tree_nodes: of "tree", 4 and 16 by default: children of a node and nodes of a
            tree at most, the root not counted; num_speculative_tokens is its depth. Likeliest
            tokens make a tree of the highest cumulative draft probability. Tokens that are sampled
            ("probabilistic", above temperature 0) make one of a fixed, balanced shape.
        tree_paths: of "tree": a fixed shape instead, the ranks among siblings from 0 on the way to
            each node; at most 127 nodes, no deeper than num_speculative_tokens.
        tree_prompt_lookup: of "tree" with draft_sample_method "greedy": one branch is copied by
            prompt lookup, within the same number of nodes.
        cape: siblings for each token of a draft model's chain, more of them the less sure it is. In
            the published form, draft_sample_method "greedy", the chain is the likeliest one. Of
            "probabilistic", requests that sample have it drawn, and siblings without replacement.
        cape_bins: pairs of a probability and how many siblings a token up to that probability gets;
            by default (0.3, 7), (0.6, 5), (0.8, 3), (1, 1).
        relaxed_acceptance: LOSSY above 1, off by default. The target then keeps a proposal while
            u * draft_prob < relaxed_acceptance * target_prob: more are accepted, and the output no
            longer follows the target, but gives no token more than relaxed_acceptance times its
            probability. Greedy requests stay exact. Chains and the "standard" rule only.
        num_assistant_tokens: Hugging Face's name of num_speculative_tokens.
        prompt_lookup_num_tokens: Hugging Face's way to ask for prompt lookup with that many tokens.
    Raises:
        ValueError: a value out of range, or a field that this version does not support yet.
    """

    method: str = "auto"
    num_speculative_tokens: int | None = None
    draft_sample_method: str | None = None
    rejection_sample_method: str = "standard"
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None
    bigram_path: str | Path | None = None
    ngram_size: int | None = None
    filler_top_k: int | None = None
    k_matrix: Any = None
    lenience: float = 1.0
    tree_width: int | None = None
    tree_nodes: int | None = None
    tree_paths: Sequence[Sequence[int]] | None = None
    tree_prompt_lookup: bool = False
    cape: bool = False
    cape_bins: Sequence[tuple[float, int]] | None = None
    confidence_threshold: float | None = None
    schedule: Any = "constant"
    step_costs: tuple[float, ...] | list[float] | None = None
    relaxed_acceptance: float = 1.0
    synthetic_acceptance_rate: float | None = None
    num_assistant_tokens: InitVar[int | None] = None
    prompt_lookup_num_tokens: InitVar[int | None] = None

    def __post_init__(self, num_assistant_tokens, prompt_lookup_num_tokens):
        if prompt_lookup_num_tokens is not None:
            if self.method not in ("auto", "prompt_lookup"):
                name = "prompt_lookup_num_tokens"
                refuse(name, prompt_lookup_num_tokens, f"not for method {self.method!r}")
            object.__setattr__(self, "method", "prompt_lookup")
        method_named(self.method)
        normalise_ints(self, 1, "num_speculative_tokens", most=MAX_DRAFT_TOKENS)
        for name, value in (
            ("num_assistant_tokens", num_assistant_tokens),
            ("prompt_lookup_num_tokens", prompt_lookup_num_tokens),
        ):
            if value is not None:
                self._take_alias(name, value)
        ways = ("probabilistic", "greedy", None)
        way = self.draft_sample_method
        require("draft_sample_method", way, way in ways, "'probabilistic' or 'greedy'")
        rule = self.rejection_sample_method
        if rule == "coupled":
            raise ValueError("rejection_sample_method: 'coupled' is not supported yet")
        is_known = rule in ("standard", "block")
        require("rejection_sample_method", rule, is_known, "'standard' or 'block'")
        self._check_fields_of_methods()
        self._check_copying()
        self._check_cascade()
        check_trees(self)
        self._check_relaxed_acceptance()
        reject_unsupported(
            self,
            confidence_threshold=None,
            synthetic_acceptance_rate=None,
        )
        costs = as_step_costs(self.schedule, self.step_costs, self.num_draft_tokens())
        object.__setattr__(self, "step_costs", costs)

    @classmethod
    def of(cls, value: "SpecConfig | str | Mapping[str, Any]") -> "SpecConfig":
        """The value, or what the name of a method or a mapping of fields says.

        Raises:
            ValueError: another type, a field that there is not, or one that is wrong.
        """
        return cls(value) if isinstance(value, str) else config_of("spec", value, cls)

    def num_draft_tokens(self, most: int | None = None) -> int:
        """K: as it is given, as a cascade's k_matrix has it, or else 5, and of these `most`."""
        if self.num_speculative_tokens is not None:
            return self.num_speculative_tokens
        if self.method == "cascade":
            return most_draft_tokens(self.cascade_matrix)
        return min(_DEFAULT_SPECULATIVE_TOKENS, most or _DEFAULT_SPECULATIVE_TOKENS)

    @property
    def draws_drafts(self) -> bool:
        """Whether a draft model samples where the request does."""
        return self.draft_sample_method != "greedy"

    @property
    def cascade_matrix(self) -> KMatrix:
        """The k_matrix of a cascade, with its default."""
        return _DEFAULT_K_MATRIX if self.k_matrix is None else self.k_matrix

    @property
    def lookup_lengths(self) -> tuple[int, int]:
        """The least and the most tokens that prompt lookup matches."""
        least = self.prompt_lookup_min or self.prompt_lookup_max or _DEFAULT_LOOKUP_TOKENS
        return least, self.prompt_lookup_max or least

    @property
    def ngram_counts(self) -> tuple[int, int]:
        """The size of n-grams and how many fillers, with their defaults."""
        return self.ngram_size or _DEFAULT_NGRAM_SIZE, self.filler_top_k or _DEFAULT_FILLERS

    def _take_alias(self, name: str, value: Any) -> None:
        """Take num_speculative_tokens by another of its names."""
        fits = is_int(value) and 1 <= value <= MAX_DRAFT_TOKENS
        require(name, value, fits, f"an int from 1 to {MAX_DRAFT_TOKENS}")
        count = self.num_speculative_tokens
        expected = f"{count!r}, as num_speculative_tokens has it, or none"
        require(name, value, count in (None, value), expected)
        object.__setattr__(self, "num_speculative_tokens", int(value))

    def _check_fields_of_methods(self) -> None:
        fields = method_named(self.method).fields
        if self.method == "tree" and not self.tree_prompt_lookup:
            fields -= set(_LOOKUP_FIELDS)
        for name in sorted(FIELDS_OF_METHODS - fields):
            if getattr(type(self), name) is None:  # others are checked for themselves
                refuse(name, getattr(self, name), f"not for method {self.method!r}")

    def _check_copying(self) -> None:
        normalise_ints(self, 1, *_LOOKUP_FIELDS, most=2**31 - 1)
        normalise_ints(self, 2, "ngram_size", most=_MAX_NGRAM_SIZE)
        normalise_ints(self, 1, "filler_top_k", most=_MAX_FILLERS)
        is_path = self.bigram_path is None or isinstance(self.bigram_path, (str, Path))
        require("bigram_path", self.bigram_path, is_path, "a path")
        least, most = self.lookup_lengths
        expected = f"at least prompt_lookup_min, {least}"
        require("prompt_lookup_max", self.prompt_lookup_max, most >= least, expected)

    def _check_cascade(self) -> None:
        normalise_factor(self, "lenience")
        if "lenience" not in method_named(self.method).fields:
            fits = self.lenience == 1
            require("lenience", self.lenience, fits, f"1 for method {self.method!r}")
            return
        if self.k_matrix is not None:
            object.__setattr__(self, "k_matrix", as_k_matrix(self.k_matrix))
        if self.method != "cascade":
            return
        most = most_draft_tokens(self.cascade_matrix)
        if most > MAX_DRAFT_TOKENS:
            raise ValueError(
                f"k_matrix: it asks for up to {most} draft tokens, more than {MAX_DRAFT_TOKENS}"
            )
        count = self.num_speculative_tokens
        is_free = count in (None, most)
        require("num_speculative_tokens", count, is_free, f"{most}, as k_matrix has it, or none")

    def _check_relaxed_acceptance(self) -> None:
        normalise_factor(self, "relaxed_acceptance")
        factor = self.relaxed_acceptance
        judges_chains = self.method != "tree" and not self.cape
        fits = factor == 1 or (judges_chains and self.rejection_sample_method == "standard")
        require("relaxed_acceptance", factor, fits, "1 for trees and for block verification")
