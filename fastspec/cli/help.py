"""Help texts in two plain columns, which fit 80 characters and cut off no name."""

from sys import maxsize
from typing import Any

from typer.core import TyperCommand, TyperGroup


class SectionedHelp(TyperCommand):
    """A command whose options are listed in the sections that they name as `rich_help_panel`."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            usual = "Arguments" if parameter.param_type_name == "argument" else "Options"
            title = getattr(parameter, "rich_help_panel", None) or usual
            if (record := parameter.get_help_record(ctx)) is not None:
                sections.setdefault(title, []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


class WholeSummaries(TyperGroup):
    """A group that lists its commands with the whole first sentence of each."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        commands = getattr(self, "commands", {})
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, each.get_short_help_str(maxsize)) for name, each in commands.items()]
            )
