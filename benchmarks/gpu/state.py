"""What a GPU run has done so far, kept in its output folder."""

import datetime
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

DONE, FAILED, UNFINISHED, SKIPPED, NOT_RUN = "done", "failed", "unfinished", "skipped", "not run"


@dataclass
class Outcome:
    """How a step ended."""

    status: str
    seconds: float = 0.0
    detail: str = ""
    date: str = field(
        default_factory=lambda: datetime.datetime.now(datetime.timezone.utc).isoformat(
            timespec="seconds"
        )
    )


class State:
    """Outcomes by step name, written to state.json at each change."""

    def __init__(self, folder: Path):
        self.path = folder / "state.json"
        text = self.path.read_text(encoding="utf-8") if self.path.exists() else "{}"
        self.outcomes = {name: Outcome(**value) for name, value in json.loads(text).items()}

    def is_done(self, name: str) -> bool:
        return name in self.outcomes and self.outcomes[name].status == DONE

    def set(self, name: str, outcome: Outcome) -> None:
        self.outcomes[name] = outcome
        self._write()

    def forget(self, name: str) -> None:
        self.outcomes.pop(name, None)
        self._write()

    def _write(self) -> None:
        """A run killed while it writes leaves the old file."""
        values = {name: asdict(outcome) for name, outcome in self.outcomes.items()}
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
        new.replace(self.path)
