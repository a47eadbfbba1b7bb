"""Flags: those that come from the declarations of the configs, and those that commands share."""

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import MISSING
from functools import partial, wraps
from inspect import Parameter, Signature, signature
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import typer

from fastspec.cli.errors import note
from fastspec.config import EngineConfig, SamplingParams, SpecConfig
from fastspec.config.checks import require
from fastspec.config.files import check_can_write, parse_json, refuse_inputs
from fastspec.config.methods import Method, methods
from fastspec.config.options import Option, options_of
from fastspec.config.serve import ServeConfig
from fastspec.tools.tuned import TunedConfig, load_tuned

_PANELS = {
    SamplingParams: "Sampling",
    SpecConfig: "Drafting",
    EngineConfig: "Engine",
    ServeConfig: "Server",
}
# Of SamplingParams, where a run is measured, and its text is no more than what is timed.
FIXED_RUN: dict[str, Any] = {"temperature": 0.0, "seed": 0, "ignore_eos": True}
_STDIN = Path("/dev/stdin")  # the file that stdin is redirected from
_FEW = 3  # methods that a help text names


class Flags:
    """The options of a config that a command offers: those named, or all but `without`.

    `defaults` replace the declared ones; options without a flag are set to theirs. `shown` is what
    help texts have as the default of an option where that is None and stands for something else.
    """

    def __init__(
        self,
        *only: str,
        without: tuple[str, ...] = (),
        shown: dict[str, str] | None = None,
        **defaults: Any,
    ):
        self.only = only
        self.without = without
        self.shown = shown or {}
        self.defaults = defaults

    def of(self, config: type) -> list[Option]:
        """The options of a config that become flags."""
        return [
            option
            for name, option in options_of(config).items()
            if option.kind.flag_type is not None
            and (name in self.only if self.only else name not in self.without)
        ]


def command(function: Callable[..., None]) -> Callable[..., None]:
    """A command with one flag for each option of its configs.

    Configs are the parameters that are annotated with `Flags`.
    """
    parameters: list[Parameter] = []
    outputs: set[str] = set()
    configs: dict[str, tuple[type, list[Option], dict[str, Any]]] = {}
    known = methods()  # asked for once: it reads the metadata of every installed package
    for parameter in signature(function).parameters.values():
        flags = getattr(parameter.annotation, "__metadata__", (None,))[0]
        if isinstance(flags, Flags):
            config = parameter.annotation.__origin__
            offered = flags.of(config)
            names = {option.name for option in offered}
            fixed = {name: value for name, value in flags.defaults.items() if name not in names}
            configs[parameter.name] = config, offered, fixed
            parameters += [_flag(config, option, flags, known) for option in offered]
        else:
            parameters.append(parameter.replace(kind=Parameter.KEYWORD_ONLY))
            if getattr(flags, "callback", None) is _check_output:
                outputs.add(parameter.name)

    @wraps(function)
    def run(**values: Any) -> None:
        _refuse_inputs(outputs, values)
        _note_other_conditions(values)
        for name, (config, options, fixed) in configs.items():
            given = {option: values.pop(option.name) for option in options}
            read = {o.name: _read(o, value) for o, value in given.items() if value is not None}
            values[name] = config(**fixed, **read)
        function(**values)

    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    vars(run)["__signature__"] = Signature(parameters)
    return run


def _refuse_inputs(outputs: set[str], values: dict[str, Any]) -> None:
    """Refuse output files that the command also reads, or that are given twice."""
    inputs = [_STDIN]
    for name, value in values.items():
        if name == "target":
            inputs.append(Path(value))
        elif name not in outputs:
            several = value if isinstance(value, (list, tuple)) else [value]
            inputs += [file for file in several if isinstance(file, Path)]
    for name in outputs:
        if values[name] is not None:
            refuse_inputs(name, values[name], inputs)
    given = {name: values[name] for name in sorted(outputs) if values[name] is not None}
    for (name, file), (other, its_file) in combinations(given.items(), 2):
        is_same = file.resolve() == its_file.resolve() and (file.is_file() or not file.exists())
        require(name, str(file), not is_same, f"another file than for --{other.replace('_', '-')}")


def _note_other_conditions(values: dict[str, Any]) -> None:
    """Say that a file of `fastspec tune` is used for a target or dtype it was not tuned for."""
    file = values.get("config_file")
    if file is not None and file.is_file():  # a pipe has been read
        tuned, target = load_tuned(file), values["target"]
        if target != tuned.target:
            note(f"{file} was tuned for the target {tuned.target}, not for {target}")
        dtype, given = tuned.measured.get("dtype"), values.get("dtype")
        if None not in (dtype, given) and given != dtype:
            note(f"{file} was tuned with --dtype {dtype}, not {given}")


def _flag(config: type, option: Option, flags: Flags, known: dict[str, Method]) -> Parameter:
    takers = [name for name, method in known.items() if option.name in method.fields]
    prefix = f"{', '.join(takers)}: " if config is SpecConfig and 0 < len(takers) <= _FEW else ""
    default = flags.defaults.get(option.name, option.default)
    kind: Any = option.kind.flag_type
    metavar = "JSON" if kind == "json" else option.metavar
    if metavar is None and get_origin(kind) is list:  # one value each time that it is given
        metavar = f"<{get_args(kind)[0].__name__}>"
    declared = typer.Option(
        *option.flags,
        help=prefix + option.help,
        metavar=metavar,
        show_default=flags.shown.get(option.name, True),
        rich_help_panel=_PANELS.get(config),
    )
    if kind == "list":
        default = default and ",".join(map("{:g}".format, default))
    kind = str if kind in ("json", "list") else kind
    if default in (None, ()):
        kind, default = kind | None, None
    if default is MISSING:
        default = Parameter.empty
    return Parameter(
        option.name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, declared]
    )


def _read(option: Option, value: Any) -> Any:
    """The value of a flag; JSON is parsed, and so are comma-separated numbers."""
    if option.kind.flag_type == "list":
        return [_number(part.strip()) for part in value.split(",")]
    if option.kind.flag_type != "json":
        return value
    return parse_json(value, f"{option.name}: expected {option.kind.expected}, {value!r:.60} is")


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def output_file(help: str, metavar: str = "FILE", *flags: str) -> Any:
    """The declaration of a file that is written at the end, and must not be an input as well."""
    return typer.Option(*flags, metavar=metavar, help=help, callback=_check_output)


def _check_output(parameter: typer.CallbackParam, file: Path | None) -> Path | None:
    if file is not None:
        check_can_write(str(parameter.name), file)
    return file


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON only, one object per line.")]


def _use_config(context: typer.Context, file: Path | None) -> Path | None:
    """Let a file of `fastspec tune` give the defaults of a command's options."""
    if file is None:
        return None
    tuned = load_tuned(file)
    drafting = {"draft": tuned.draft, **tuned.spec}
    known = {parameter.name for parameter in context.command.params}
    if unknown := set(drafting) - known:
        raise ValueError(f"config: this command has no option {', '.join(sorted(unknown))}")
    context.default_map = {
        "target": tuned.target,
        **{name: partial(_value, context, tuned.spec, value) for name, value in drafting.items()},
    }
    if "step_costs" in known:
        context.default_map["step_costs"] = partial(_step_costs, context, tuned)
    return file


def _value(context: typer.Context, spec: dict[str, Any], value: Any) -> Any:
    """A value of the file, but nothing about its drafter if --method names another one.

    Options that are given are read before those that are not.
    """
    method = spec.get("method", "auto")
    return value if context.params.get("method", method) == method else None


def _step_costs(context: typer.Context, tuned: TunedConfig) -> str | None:
    """The step costs of the file as JSON, if the schedule needs them and they are the drafter's."""
    given, costs = context.params, tuned.step_costs
    file = {"target": tuned.target, "draft": tuned.draft, "method": tuned.spec.get("method")}
    is_same = all(given.get(name, value) == value for name, value in file.items())
    if costs is None or given.get("schedule") != "adaptive" or not is_same:
        return None
    num = given.get("num_speculative_tokens") or len(costs) - 1
    return json.dumps(costs[: num + 1]) if 0 < num < len(costs) else None


Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE.json",
        is_eager=True,
        callback=_use_config,
        help="File from fastspec tune with models and drafter; other options override it.",
    ),
]
