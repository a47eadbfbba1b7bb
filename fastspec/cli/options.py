"""Flags: those that come from the declarations of the configs, and those that commands share."""

from collections.abc import Callable
from functools import partial, wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any

import typer

from fastspec.cli.errors import usage_errors
from fastspec.config import EngineConfig, SamplingParams, SpecConfig
from fastspec.config.files import parse_json
from fastspec.config.methods import Method, methods
from fastspec.config.options import Option, options_of
from fastspec.config.serve import ServeConfig
from fastspec.tools.tuned import load_tuned

_PANELS = {
    SamplingParams: "Sampling",
    SpecConfig: "Drafting",
    EngineConfig: "Engine",
    ServeConfig: "Server",
}
_FEW = 3  # methods that a help text names


class Flags:
    """Which options of a config a command offers: those named, or all but `without`.

    `defaults` take the place of the declared ones; options without a flag are set to theirs.
    """

    def __init__(self, *only: str, without: tuple[str, ...] = (), **defaults: Any):
        self.only = only
        self.without = without
        self.defaults = defaults

    def of(self, config: type) -> list[Option]:
        """The options of a config that become flags."""
        return [
            option
            for name, option in options_of(config).items()
            if option.kind.flag_type is not None
            and (name in self.only if self.only else name not in self.without)
        ]


def with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """The command with one flag for each option of its configs.

    Configs are the parameters that are annotated with `Flags`.
    """
    parameters: list[Parameter] = []
    configs: dict[str, tuple[type, list[Option], dict[str, Any]]] = {}
    known = methods()  # asked for once: it reads the metadata of every installed package
    for parameter in signature(command).parameters.values():
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

    @wraps(command)
    def run(**values: Any) -> None:
        with usage_errors():
            for name, (config, options, fixed) in configs.items():
                given = {option: values.pop(option.name) for option in options}
                read = {o.name: _read(o, value) for o, value in given.items() if value is not None}
                values[name] = config(**fixed, **read)
        command(**values)

    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    vars(run)["__signature__"] = Signature(parameters)
    return run


def _flag(config: type, option: Option, flags: Flags, known: dict[str, Method]) -> Parameter:
    takers = [name for name, method in known.items() if option.name in method.fields]
    prefix = f"{', '.join(takers)}: " if config is SpecConfig and 0 < len(takers) <= _FEW else ""
    default = flags.defaults.get(option.name, option.default)
    kind: Any = option.kind.flag_type
    is_json = kind == "json"
    declared = typer.Option(
        *option.flags,
        help=prefix + option.help,
        metavar="JSON" if is_json else None,
        rich_help_panel=_PANELS.get(config),
    )
    if default in (None, ()):
        kind, default = (str if is_json else kind) | None, None
    return Parameter(
        option.name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, declared]
    )


def _read(option: Option, value: Any) -> Any:
    """What a flag says; JSON is parsed."""
    if option.kind.flag_type != "json":
        return value
    return parse_json(value, f"{option.name}: expected {option.kind.expected}, {value!r:.60} is")


Target = Annotated[
    str,
    typer.Option(
        metavar="PATH_OR_ID",
        help='Target: a folder, a .gguf file, a hub id, "smollm2" once it has been fetched, or'
        ' "tiny" for the bundled pair.',
    ),
]
Draft = Annotated[
    str | None,
    typer.Option(
        metavar="PATH_OR_ID",
        help="Draft model, best with the target's tokenizer; the bundled target brings its own."
        " For a cascade several, biggest first, separated by commas.",
    ),
]
MaxTokens = Annotated[int, typer.Option(help="New tokens of each prompt at most.")]
OwnPrompts = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Prompts of your own, read as generate does.")
]
NumPrompts = Annotated[int, typer.Option(help="How many of the bundled held-out prompts to use.")]
NumMeasuredPrompts = Annotated[
    int,
    typer.Option("--num-prompts", help="How many of the bundled prompts, or of --dataset, to use."),
]
Chat = Annotated[
    bool,
    typer.Option(
        "--chat",
        help="Wrap each prompt in the tokenizer's chat template; the bundled prompts are questions"
        " then, programming tasks, texts to summarise and to edit.",
    ),
]
Dataset = Annotated[
    str | None,
    typer.Option(
        help="Prompts of mmlu, sampled_mmlu, gsm8k, hellaswag, mt_bench, humaneval or sharegpt;"
        " mmlu_vicuna and gsm8k_vicuna are in that model's form."
    ),
]
DatasetFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Its records, one JSON object a line or a JSON list; without it the package datasets"
        " downloads them.",
    ),
]
DatasetPrompts = Annotated[
    int | None,
    typer.Option("--num-prompts", help="How many prompts of --dataset, the first ones; else all."),
]
Threads = Annotated[
    int | None,
    typer.Option(min=1, max=1024, help="CPU threads; by default as many as torch chooses."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object, nothing else.")]


def _use_config(context: typer.Context, file: Path | None) -> Path | None:
    """Let a file of `fastspec tune` give the defaults of a command's options."""
    if file is None:
        return None
    try:
        tuned = load_tuned(file)
    except ValueError as error:
        raise typer.BadParameter(str(error).removeprefix("config: ")) from error
    drafting = {"draft": tuned.draft, **tuned.spec}
    known = {parameter.name for parameter in context.command.params}
    if unknown := set(drafting) - known:
        raise typer.BadParameter(f"--config: this command has no {', '.join(sorted(unknown))}")
    context.default_map = {
        "target": tuned.target,
        **{name: partial(_value, context, tuned.spec, value) for name, value in drafting.items()},
    }
    return file


def _value(context: typer.Context, spec: dict[str, Any], value: Any) -> Any:
    """A value of the file, but of its drafter nothing where --method names another one.

    Options that are given are read before those that are not.
    """
    method = spec.get("method", "auto")
    return value if context.params.get("method", method) == method else None


Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE.json",
        is_eager=True,
        callback=_use_config,
        help="Models and drafter from a file of fastspec tune; options given here override it.",
    ),
]
