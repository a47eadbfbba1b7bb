"""How drafts are made and verified."""

from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, replace
from pathlib import Path
from typing import Any

from fastspec.config.checks import is_int, refuse, require
from fastspec.config.k_matrix import (
    MAX_DRAFT_TOKENS,
    KMatrix,
    as_k_matrix,
    check_cascade,
    most_cascade_tokens,
)
from fastspec.config.methods import (
    BUILT_IN,
    FIELDS_OF_DRAFTS,
    FIELDS_OF_METHODS,
    LOOKUP_FIELDS,
    SUFFIX_FIELDS,
    TREE_FIELDS,
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
    config_of,
    documented,
    integer,
    option,
    options_of,
)
from fastspec.config.schedules import SCHEDULE, STEP_COSTS, check_step_costs
from fastspec.config.token_trees import MAX_TREE_NODES, as_cape_bins, as_tree_paths, check_trees

_FEWEST_SUFFIX_TOKENS = 2
_EXPECTED_TOKENS = f"an int from 1 to {MAX_DRAFT_TOKENS} (for plain decoding use method none)"
_COPY_MATRIX = ((4, 0), (0, 1))  # of a cascade whose first level is a copy of the target


@documented
@dataclass(frozen=True)
class SpecConfig(Options):
    """How drafts are made and verified.

    A field that is None is not given and has its method's default; a value that is given is used or
    refused, never ignored.
    """

    method: str = option(
        "auto",
        Kind("a name of a method", lambda value: isinstance(value, str)),
        f"Drafting method: {', '.join(method.name for method in BUILT_IN)}.",
        "auto uses a draft model if one is given. none refuses every option that applies only to"
        " drafts, except num_speculative_tokens; without a draft model, auto keeps them for"
        " enable_spec_dec, except cape, suffix_tokens, heterogeneous_vocab and draft_bits, which"
        " need a draft model and are refused without one.",
    )
    num_speculative_tokens: int | None = option(
        None,
        replace(integer(1, MAX_DRAFT_TOKENS), expected=_EXPECTED_TOKENS),
        "K, tokens proposed in each step; by default {usual}, with cascade set by k_matrix.",
        "With suffix_tokens it limits the draft model; a copy may be longer. Method none, which"
        " refuses the other drafting options, keeps it for later drafters: one that"
        " enable_spec_dec turns on, or the --methods of a server.",
        aliases=(
            "num_assistant_tokens (Hugging Face)",
            "prompt_lookup_num_tokens (Hugging Face; also chooses prompt_lookup)",
            "n_spec_tokens (Colossal-Inference, in enable_spec_dec)",
        ),
        flags=("--num-speculative-tokens", "-k"),
        usual={"": 5, "suffix": 24, "mtp": 3, "dflash": 15},
    )
    draft_sample_method: str | None = option(
        None,
        choice("probabilistic", "greedy"),
        "How a draft model chooses tokens: probabilistic (default) or greedy; both are exact.",
        "probabilistic samples from the draft model's own distribution with the request's"
        " parameters; greedy takes its argmax and verifies it as a point mass.",
    )
    heterogeneous_vocab: str | None = option(
        None,
        choice("intersection", "reencoding"),
        "How a draft model with another tokenizer drafts: only shared tokens (intersection), or"
        " text that is re-encoded (reencoding, greedy drafts); by default chosen automatically.",
        "Both are exact. The intersection is chosen unless fewer than half of all runs of"
        " num_speculative_tokens tokens of ordinary text consist of shared tokens, and always for"
        " trees, cascades, CaPE and if draft_sample_method is given as probabilistic; `engine.spec`"
        " shows what was chosen.",
    )
    rejection_sample_method: str = option(
        "standard",
        choice("standard", "block", "coupled"),
        "Verify draft tokens one by one (standard) or as whole prefixes (block), or draw by"
        " position (coupled); all are exact.",
        "block accepts at least as many on average, but reads the rows once more. With coupled, a"
        " sampled text depends only on its seed: it is the same with any drafter, any number of"
        " draft tokens, or none. Draft models use the same noise as the target, so their drafts are"
        " accepted nearly as often as with standard; cascades do not, and lose more. At temperature"
        " 0 all are the same.",
    )
    prompt_lookup_min: int | None = option(
        None, integer(1), "Minimum match length for a copy, in tokens; by default {usual}.", usual=5
    )
    prompt_lookup_max: int | None = option(
        None,
        integer(1),
        "Maximum match length, in tokens; by default prompt_lookup_min.",
        "The longest match is used. If only one of the two is given, it sets both.",
    )
    bigram_path: str | Path | None = option(
        None,
        PATH,
        "Bigram table; by default bigram.json in the target's folder, if it exists.",
        "A JSON list whose entry i is the id that follows token i. Without a table, drafts are only"
        " copied.",
        flags=("--bigram",),
    )
    ngram_size: int | None = option(
        None,
        integer(2, 64),
        "Length of the longest n-grams that are counted, in tokens; by default {usual}.",
        usual=4,
    )
    filler_top_k: int | None = option(
        None,
        integer(1, 1024),
        "Number of the target's top tokens to count at each verified position; by default {usual}.",
        "1 counts only the text itself.",
        usual=3,
    )
    ngram_one_level: bool = option(
        False, BOOL, "Count only n-grams of exactly ngram_size tokens, none that are shorter."
    )
    ngram_store: str = option(
        "request",
        choice("request", "engine"),
        "Count n-grams per request (request) or over all requests of the engine (engine).",
        "engine keeps what is learnt across prompts, in a table of fixed size. It needs"
        " rejection_sample_method coupled, with which a text depends only on its seed: otherwise"
        " the drafts of a request would be correlated with its draws if an earlier one had the same"
        " seed.",
    )
    ngram_guesses: bool = option(
        False,
        BOOL,
        "Propose an arbitrary token instead of none where nothing is known.",
        "The choice depends only on the preceding tokens.",
    )
    suffix_tokens: int | None = option(
        None,
        integer(1, MAX_DRAFT_TOKENS),
        "With a draft model, copy up to this many tokens where the text repeats itself; by default"
        " none.",
        "Where a copy is expected to yield at least one accepted token, it is proposed and the"
        " draft model does not run; elsewhere the draft model proposes num_speculative_tokens. The"
        " suffix_* options apply. A schedule limits what the draft model proposes, not the copies;"
        " without a draft model use method suffix.",
    )
    suffix_max_spec_factor: float | None = option(
        None,
        POSITIVE,
        "Maximum length of a suffix copy as a multiple of the match length; by default {usual}.",
        "For method suffix, suffix_tokens and tree_suffix.",
        usual=2.0,
    )
    suffix_min_token_prob: float | None = option(
        None,
        SHARE,
        "End a suffix copy where a smaller share of the matches continues the same way; by default"
        " {usual}.",
        "For method suffix, suffix_tokens and tree_suffix.",
        usual=0.1,
    )
    suffix_max_cached_tokens: int | None = option(
        None,
        integer(_FEWEST_SUFFIX_TOKENS),
        "Number of tokens of earlier outputs, and of a corpus, kept for suffix copies; by default"
        " {usual} each.",
        "For method suffix, suffix_tokens and tree_suffix. The oldest are dropped first. 500000"
        " tokens take up to 100 MB.",
        usual=500_000,
    )
    exit_layer: int | None = option(
        None,
        integer(1),
        "Number of the target's first layers that draft, fewer than it has.",
        "There is no default: the best number depends on the target, and on whether it was trained"
        " for early exit.",
    )
    draft_bits: int | None = option(
        None,
        Kind("4 or 8", lambda value: is_int(value) and value in (4, 8), int, int),
        "Bits of each weight of the draft model, or of the target's copy that drafts, on a CPU; by"
        " default {usual} for quantized.",
        "A draft model is otherwise run with the weights that it has. In a cascade, a copy of the"
        " target becomes the first level, and drafts that read the target's cache"
        " or hidden states (glide, eagle3, Gemma 4 assistants) read the copy's; k_matrix is then"
        " [[4,0],[0,1]] unless given. 8 bits are right for small models, whose drafts suffer from"
        " 4. Large ones draft almost as well with 4, at half the cost.",
        usual=8,
    )
    k_matrix: Any = option(
        None,
        anything("rows like [[5,10],[0,10]]", as_k_matrix),
        "Tokens each level requests from those below, like [[5,10],[0,10]] for a draft model and"
        " MaG.",
        "Lists or a tensor, n x n, see `fastspec.drafters.CascadeDrafter`. It determines"
        " num_speculative_tokens. By default {usual}, for a draft model and MaG: of those tried,"
        " the fastest with the bundled pair in greedy decoding.",
        usual=((1, 14), (0, 0)),
    )
    lenience: float = option(
        1.0,
        FACTOR,
        "How leniently the drafters of a cascade verify each other; the target is never lenient.",
        "The output is exact for any value; above 1 the target accepts fewer of the drafts, but"
        " gets them sooner.",
    )
    mag_surplus: bool = option(
        False,
        BOOL,
        "Let MaG write 10 to 19 tokens at a time, as the published one does.",
        "Regardless of k_matrix, MaG writes until it has 10 tokens and keeps all of a second copy"
        " that goes beyond them, which k_matrix does not count; the target always receives such a"
        " piece last. So it verifies more tokens, in fewer passes. `fastspec.csd` sets this.",
    )
    tree_width: int | None = option(
        None,
        integer(1, MAX_TREE_NODES),
        "Maximum number of children per node; by default {usual}.",
        usual=4,
    )
    tree_nodes: int | None = option(
        None,
        integer(1, MAX_TREE_NODES),
        "Maximum number of nodes per tree, not counting its root; by default {usual}. Its depth is"
        " K.",
        "Greedy drafts make the tree of the highest cumulative draft probability; sampled drafts"
        " one of a fixed, balanced shape. In a batch with any sampled drafts, all trees have the"
        " fixed shape. suffix, eagle3, mtp and gemma_assistant draft chains unless a tree option is"
        " given.",
        usual=16,
    )
    tree_paths: Sequence[Sequence[int]] | None = option(
        None,
        anything("a list of lists of ranks like [[0],[1],[0,0]]", as_tree_paths),
        "Fixed tree shape, like [[0],[1],[0,0]]: ranks among siblings on the path to each node.",
        "Ranks count from 0; up to 127 nodes, no deeper than num_speculative_tokens. Cannot be"
        " combined with tree_width or tree_nodes.",
    )
    tree_prompt_lookup: bool = option(
        False,
        BOOL,
        "Copy one branch of the tree by prompt lookup; with greedy drafts only.",
        "It counts towards tree_nodes.",
    )
    tree_suffix: int = option(
        0,
        integer(0, MAX_TREE_NODES - 1),
        "Number of tree_nodes that one branch may use for a copy, as method suffix makes it; 0 is"
        " none.",
        "The draft model drafts the other branches, no deeper than num_speculative_tokens, and all"
        " are verified in one pass; a copy may be longer. Sampled trees draw the copied tokens with"
        " the others, nearly always first, and stay exact. The suffix_* options apply. Cannot be"
        " combined with tree_paths, tree_prompt_lookup or suffix_tokens.",
    )
    cape: bool = option(
        False,
        BOOL,
        "Add siblings to a draft model's chain where it is unsure (CaPE).",
        "With draft_sample_method greedy, the published form, the chain takes the most probable"
        " tokens. With probabilistic, sampled requests draw the chain, and siblings without"
        " replacement.",
    )
    cape_bins: Sequence[tuple[float, int]] | None = option(
        None,
        anything("pairs like [[0.5,3],[1,0]]", as_cape_bins),
        "Siblings per token by upper bound of its probability, like [[0.5,3],[1,0]].",
        "By default {usual}.",
        usual=((0.3, 7), (0.6, 5), (0.8, 3), (1, 1)),
    )
    confidence_threshold: float | None = option(
        None,
        SHARE,
        "End a draft model's chain once the product of its tokens' probabilities is below this.",
        "Exact: the token that crosses the threshold is still proposed. Saves a pass of the draft"
        " model where it would seldom pay off; greedy drafts count their probabilities at"
        " temperature 1. On a GPU the host waits for each draft token.",
    )
    schedule: Any = option(
        "constant",
        SCHEDULE,
        "Draft tokens per step: constant (always K), adaptive (as many as pay off, even none) or"
        " heuristic (transformers' rule).",
        "heuristic is transformers' rule with an upper limit: it starts at K, then drafts one less"
        " after a step in which a draft token was rejected, else two more; at least 1, and never"
        " more than num_speculative_tokens, for which memory is reserved (transformers has no"
        " limit). In Python it may also be an object with the methods of"
        " `fastspec.engine.schedule.Schedule`.",
        aliases=("num_assistant_tokens_schedule (Hugging Face)",),
    )
    step_costs: tuple[float, ...] | list[float] | None = option(
        None,
        STEP_COSTS,
        "For adaptive: costs of steps with 0 to K draft tokens, in any unit; by default measured.",
        "Sampled requests must not depend on a clock: without step_costs, their costs are assumed.",
    )
    disable_by_batch_size: int | None = option(
        None,
        integer(1),
        "Do not draft for greedy requests in passes with more requests than this; off by default.",
        "A pass over many rows costs more, so drafts may not pay off in a large batch. Sampled"
        " requests are still drafted for: if their drafts depended on other requests, a seed could"
        " give another text. With rejection_sample_method coupled they stop as well, since no draft"
        " changes their text.",
    )
    relaxed_acceptance: float = option(
        1.0,
        FACTOR,
        "LOSSY above 1: accept more tokens; the output no longer follows the target exactly.",
        "A proposal is accepted while u * draft_prob < relaxed_acceptance * target_prob, so no"
        " token gets more than relaxed_acceptance times its probability. Greedy requests stay"
        " exact. Only for chains and the standard rule.",
    )
    synthetic_acceptance_rate: float | None = option(
        None,
        SHARE,
        "LOSSY, for benchmarks: accept each draft token with this probability, whatever it is.",
        "It is the rate for a token whose predecessors were accepted; the token after the last"
        " accepted one comes from the target. Steps cost the same as always, so the speed at an"
        " acceptance rate can be measured before such a draft exists. It also affects greedy"
        " requests; only for chains and the standard rule.",
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
        expected = f"at least prompt_lookup_min ({least})"
        require("prompt_lookup_max", self.prompt_lookup_max, most >= least, expected)
        if method.sets_length:
            check_cascade(self)
        fits = self.ngram_store == "request" or self.rejection_sample_method == "coupled"
        expected = "'request' unless rejection_sample_method is 'coupled'"
        require("ngram_store", self.ngram_store, fits, expected)
        if "exit_layer" in method.fields and self.exit_layer is None:
            raise ValueError(f"exit_layer: method {self.method!r} needs one")
        check_trees(self)
        check_step_costs(self)
        if self.heterogeneous_vocab == "reencoding":
            is_chain = not (self.drafts_trees or method.sets_length or self.cape)
            fits = is_chain and self.draft_sample_method != "probabilistic"
            expected = "not 'reencoding' for trees, cascades, cape and probabilistic drafts"
            require("heterogeneous_vocab", self.heterogeneous_vocab, fits, expected)

    @classmethod
    def of(cls, value: "SpecConfig | str | Mapping[str, Any]") -> "SpecConfig":
        """The value itself, or a config made from a method's name or a mapping of fields.

        Raises:
            ValueError: another type, an unknown field, or a value that is wrong.
        """
        return cls(value) if isinstance(value, str) else config_of("spec", value, cls)

    def for_repeated_prompts(self) -> "SpecConfig":
        """This config without copies of earlier outputs, unless asked for, as in benchmarks."""
        name = "suffix_max_cached_tokens"
        if self._reads(name) and self.suffix_max_cached_tokens is None:
            return replace(self, suffix_max_cached_tokens=_FEWEST_SUFFIX_TOKENS)
        return self

    def num_draft_tokens(self, most: int | None = None) -> int:
        """K, the most tokens of a proposal: num_model_tokens(most), or those of a longer copy."""
        return max(self.num_model_tokens(most), self.suffix_tokens or 0, self.tree_suffix)

    def num_model_tokens(self, most: int | None = None) -> int:
        """K without copies: as given, by a cascade's k_matrix, or the usual one, up to `most`."""
        if self.num_speculative_tokens is not None:
            return self.num_speculative_tokens
        if method_named(self.method).sets_length:
            return most_cascade_tokens(self)
        usual = self.value_of("num_speculative_tokens")
        return min(usual, most or usual)

    def value_of(self, name: str) -> Any:
        """An option's given value, or else its usual value with this method."""
        value = getattr(self, name)
        return options_of(type(self))[name].usual_for(self.method) if value is None else value

    @property
    def drafts_trees(self) -> bool:
        """Whether token trees are drafted, because of the method or of one of the tree options."""
        are_usual = all(map(self.is_default, TREE_FIELDS))
        return not are_usual or method_named(self.method).drafts_trees

    @property
    def is_lossy(self) -> bool:
        """Whether outputs may deviate from the target: relaxed or synthetic acceptance."""
        return self.relaxed_acceptance != 1 or self.synthetic_acceptance_rate is not None

    @property
    def rule_beside(self) -> str:
        """The rejection_sample_method that makes other drafters give the same text for a seed."""
        return "coupled" if self.rejection_sample_method == "coupled" else "standard"

    @property
    def draws_drafts(self) -> bool:
        """Whether a draft model samples when the request does."""
        return self.draft_sample_method != "greedy"

    @property
    def copies_target(self) -> bool:
        """Whether the first level of a cascade is a copy of the target."""
        return self.method == "cascade" and self.draft_bits is not None

    @property
    def bits_of_draft_model(self) -> int | None:
        """Bits of each weight of a draft model; None = those that it has."""
        packs = method_named(self.method).takes_draft and not self.copies_target
        return self.draft_bits if packs else None

    @property
    def cascade_matrix(self) -> KMatrix:
        """The k_matrix of a cascade, or its default."""
        if self.copies_target and self.k_matrix is None:
            return _COPY_MATRIX
        return self.value_of("k_matrix")

    @property
    def lookup_lengths(self) -> tuple[int, int]:
        """The minimum and maximum match length of prompt lookup."""
        least = self.prompt_lookup_min or self.prompt_lookup_max
        least = least or self.value_of("prompt_lookup_min")
        return least, self.prompt_lookup_max or least

    @property
    def suffix_limits(self) -> tuple[float, float, int]:
        """The factor, probability and number of tokens for suffix decoding, or their defaults."""
        factor, least = map(self.value_of, ("suffix_max_spec_factor", "suffix_min_token_prob"))
        return factor, least, self.value_of("suffix_max_cached_tokens")

    @property
    def reads_target(self) -> str:
        """What the drafter reads from the target in addition to its text; empty = nothing."""
        if self.copies_target:
            return method_named("quantized").reads_target
        if self.method == "ngram" and self.value_of("filler_top_k") > 1:
            return "the target's top tokens (filler_top_k above 1)"
        return method_named(self.method).reads_target

    def _take_alias(self, name: str, value: Any) -> None:
        """Set num_speculative_tokens by an alias."""
        if value is None:
            return
        kind = options_of(type(self))["num_speculative_tokens"].kind
        require(name, value, kind.fits(value), kind.expected)
        count = self.num_speculative_tokens
        expected = f"None or num_speculative_tokens ({count!r})"
        require(name, value, count in (None, value), expected)
        object.__setattr__(self, "num_speculative_tokens", value)

    def _reads(self, name: str) -> bool:
        """Whether the method, given its other options, uses one that not every method uses."""
        fields = method_named(self.method).fields
        if name in LOOKUP_FIELDS and "tree_prompt_lookup" in fields:
            return self.tree_prompt_lookup
        if name in SUFFIX_FIELDS and "suffix_tokens" in fields:
            return self.suffix_tokens is not None or bool(self.tree_suffix)
        return name in fields

    def _refuse_other_methods_fields(self) -> None:
        is_plain = not method_named(self.method).proposes
        for name in sorted(FIELDS_OF_METHODS | (FIELDS_OF_DRAFTS if is_plain else set())):
            if not self._reads(name) and not self.is_default(name):
                is_of_vllm = self.method == "ngram" and name in LOOKUP_FIELDS
                hint = " (vLLM's is prompt_lookup here)" if is_of_vllm else ""
                refuse(name, getattr(self, name), f"not for method {self.method!r}{hint}")
        fits = not is_plain or self.rejection_sample_method != "block"
        expected = f"'standard' or 'coupled' for method {self.method!r}"
        require("rejection_sample_method", self.rejection_sample_method, fits, expected)
