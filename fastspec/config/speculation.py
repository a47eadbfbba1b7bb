"""How drafts are made and verified."""

from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, replace
from pathlib import Path
from typing import Any

from fastspec.config.checks import config_of, refuse, require
from fastspec.config.k_matrix import KMatrix, as_k_matrix, most_draft_tokens
from fastspec.config.methods import (
    BUILT_IN,
    FIELDS_OF_DRAFTS,
    FIELDS_OF_METHODS,
    method_named,
)
from fastspec.config.options import (
    BOOL,
    FACTOR,
    PATH,
    POSITIVE,
    SHARE,
    Kind,
    Options,
    anything,
    choice,
    documented,
    integer,
    option,
    options_of,
)
from fastspec.config.schedules import SCHEDULE, STEP_COSTS, check_step_costs
from fastspec.config.token_trees import MAX_TREE_NODES, as_cape_bins, as_tree_paths, check_trees

MAX_DRAFT_TOKENS = 1024  # beyond it a step is a mistake, or no step
_FEWEST_SUFFIX_TOKENS = 2
_LOOKUP_FIELDS = ("prompt_lookup_min", "prompt_lookup_max")
_SUFFIX_FIELDS = ("suffix_max_spec_factor", "suffix_min_token_prob", "suffix_max_cached_tokens")


@documented
@dataclass(frozen=True)
class SpecConfig(Options):
    """How drafts are made and verified.

    A field that is None is not given, and has the default of its method; what is given is obeyed or
    refused.
    """

    method: str = option(
        "auto",
        Kind("a name of a method", lambda value: isinstance(value, str)),
        f"How drafts are made: {', '.join(method.name for method in BUILT_IN)}.",
        "auto takes a draft model where one is given. none refuses every option that only drafts"
        " have, but for num_speculative_tokens; without a draft model auto keeps them for"
        " enable_spec_dec.",
    )
    num_speculative_tokens: int | None = option(
        None,
        integer(1, MAX_DRAFT_TOKENS),
        "K, tokens proposed in each step; by default {usual}, with cascade as k_matrix asks.",
        "With suffix_tokens: those of the draft model; a copy may be longer. Method none, which"
        " refuses the other options of drafts, keeps it for what drafts later: a drafter that"
        " enable_spec_dec turns on, or the --methods of a server.",
        aliases=(
            "num_assistant_tokens (Hugging Face)",
            "prompt_lookup_num_tokens (Hugging Face; also chooses prompt_lookup)",
            "n_spec_tokens (Colossal-Inference, in enable_spec_dec)",
        ),
        flags=("--num-speculative-tokens", "-k"),
        usual={"": 5, "suffix": 24},
    )
    draft_sample_method: str | None = option(
        None,
        choice("probabilistic", "greedy"),
        "How a draft model chooses: probabilistic, the default, or greedy; both are exact.",
        "probabilistic samples drafts from the drafter's own distribution under the request's"
        " parameters; greedy takes its argmax and verifies it as a point mass.",
    )
    heterogeneous_vocab: str | None = option(
        None,
        choice("intersection", "reencoding"),
        "A draft with another tokenizer drafts the tokens that both have (intersection), or text"
        " that is encoded anew (reencoding, greedy drafts); by default chosen.",
        "Both are exact. The intersection is chosen unless fewer than half of all runs of"
        " num_speculative_tokens tokens of ordinary text are tokens that both have, and always for"
        " trees, cascades, CaPE and where draft_sample_method is given as probabilistic;"
        " `engine.spec` says what was chosen.",
    )
    rejection_sample_method: str = option(
        "standard",
        choice("standard", "block", "coupled"),
        "Judge draft tokens one by one (standard) or whole prefixes (block), or draw by place"
        " (coupled); all are exact.",
        "block accepts at least as many on average and reads the rows once more. With coupled a"
        " sampled text depends on its seed alone: it is the same with any drafter, any number of"
        " draft tokens, or none. Draft models read the same noise as the target, so that their"
        " drafts are accepted nearly as often as with standard; cascades do not, and lose more. At"
        " temperature 0 all are the same.",
    )
    prompt_lookup_min: int | None = option(
        None, integer(1), "Last tokens that must agree for a copy; by default {usual}.", usual=5
    )
    prompt_lookup_max: int | None = option(
        None,
        integer(1),
        "Last tokens that are compared at most; by default prompt_lookup_min.",
        "The longest match counts. One of the two given alone is both.",
    )
    bigram_path: str | Path | None = option(
        None,
        PATH,
        "The bigram table; by default bigram.json in the target's folder, if there is one.",
        "A JSON list whose entry i is the id that follows token i. Without a table drafts are"
        " copied only.",
        flags=("--bigram",),
    )
    ngram_size: int | None = option(
        None,
        integer(2, 64),
        "Tokens of the longest n-grams that are counted; by default {usual}.",
        usual=4,
    )
    filler_top_k: int | None = option(
        None,
        integer(1, 1024),
        "The target's most probable tokens that count at each place it judges; by default {usual}.",
        "1 counts only what was written.",
        usual=3,
    )
    ngram_one_level: bool = option(
        False, BOOL, "Count n-grams of ngram_size tokens alone, none that are shorter."
    )
    ngram_store: str = option(
        "request",
        choice("request", "engine"),
        "Whose n-grams are counted: of the request alone, or of all requests of the engine.",
        "engine keeps what is learnt across prompts, in a table of fixed size. It needs"
        " rejection_sample_method coupled, with which a text depends on its seed alone: otherwise"
        " the drafts of a request would be correlated with its draws if an earlier one had its"
        " seed.",
    )
    ngram_guesses: bool = option(
        False,
        BOOL,
        "Where nothing is known, propose any token instead of none.",
        "Which one depends on the tokens before it alone.",
    )
    suffix_tokens: int | None = option(
        None,
        integer(1, MAX_DRAFT_TOKENS),
        "With a draft model: copy up to so many tokens where the text repeats itself; by default"
        " none.",
        "Where a copy is expected to yield at least one accepted token it is proposed and the draft"
        " model does not run; elsewhere the draft model proposes num_speculative_tokens. The"
        " suffix_* options apply. A schedule says how much the draft model proposes, and copies go"
        " on; without a draft model use method suffix.",
    )
    suffix_max_spec_factor: float | None = option(
        None,
        POSITIVE,
        "suffix, suffix_tokens, tree_suffix: tokens of a draft at most, over those that match; by"
        " default {usual}.",
        usual=2.0,
    )
    suffix_min_token_prob: float | None = option(
        None,
        SHARE,
        "suffix, suffix_tokens, tree_suffix: a draft ends where fewer of the places that match have"
        " gone on so; by default {usual}.",
        usual=0.1,
    )
    suffix_max_cached_tokens: int | None = option(
        None,
        integer(_FEWEST_SUFFIX_TOKENS),
        "suffix, suffix_tokens, tree_suffix: tokens of earlier outputs that are kept, and of a"
        " corpus; by default {usual} each.",
        "The oldest go first. 500000 tokens take up to 100 MB.",
        usual=500_000,
    )
    exit_layer: int | None = option(
        None,
        integer(1),
        "How many of the target's layers draft, fewer than it has.",
        "It has no default: which is best depends on the target, and on whether it was trained for"
        " it.",
    )
    k_matrix: Any = option(
        None,
        anything("rows like [[5,10],[0,10]]", as_k_matrix),
        "Who drafts how much for whom, like [[5,10],[0,10]] for a draft model and MaG.",
        "Lists or a tensor, n x n: what each level asks of those below it, see"
        " `fastspec.drafters.CascadeDrafter`. It determines num_speculative_tokens. By default"
        " {usual}, for a draft model and MaG: of those tried, the fastest with the bundled pair,"
        " greedily.",
        usual=((1, 14), (0, 0)),
    )
    lenience: float = option(
        1.0,
        FACTOR,
        "How much the drafts of a cascade forgive each other; the target forgives nothing.",
        "The output is exact whatever it is; above 1 the target accepts fewer of the drafts, and"
        " gets them sooner.",
    )
    mag_surplus: bool = option(
        False,
        BOOL,
        "A cascade's MaG writes at least 10 tokens at a time and up to 19, as the published one.",
        "Whatever k_matrix says, it goes on until it has 10, and keeps all of a second copy that"
        " goes beyond them, which k_matrix does not count; the target gets such a piece last,"
        " always. So it judges more tokens, in fewer passes. `fastspec.csd` does so.",
    )
    tree_width: int | None = option(
        None,
        integer(1, MAX_TREE_NODES),
        "Children of a node at most; by default {usual}.",
        usual=4,
    )
    tree_nodes: int | None = option(
        None,
        integer(1, MAX_TREE_NODES),
        "Nodes of a tree at most, without its root; by default {usual}. Its depth is K.",
        "Greedy drafts make a tree of the highest cumulative draft probability; sampled drafts one"
        " of a fixed, balanced shape. suffix and eagle3 draft chains where no option of trees is"
        " given.",
        usual=16,
    )
    tree_paths: Sequence[Sequence[int]] | None = option(
        None,
        anything("a list of lists of ranks like [[0],[1],[0,0]]", as_tree_paths),
        "A fixed shape, like [[0],[1],[0,0]]: ranks among siblings on the way to each node.",
        "Ranks count from 0; at most 127 nodes, no deeper than num_speculative_tokens. Not beside"
        " tree_width and tree_nodes.",
    )
    tree_prompt_lookup: bool = option(
        False,
        BOOL,
        "One branch of the tree is copied by prompt lookup; with greedy drafts only.",
        "It counts among tree_nodes.",
    )
    tree_suffix: int = option(
        0,
        integer(0, MAX_TREE_NODES - 1),
        "One branch of the tree is copied as suffix copies: how many of tree_nodes it may take; 0 ="
        " none.",
        "The draft model drafts the other branches, no deeper than num_speculative_tokens, and all"
        " are judged in one pass; a copy may be longer. Sampled trees draw the copied tokens with"
        " the others, nearly always first, and stay exact. The suffix_* options apply. Not beside"
        " tree_paths, tree_prompt_lookup and suffix_tokens.",
    )
    cape: bool = option(
        False,
        BOOL,
        "Add siblings to the chain of a draft model where it is unsure (CaPE).",
        "In the published form, draft_sample_method greedy, the chain is the most probable one. Of"
        " probabilistic, requests that sample have it drawn, and siblings without replacement.",
    )
    cape_bins: Sequence[tuple[float, int]] | None = option(
        None,
        anything("pairs like [[0.5,3],[1,0]]", as_cape_bins),
        "Up to which probability a token gets how many siblings, like [[0.5,3],[1,0]].",
        "By default {usual}.",
        usual=((0.3, 7), (0.6, 5), (0.8, 3), (1, 1)),
    )
    confidence_threshold: float | None = option(
        None,
        SHARE,
        "End a chain of a draft model once the product of its tokens' probabilities is below this.",
        "Exact: the token that brings it below is still proposed. A pass of the draft model is"
        " saved where it would seldom pay; greedy drafts are judged at temperature 1. On a GPU the"
        " host waits for each draft token.",
    )
    schedule: Any = option(
        "constant",
        SCHEDULE,
        "constant (K in every step), or adaptive: as many draft tokens as pay off, even none.",
        "heuristic is transformers' rule with an upper limit: it starts at K, then drafts one less"
        " after a step in which a draft token was rejected, else two more; at least 1, and never"
        " above num_speculative_tokens, for which memory is reserved, where transformers has no"
        " limit. In Python also an object with the methods of"
        " `fastspec.engine.schedule.Schedule`.",
        aliases=("num_assistant_tokens_schedule (Hugging Face)",),
    )
    step_costs: tuple[float, ...] | list[float] | None = option(
        None,
        STEP_COSTS,
        "adaptive: costs of steps with 0 to K draft tokens, in any unit; by default measured.",
        "Sampled requests must not depend on a clock: without step_costs, theirs are assumed.",
    )
    disable_by_batch_size: int | None = option(
        None,
        integer(1),
        "With more requests in a pass than this, draft nothing for greedy ones; by default draft.",
        "A pass over many rows costs more, so drafts may not pay where many share it. Sampled"
        " requests go on drafting: if their drafts depended on other requests, a seed would give"
        " another text. With rejection_sample_method coupled they stop too, as no draft changes"
        " their text.",
    )
    relaxed_acceptance: float = option(
        1.0,
        FACTOR,
        "LOSSY above 1: more is accepted, and the output no longer follows the target exactly.",
        "A proposal is kept while u * draft_prob < relaxed_acceptance * target_prob, so no token"
        " gets more than relaxed_acceptance times its probability. Greedy requests stay exact."
        " Chains and the standard rule only.",
    )
    synthetic_acceptance_rate: float | None = option(
        None,
        SHARE,
        "LOSSY, for benchmarks: accept each draft token with this probability, whatever it is.",
        "It is that of a token after accepted ones; the token after them is the target's own."
        " Steps cost what they always cost, so speed at a rate of acceptance can be measured"
        " before there is such a draft. Greedy requests too; chains and the standard rule only.",
    )
    num_assistant_tokens: InitVar[int | None] = None
    prompt_lookup_num_tokens: InitVar[int | None] = None

    def __post_init__(self, num_assistant_tokens, prompt_lookup_num_tokens):
        if prompt_lookup_num_tokens is not None:
            if self.method not in ("auto", "prompt_lookup"):
                name = "prompt_lookup_num_tokens"
                refuse(name, prompt_lookup_num_tokens, f"not for method {self.method!r}")
            object.__setattr__(self, "method", "prompt_lookup")
        method = method_named(self.method)
        self._take_alias("num_assistant_tokens", num_assistant_tokens)
        self._take_alias("prompt_lookup_num_tokens", prompt_lookup_num_tokens)
        self._refuse_other_methods_fields()
        super().__post_init__()
        least, most = self.lookup_lengths
        expected = f"at least prompt_lookup_min, {least}"
        require("prompt_lookup_max", self.prompt_lookup_max, most >= least, expected)
        self._check_cascade()
        fits = self.ngram_store == "request" or self.rejection_sample_method == "coupled"
        expected = "'request' unless rejection_sample_method is 'coupled'"
        require("ngram_store", self.ngram_store, fits, expected)
        fits = "exit_layer" not in method.fields or self.exit_layer is not None
        require("exit_layer", None, fits, "an int >= 1")
        check_trees(self)
        check_step_costs(self)
        if self.heterogeneous_vocab == "reencoding":
            is_chain = not (method.drafts_trees or method.sets_length or self.cape)
            fits = is_chain and self.draft_sample_method != "probabilistic"
            expected = "not 'reencoding' for trees, cascades, cape and probabilistic drafts"
            require("heterogeneous_vocab", self.heterogeneous_vocab, fits, expected)
        judges_chains = not self.drafts_trees and not self.cape
        fits = judges_chains and self.rejection_sample_method == "standard"
        factor, rate = self.relaxed_acceptance, self.synthetic_acceptance_rate
        others = "for trees, and for block and coupled verification"
        require("relaxed_acceptance", factor, factor == 1 or fits, f"1 {others}")
        fits, expected = fits and factor == 1, f"None {others}, or beside relaxed_acceptance"
        require("synthetic_acceptance_rate", rate, rate is None or fits, expected)

    @classmethod
    def of(cls, value: "SpecConfig | str | Mapping[str, Any]") -> "SpecConfig":
        """The value, or what the name of a method or a mapping of fields says.

        Raises:
            ValueError: another type, an unknown field, or a value that is wrong.
        """
        return cls(value) if isinstance(value, str) else config_of("spec", value, cls)

    def for_repeated_prompts(self) -> "SpecConfig":
        """The same where prompts are decoded again, as benchmarks do: then earlier outputs, which
        `suffix` would copy, do not count unless its options say so."""
        name = "suffix_max_cached_tokens"
        if self._reads(name) and self.suffix_max_cached_tokens is None:
            return replace(self, suffix_max_cached_tokens=_FEWEST_SUFFIX_TOKENS)
        return self

    def num_draft_tokens(self, most: int | None = None) -> int:
        """K, most tokens of a proposal: num_model_tokens(most), or those of a copy if that is
        more."""
        return max(self.num_model_tokens(most), self.suffix_tokens or 0, self.tree_suffix)

    def num_model_tokens(self, most: int | None = None) -> int:
        """K without copies: as it is given, as a cascade's k_matrix has it, or else the usual one,
        and of that `most`."""
        if self.num_speculative_tokens is not None:
            return self.num_speculative_tokens
        if method_named(self.method).sets_length:
            return self._most_cascade_tokens
        usual = self.value_of("num_speculative_tokens")
        return min(usual, most or usual)

    def value_of(self, name: str) -> Any:
        """An option as it is given, or else its usual value with this method."""
        value = getattr(self, name)
        return options_of(type(self))[name].usual_for(self.method) if value is None else value

    @property
    def drafts_trees(self) -> bool:
        """Whether the options ask for token trees: the method, or one of their fields does."""
        fields = self.tree_width, self.tree_nodes, self.tree_paths
        is_asked = self.tree_prompt_lookup or self.tree_suffix > 0
        is_asked = is_asked or any(field is not None for field in fields)
        return is_asked or method_named(self.method).drafts_trees

    @property
    def is_lossy(self) -> bool:
        """Whether outputs need not follow the target: relaxed or synthetic acceptance."""
        return self.relaxed_acceptance != 1 or self.synthetic_acceptance_rate is not None

    @property
    def rule_beside(self) -> str:
        """The rejection_sample_method with which other drafters give a seed the same text."""
        return "coupled" if self.rejection_sample_method == "coupled" else "standard"

    @property
    def draws_drafts(self) -> bool:
        """Whether a draft model samples where the request does."""
        return self.draft_sample_method != "greedy"

    @property
    def cascade_matrix(self) -> KMatrix:
        """The k_matrix of a cascade, with its default."""
        return self.value_of("k_matrix")

    @property
    def _most_cascade_tokens(self) -> int:
        """Draft tokens that a cascade's k_matrix can lead to."""
        most = most_draft_tokens(self.cascade_matrix)
        if not self.mag_surplus:
            return most
        return max(most, min(most_draft_tokens(self.cascade_matrix, True), MAX_DRAFT_TOKENS))

    @property
    def lookup_lengths(self) -> tuple[int, int]:
        """The least and the most tokens that prompt lookup matches."""
        least = self.prompt_lookup_min or self.prompt_lookup_max
        least = least or self.value_of("prompt_lookup_min")
        return least, self.prompt_lookup_max or least

    @property
    def suffix_limits(self) -> tuple[float, float, int]:
        """The factor, the probability and the tokens of suffix decoding, with their defaults."""
        factor, least = map(self.value_of, ("suffix_max_spec_factor", "suffix_min_token_prob"))
        return factor, least, self.value_of("suffix_max_cached_tokens")

    @property
    def ngram_counts(self) -> tuple[int, int]:
        """The size of n-grams and how many fillers, with their defaults."""
        return self.value_of("ngram_size"), self.value_of("filler_top_k")

    def _take_alias(self, name: str, value: Any) -> None:
        """Take num_speculative_tokens by another of its names."""
        if value is None:
            return
        kind = options_of(type(self))["num_speculative_tokens"].kind
        require(name, value, kind.fits(value), kind.expected)
        count = self.num_speculative_tokens
        expected = f"num_speculative_tokens, {count!r}, or nothing"
        require(name, value, count in (None, value), expected)
        object.__setattr__(self, "num_speculative_tokens", value)

    def _reads(self, name: str) -> bool:
        """Whether the method, with its other options, reads one that not every method reads."""
        fields = method_named(self.method).fields
        if name in _LOOKUP_FIELDS and "tree_prompt_lookup" in fields:
            return self.tree_prompt_lookup
        if name in _SUFFIX_FIELDS and "suffix_tokens" in fields:
            return self.suffix_tokens is not None or bool(self.tree_suffix)
        return name in fields

    def _refuse_other_methods_fields(self) -> None:
        is_plain = not method_named(self.method).proposes
        for name in sorted(FIELDS_OF_METHODS | (FIELDS_OF_DRAFTS if is_plain else set())):
            value, default = getattr(self, name), options_of(type(self))[name].default
            if not self._reads(name) and value is not default and value != default:
                refuse(name, value, f"not for method {self.method!r}")
        fits = not is_plain or self.rejection_sample_method != "block"
        expected = f"'standard' or 'coupled' for method {self.method!r}"
        require("rejection_sample_method", self.rejection_sample_method, fits, expected)

    def _check_cascade(self) -> None:
        if not method_named(self.method).sets_length:
            return
        most, count = self._most_cascade_tokens, self.num_speculative_tokens
        if most > MAX_DRAFT_TOKENS:
            raise ValueError(
                f"k_matrix: it asks for up to {most} draft tokens, more than {MAX_DRAFT_TOKENS}"
            )
        expected = f"{most}, as k_matrix has it, or none"
        require("num_speculative_tokens", count, count in (None, most), expected)
