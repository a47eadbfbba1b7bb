"""The file that `fastspec tune` writes: a target, a drafter, and how to use it."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fastspec.config import SpecConfig
from fastspec.config.files import read_json, write_whole
from fastspec.config.methods import method_named
from fastspec.config.options import options_of

_FORMAT = 1


@dataclass(frozen=True)
class TunedConfig:
    """The choice of `fastspec tune`.

    Attributes:
        target: a folder, a hub id, or "tiny".
        draft: the same for the draft model; None if the method needs none.
        spec: fields of SpecConfig that are given.
        step_costs: seconds of steps with 0 to num_speculative_tokens draft tokens, for
            SpecConfig(schedule="adaptive"); None if not all were measured.
        measured: the table the choice was made from, the machine and the versions.
    """

    target: str
    draft: str | None
    spec: dict[str, Any]
    step_costs: list[float] | None = None
    measured: dict[str, Any] = field(default_factory=dict)

    def spec_config(self, **changes: Any) -> SpecConfig:
        """As a SpecConfig, with changes.

        Raises:
            ValueError: a field out of range.
        """
        return SpecConfig(**{**self.spec, **changes})


def spec_fields(spec: SpecConfig) -> dict[str, Any]:
    """The fields of a SpecConfig to save: those that are given, and a cascade's k_matrix."""
    values = {name: getattr(spec, name) for name in options_of(SpecConfig)}
    if method_named(spec.method).sets_length:
        values["k_matrix"] = spec.cascade_matrix
    kept = {n: v for n, v in values.items() if v != options_of(SpecConfig)[n].default}
    return {n: str(v) if isinstance(v, Path) else v for n, v in kept.items()}


def save_tuned(config: TunedConfig, path: Path) -> None:
    """Write the file atomically: readers find the old one or the whole new one."""
    record = {"fastspec_config": _FORMAT, **asdict(config)}
    write_whole(json.dumps(record, indent=2) + "\n", path)


def load_tuned(path: Path) -> TunedConfig:
    """Read a file that `save_tuned` wrote.

    Raises:
        ValueError: no such file, or one that is cut off or has other content.
    """
    record = read_json("config", path)
    if not isinstance(record, dict) or record.get("fastspec_config") != _FORMAT:
        raise ValueError(f"config: {path} was not written by fastspec tune")
    target, draft, spec = (record.get(name) for name in ("target", "draft", "spec"))
    is_named = isinstance(target, str) and (draft is None or isinstance(draft, str))
    measured = record.get("measured", {})
    if (
        not is_named
        or not isinstance(measured, dict)
        or not isinstance(spec, dict)
        or not spec.keys() <= options_of(SpecConfig).keys()
    ):
        raise ValueError(f"config: {path} must contain a target, a draft and fields of SpecConfig")
    costs = record.get("step_costs")
    config = TunedConfig(str(target), draft, spec, costs, measured)
    paced = {} if costs is None else {"schedule": "adaptive", "step_costs": costs}
    try:
        config.spec_config(**paced)
    except ValueError as error:
        raise ValueError(f"config: {path}, {error}") from error
    return config
