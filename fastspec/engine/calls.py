"""Calls that wait for the events of their requests, whichever thread runs the steps."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fastspec.config import SamplingParams
from fastspec.engine.drafter_table import DrafterTable
from fastspec.engine.loop import Loop
from fastspec.engine.outputs import RequestOutput, StreamEvent, with_others
from fastspec.engine.prompts import Prompt, telling_which
from fastspec.engine.request import EngineRequest
from fastspec.engine.request_factory import RequestFactory
from fastspec.engine.turn import Turn
from fastspec.models.twin import TwinSource


@dataclass(eq=False)
class Calls:
    """Builds requests that an engine can run, and runs those of `generate` and `stream`.

    Attributes:
        turn: held by the thread that changes requests or runs a round.
        source: the target, if it was given as a loaded model.
    """

    factory: RequestFactory
    loop: Loop
    drafter_table: DrafterTable
    turn: Turn
    source: TwinSource | None

    def check_target(self) -> None:
        """Refuse a target that has changed, see `TwinSource`; not checked while requests run."""
        if self.source is not None and not self.loop.scheduler.has_unfinished:
            self.source.check_unchanged()

    def build(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str | None = None,
        decoder_input_ids: Sequence[int] | None = None,
    ) -> list[EngineRequest]:
        """Build the samples of a request, see `Engine.add_request`; the caller has the turn."""
        name = self.loop.new_id() if request_id is None else request_id
        samples = self.factory.build(prompt, params, name, decoder_input_ids)
        if (use := self.loop.use_of(name)) is not None:
            raise ValueError(f"request_id: {name!r} {use}")
        self.drafter_table.check_request(params)
        self.loop.scheduler.check_fits(samples[0])
        return samples

    def run(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        samples: list[dict[int, RequestOutput]],
    ) -> Iterator[StreamEvent]:
        """Yield the events of these prompts as they arrive, and put the outputs in `samples`.

        An error of a drafter is raised at the end, with the outputs attached.
        """
        request_ids: list[str] = []
        try:
            self._open(prompts, params, request_ids)
            num_left = sum(each.n for each in params)
            inboxes = [self.loop.inboxes[request_id] for request_id in request_ids]
            while num_left:
                while not any(inboxes):
                    with self.turn:
                        if not any(inboxes):
                            self.loop.round()
                for inbox in inboxes:
                    while inbox:
                        event = inbox.popleft()
                        if event.output is not None:
                            num_left -= event.index not in samples[event.prompt_index]
                            samples[event.prompt_index][event.index] = event.output
                        yield event
        finally:
            self.loop.abandoned.extend(request_ids)
            if not self.turn.is_mine:  # a stream collected as garbage during a step has to wait
                with self.turn:
                    self.loop.drop_abandoned()
        with self.turn:
            outputs = [with_others(each) for each in samples]
            self.drafter_table.raise_unreported_error(outputs)

    def _open(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], request_ids: list[str]
    ) -> None:
        """Queue requests whose events go to an inbox; first, put their ids in the empty list."""
        with self.turn:
            self.check_target()
            requests = []
            for place, pair in enumerate(zip(prompts, params, strict=True)):
                with telling_which(place, len(prompts)):
                    requests.append(self.build(*pair))
            request_ids += [samples[0].public_id for samples in requests]
            self.loop.inboxes |= {request_id: deque() for request_id in request_ids}
            for place, samples in enumerate(requests):
                for request in samples:
                    request.prompt_index = place
                    self.loop.add(request)
