"""Requests through the engine, event by event, for commands that show what happens."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from fastspec.config import SamplingParams
from fastspec.engine.engine import Engine
from fastspec.engine.outputs import RequestOutput, StreamEvent, Verdict
from fastspec.engine.prompts import Prompt
from fastspec.engine.stats import SpecStats


@dataclass
class Transcript:
    """The text of one request in pieces, each with who wrote it, and the trees of its steps."""

    index: int
    prompt: str
    pieces: list[tuple[str, str]] = field(default_factory=list)
    trees: list[Verdict] = field(default_factory=list)
    output: RequestOutput | None = None

    def add(self, event: StreamEvent) -> None:
        """Append an event; the end of a text counts as written by the writer of its last token."""
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
        request_id = f"prompt-{index + 1}"
        try:
            engine.add_request(prompt, params, request_id)
        except ValueError as error:
            yield index, StreamEvent(request_id, "", output=_refused(request_id, str(error)))
        else:
            index_of[request_id] = index
    while engine.has_unfinished:
        for event in engine.step():
            yield index_of[event.request_id], event


def run_one(
    engine: Engine, prompt: str, prompt_ids: list[int], params: SamplingParams
) -> Transcript:
    """Run one prompt, given as ids, to its end."""
    transcript = Transcript(0, prompt)
    for _, event in run_prompts(engine, [prompt_ids], params):
        transcript.add(event)
    return transcript


def _refused(request_id: str, error: str) -> RequestOutput:
    return RequestOutput(
        request_id=request_id,
        prompt_token_ids=(),
        token_ids=(),
        text="",
        logprobs=None,
        finish_reason="error",
        sources=(),
        drafters=(),
        stats=SpecStats(),
        error=error,
    )
