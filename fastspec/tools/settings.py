"""What commands pass to the tools: which models to use, what to time. Does not import torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastspec.config import EngineConfig, SamplingParams, SpecConfig
from fastspec.config.files import read_text
from fastspec.config.methods import method_named
from fastspec.config.options import (
    BOOL,
    PATH,
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
    """The models of an engine by name, in this or another process.

    Attributes:
        template: the text of the file chat_template, which another machine may not have.
    """

    target: str = option(
        "tiny",
        TEXT,
        'Target model: a folder, a .gguf file, a hub id, "smollm2" once fetched, or "tiny" for the'
        " bundled pair.",
        metavar="PATH_OR_ID",
    )
    draft: str | None = option(
        None,
        TEXT,
        "Draft model, best with the target's tokenizer; the bundled target has its own. For a"
        " cascade several, comma-separated, biggest first.",
        metavar="PATH_OR_ID",
    )
    threads: int | None = option(
        None, integer(1, 1024), "Number of CPU threads; by default as many as torch chooses."
    )
    chat_template: str | Path | None = option(
        None,
        PATH,
        "Jinja chat template to use instead of the tokenizer's own.",
        metavar="FILE",
    )
    template: str | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.chat_template is not None and self.template is None:
            text = read_text("chat_template", Path(self.chat_template))
            object.__setattr__(self, "template", text)

    def check(self, method: str) -> None:
        """Refuse a draft model that a method would not load."""
        if self.draft is not None and not method_named(method).takes_draft:
            raise ValueError(f"draft: --method {method} uses no draft model")

    def drafts(self, method: str) -> Any:
        """The drafter to pass to a method: a list of names for several draft models."""
        several = self.draft is not None and method_named(method).takes_several
        return str(self.draft).split(",") if several else self.draft

    def use_threads(self) -> None:
        """Set torch's number of threads, if one is given."""
        import torch

        if self.threads is not None:
            torch.set_num_threads(self.threads)

    def use_template(self, tokenizer: Any) -> None:
        """Give a tokenizer the chat template, if there is one."""
        if self.template is not None:
            if tokenizer is None:
                raise ValueError("chat_template: the target has no tokenizer")
            tokenizer.chat_template = self.template

    def engine(self, spec: SpecConfig, config: EngineConfig) -> "Engine":
        """An engine in this process; ValueError if it cannot be made."""
        from fastspec.engine.engine import Engine

        self.use_threads()
        engine = Engine(self.target, self.drafts(spec.method), spec=spec, config=config)
        self.use_template(engine.tokenizer)
        return engine


@documented
@dataclass(frozen=True)
class BenchConfig(Options):
    """What to time."""

    max_tokens: int = option(
        128, integer(1), "New tokens per prompt; end-of-sequence tokens do not end a text."
    )
    repeats: int = option(3, integer(1), "Timed rounds over all prompts; the median is used.")
    temperatures: tuple[float, ...] = option(
        (0.0, 1.0),
        listed("numbers like 0,1", options_of(SamplingParams)["temperature"].kind),
        "Comma-separated temperatures; 0 is greedy.",
    )
    peers: bool = option(
        True, BOOL, "Also time Hugging Face's decoding.", flags=("--peers/--no-peers",)
    )

    num_speculative_tokens: int | None = option(
        None,
        options_of(SpecConfig)["num_speculative_tokens"].kind,
        "Tokens proposed in each step, with the usual default; for a cascade, by its draft model in"
        " the run without MaG.",
        flags=("--num-speculative-tokens", "-k"),
    )
    counter_version: str | None = option(
        None,
        choice(*COSTS),
        "Cost table for CS-Drafting's SWI, by model name: model_parameters or previous_work; by"
        " default the models' parameter counts.",
    )

    def num_runs(self, num_prompts: int, num_methods: int) -> int:
        """Number of method calls that verify_outputs() and measure() make together."""
        rounds = 1 + self.repeats * len(self.temperatures)
        return rounds * num_prompts * num_methods
