"""The engine of a server, with every drafter that requests can choose."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastspec.config import EngineConfig, SpecConfig
from fastspec.config.checks import require_one_of
from fastspec.config.methods import method_named, methods
from fastspec.config.options import TEXT, Options, documented, option
from fastspec.tools.settings import Models

if TYPE_CHECKING:
    from fastspec.engine.engine import Engine


@documented
@dataclass(frozen=True)
class Choices(Options):
    """What a served engine has in addition to its models and its own method."""

    methods: str = option(
        "prompt_lookup,ngram",
        TEXT,
        "Comma-separated methods that requests can choose besides --method; they also use the K of"
        " --num-speculative-tokens. none can always be chosen.",
        metavar="NAMES",
    )

    def engine(self, models: Models, spec: SpecConfig, config: EngineConfig) -> "ServedEngine":
        """An engine to load, with its own drafter and those of other methods, by their names.

        Raises:
            ValueError: an unknown name, or auto, which names no drafter.
        """
        models.check(spec.method)
        known = [name for name, method in methods().items() if not method.chooses]
        names = [name.strip() for name in self.methods.split(",") if name.strip()]
        others = {}
        for name in names:
            require_one_of("methods", name, known)
            method = method_named(name)
            if method.proposes and name != spec.method:
                others[name] = SpecConfig(
                    name,
                    None if method.sets_length else spec.num_speculative_tokens,
                    schedule=spec.schedule,
                    disable_by_batch_size=spec.disable_by_batch_size,
                    rejection_sample_method=spec.rule_beside,
                )
        return ServedEngine(models, spec, config, others)


@dataclass(frozen=True)
class ServedEngine:
    """The parts of an engine, to load here or in another process.

    Attributes:
        others: specs of further methods, by name.
    """

    models: Models
    spec: SpecConfig
    config: EngineConfig
    others: dict[str, SpecConfig]

    def load(self) -> "Engine":
        """The engine; ValueError if it cannot be made."""
        engine = self.models.engine(self.spec, self.config)
        own = engine.drafter.name if engine.drafter is not None else None
        for name, spec in self.others.items():
            if name != own:
                drafts = self.models.drafts(name) if method_named(name).needs_draft else None
                engine.add_drafter(name, spec, drafts)
        return engine
