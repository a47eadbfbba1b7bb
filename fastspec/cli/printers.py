"""Requests run event by event, and how `fastspec generate` prints them."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import typer
from rich.console import Console, Group
from rich.text import Text
from rich.tree import Tree

from fastspec.cli.display import SourceWriter, beginning, legend, progress_bar
from fastspec.cli.errors import report
from fastspec.config import SamplingParams
from fastspec.config.files import json_line
from fastspec.engine.engine import Engine
from fastspec.engine.outputs import RequestOutput, StreamEvent, Verdict
from fastspec.engine.prompts import Prompt


@dataclass
class Transcript:
    """The text of one request in pieces, each with its writer, and the trees of its steps."""

    index: int
    prompt: str
    pieces: list[tuple[str, str]] = field(default_factory=list)
    trees: list[Verdict] = field(default_factory=list)
    output: RequestOutput | None = None

    def add(self, event: StreamEvent) -> None:
        """Append an event; the end of a text is attributed to the writer of its last token."""
        if event.text:
            last = self.pieces[-1][1] if self.pieces else "target"
            self.pieces.append((event.text, event.source or last))
        if event.tree is not None:
            self.trees.append(event.tree)
        if event.output is not None:
            self.output = event.output


def run_prompts(
    engine: Engine, prompts: Sequence[Prompt], params: SamplingParams
) -> Iterator[tuple[int, StreamEvent]]:
    """Run prompts batched, yielding each event with the index of its prompt.

    A prompt that the engine refuses ends at once with finish_reason "error"; the others run.
    """
    index_of = {}
    for index, prompt in enumerate(prompts):
        request_id = _request_id(index)
        try:
            engine.add_request(prompt, params, request_id)
        except ValueError as error:
            refused = RequestOutput(request_id, finish_reason="error", error=str(error))
            yield index, StreamEvent(request_id, "", output=refused)
        else:
            index_of[request_id] = index
    while engine.has_unfinished:
        for event in engine.step():
            yield index_of[event.request_id], event


def _request_id(index: int) -> str:
    return f"prompt-{index + 1}"


class JsonPrinter:
    """One JSON object per line."""

    streams = False

    def piece(self, transcript: Transcript, text: str) -> None:
        """Does nothing: an object is printed whole."""

    def finish(self, transcript: Transcript, output: RequestOutput) -> None:
        """Print a finished request."""
        record = {
            "request_id": output.request_id,
            "prompt": transcript.prompt,
            "text": output.text,
            "token_ids": output.token_ids,
            "sources": output.sources,
            "finish_reason": output.finish_reason,
            "error": output.error,
            "stats": output.stats.to_dict(),
        }
        for name in ("logprobs", "top_logprobs", "prompt_logprobs"):
            if (values := getattr(output, name)) is not None:
                record[name] = values
        typer.echo(json_line(record))


class TextPrinter:
    """Plain text, with a line before each if there are several; one alone may be streamed.

    Args:
        tokenizer: to draw trees with; None = trees are not drawn.
    """

    def __init__(
        self,
        num_prompts: int,
        show_sources: bool,
        streams: bool,
        tokenizer: Any = None,
    ):
        self.streams = streams
        self._num_prompts = num_prompts
        self._console = Console(highlight=False, soft_wrap=True)
        self._sources = SourceWriter(self._console) if show_sources else None
        self._tokenizer = tokenizer

    def piece(self, transcript: Transcript, text: str) -> None:
        """Print the piece that an event has just added to a text."""
        if self.streams and text:
            self._write(text, transcript.pieces[-1][1])
            sys.stdout.flush()

    def finish(self, transcript: Transcript, output: RequestOutput) -> None:
        """Print a finished request, or the end of one that was printed piece by piece."""
        if output.error is not None and not output.text:
            return
        if self._num_prompts > 1:
            place = f"prompt {transcript.index + 1} of {self._num_prompts}"
            typer.echo(f"--- {place}: {beginning(transcript.prompt)}")
        if not self.streams:
            for piece, source in transcript.pieces:
                self._write(piece, source)
        typer.echo("")
        if self._sources is not None:
            self._console.print(legend(output.sources))
        if self._tokenizer is not None:
            pictures = (self._picture(*pair) for pair in enumerate(transcript.trees, 1))
            self._console.print(Group(*pictures))

    def _write(self, piece: str, source: str) -> None:
        if self._sources is not None:
            self._sources.write(piece, source)
        else:
            typer.echo(piece, nl=False)

    def _picture(self, number: int, tree: Verdict) -> Tree:
        """A step: accepted tokens bold after +, rejected ones dimmed after -.

        The root is the last token committed before the step.
        """

        def shown(node: int) -> str:  # on one line, spaces and all
            return repr(self._tokenizer.decode([tree.token_ids[node]]))

        num_nodes = sum(parent >= 0 for parent in tree.parents)
        title = f"step {number}: {len(tree.path)} accepted of {num_nodes} nodes, after "
        branches = {0: Tree(Text.assemble(title, (shown(0), "bold")))}
        for node, parent in enumerate(tree.parents):
            if parent in branches:
                mark, style = ("+", "bold green") if node in tree.path else ("-", "dim")
                label = Text(f"{mark} {shown(node)}", style=style)
                branches[node] = branches[parent].add(label, guide_style=style)
        return branches[0]


def run_and_print(
    engine: Engine,
    prompts: Sequence[Prompt],
    texts: list[str],
    params: SamplingParams,
    printer: JsonPrinter | TextPrinter,
) -> list[RequestOutput]:
    """Run all prompts, printing each in its turn; an interrupt prints what there is of them."""
    max_tokens = params.max_tokens or 0  # the command line always has a number
    transcripts = [Transcript(index, text) for index, text in enumerate(texts)]
    num_printed = 0
    try:
        with progress_bar("tokens", live=not printer.streams) as bar:
            task = bar.add_task("generating", total=len(texts) * max_tokens)
            for index, event in run_prompts(engine, prompts, params):
                transcripts[index].add(event)
                bar.advance(task, len(event.token_ids))
                printer.piece(transcripts[index], event.text)
                if event.output is None:
                    continue
                bar.advance(task, max_tokens - len(event.output.token_ids))
                bar.stop()  # stdout may be the same terminal
                for transcript in transcripts[num_printed:]:
                    if transcript.output is None:
                        break
                    num_printed += 1  # first, so that an interrupt prints nothing twice
                    printer.finish(transcript, transcript.output)
                if event.output.error is not None:
                    report(f"prompt {index + 1}: {event.output.error.removeprefix('prompt: ')}")
                bar.start()
    except KeyboardInterrupt:
        for transcript in transcripts[num_printed:]:
            output = transcript.output or engine.abort(_request_id(transcript.index))
            if output is not None and output.token_ids:
                printer.finish(transcript, output)
        raise
    return [transcript.output for transcript in transcripts if transcript.output is not None]
