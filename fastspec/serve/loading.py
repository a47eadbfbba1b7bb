"""The engine of a server, with every drafter that requests may choose."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastspec.config import EngineConfig, SpecConfig
from fastspec.config.checks import require
from fastspec.config.methods import drafts_of, methods

if TYPE_CHECKING:
    from fastspec.engine.engine import Engine


@dataclass(frozen=True)
class ServedEngine:
    """What an engine is made of, here or in another process.

    Attributes:
        draft: as --draft names it.
        others: methods beside that of `spec`, as `extra_specs` gives them.
        chat_template: in the place of the tokenizer's own.
        threads: of its process; None = as many as torch chooses.
    """

    target: str
    draft: str | None
    spec: SpecConfig
    config: EngineConfig
    others: dict[str, SpecConfig]
    chat_template: str | None = None
    threads: int | None = None

    def load(self) -> "Engine":
        """The engine; ValueError where it cannot be made."""
        import torch  # slow, and what only checks options needs neither

        from fastspec.engine.engine import Engine

        if self.threads is not None:
            torch.set_num_threads(self.threads)
        drafts = drafts_of(self.draft, self.spec.method)
        engine = Engine(self.target, drafts, spec=self.spec, config=self.config)
        if self.chat_template is not None:
            if engine.tokenizer is None:
                raise ValueError("chat_template: the target has no tokenizer")
            engine.tokenizer.chat_template = self.chat_template
        own = engine.drafter.name if engine.drafter is not None else None
        for name, spec in self.others.items():
            if name != own:
                drafts = drafts_of(self.draft, name) if methods()[name].needs_draft else None
                engine.add_drafter(name, spec, drafts)
        return engine


def extra_specs(names: str, spec: SpecConfig) -> dict[str, SpecConfig]:
    """Methods beside that of a server, with commas between their names; their K is its own.

    Raises:
        ValueError: a name that is none, or auto, which names no drafter.
    """
    known = tuple(name for name in methods() if name != "auto")
    given = dict.fromkeys(name.strip() for name in names.split(",") if name.strip())
    for name in given:
        require("methods", name, name in known, f"one of {known}")
    return {
        name: SpecConfig(
            name,
            None if name == "cascade" else spec.num_speculative_tokens,
            schedule=spec.schedule,
            disable_by_batch_size=spec.disable_by_batch_size,
        )
        for name in given
        if name not in (spec.method, "none")
    }
