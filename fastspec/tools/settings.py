"""What the tools are told by commands: which models, what to time. It imports no torch."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastspec.config import EngineConfig, SamplingParams, SpecConfig
from fastspec.config.methods import method_named
from fastspec.config.options import (
    BOOL,
    TEXT,
    Options,
    choice,
    documented,
    integer,
    listed,
    option,
    options_of,
)
from fastspec.tools.cost_counters import COSTS

if TYPE_CHECKING:
    from fastspec.engine.engine import Engine


@documented
@dataclass(frozen=True)
class Models(Options):
    """The models of an engine by name, here or in another process."""

    target: str = option(
        "tiny",
        TEXT,
        'Target: a folder, a .gguf file, a hub id, "smollm2" once it has been fetched, or "tiny"'
        " for the bundled pair.",
        metavar="PATH_OR_ID",
    )
    draft: str | None = option(
        None,
        TEXT,
        "Draft model, best with the target's tokenizer; the bundled target brings its own. For a"
        " cascade several, biggest first, separated by commas.",
        metavar="PATH_OR_ID",
    )
    threads: int | None = option(
        None, integer(1, 1024), "CPU threads; by default as many as torch chooses."
    )

    def check(self, method: str) -> None:
        """Refuse a draft model that a method would not load."""
        if self.draft is not None and not method_named(method).takes_draft:
            raise ValueError(f"draft: --method {method} uses no draft model")

    def drafts(self, method: str) -> Any:
        """What a method is given as its drafter: of several draft models a list of names."""
        several = self.draft is not None and method_named(method).takes_several
        return str(self.draft).split(",") if several else self.draft

    def use_threads(self) -> None:
        """Let torch have as many as are asked for."""
        import torch

        if self.threads is not None:
            torch.set_num_threads(self.threads)

    def engine(self, spec: SpecConfig, config: EngineConfig) -> "Engine":
        """An engine of this process; ValueError where it cannot be made."""
        from fastspec.engine.engine import Engine

        self.use_threads()
        return Engine(self.target, self.drafts(spec.method), spec=spec, config=config)


@documented
@dataclass(frozen=True)
class BenchConfig(Options):
    """What is timed."""

    max_tokens: int = option(
        128, integer(1), "New tokens of each prompt; end-of-sequence tokens do not end a text."
    )
    repeats: int = option(3, integer(1), "Timed rounds over all prompts; the median counts.")
    temperatures: tuple[float, ...] = option(
        (0.0, 1.0),
        listed("numbers like 0,1", options_of(SamplingParams)["temperature"].kind),
        "Comma-separated list; 0 is greedy.",
    )
    peers: bool = option(
        True, BOOL, "Time Hugging Face's decoding as well.", flags=("--peers/--no-peers",)
    )

    num_speculative_tokens: int | None = option(
        None,
        options_of(SpecConfig)["num_speculative_tokens"].kind,
        "Tokens proposed in each step, by default as elsewhere; of a cascade, by its draft model in"
        " the run without MaG.",
        flags=("--num-speculative-tokens", "-k"),
    )
    counter_version: str | None = option(
        None,
        choice(*COSTS),
        "Costs of CS-Drafting's SWI by the names of the models, model_parameters or previous_work;"
        " by default the numbers of their parameters.",
    )

    def num_runs(self, num_prompts: int, num_methods: int) -> int:
        """Calls of a method that verify_outputs() and measure() make together."""
        rounds = 1 + self.repeats * len(self.temperatures)
        return rounds * num_prompts * num_methods
