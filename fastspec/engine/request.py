"""A request while the engine runs it."""

from dataclasses import dataclass, field
from typing import Any

from fastspec.drafters.base import Request
from fastspec.engine.detokenizer import Detokenizer
from fastspec.engine.outputs import RequestOutput
from fastspec.engine.prefix_index import Content
from fastspec.engine.stats import SpecStats


@dataclass(eq=False)
class EngineRequest(Request):
    """Committed state of one request; everything in it ends at the same token.

    Attributes:
        public_id: the id that users see; the samples of one prompt share it.
        index: index of the sample.
        root: root of the samples' cached texts, so that only samples of this prompt find them.
        contents: contents of its leading blocks, as far as other requests may find them.
        prompt_index: index of its prompt among those of the call that waits for it.
        schedule_state: what the draft schedule remembers about the request.
        is_torn: whether a token is being appended, or the request ended; if that is still so in the
            next round, an interrupt has left it half done.
        has_ended: whether its output was posted.
    """

    public_id: str = ""
    index: int = 0
    root: Content | None = None
    detokenizer: Detokenizer | None = None
    contents: list[Content] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[dict[int, float]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, float] | None] = field(default_factory=lambda: [None])
    sources: list[str] = field(default_factory=list)
    drafters: list[str | None] = field(default_factory=list)
    stats: SpecStats = field(default_factory=SpecStats)
    prompt_index: int = 0
    schedule_state: Any = None
    is_torn: bool = False
    has_ended: bool = False

    def __post_init__(self):
        super().__post_init__()
        self.public_id = self.public_id or self.request_id

    @property
    def prompt_ids(self) -> list[int]:
        """Ids of the prompt, whether the encoder or the decoder reads them."""
        if self.encoder_input is not None:
            return self.encoder_input.token_ids
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Whether its prompt must be read with logits; the first sample does so for all."""
        is_wanted = self.params.prompt_logprobs is not None and self.index == 0
        return is_wanted and len(self.prompt_logprobs) < self.num_prompt_tokens

    def append(
        self,
        token_id: int,
        source: str,
        drafter: str | None,
        logprob: float | None,
        top_logprobs: dict[int, float] | None = None,
    ) -> str | None:
        """Commit one token; return the finish reason if it is the last one.

        If the tokenizer or a grammar raises, nothing is committed.
        """
        detokenizer, reason = self.detokenizer, None
        is_stop = token_id in self.stop_ids
        is_complete = not is_stop and self.rules is not None and self.rules.ends_text(token_id)
        if detokenizer is not None and (not is_stop or self.params.include_stop_str_in_output):
            detokenizer.push(token_id)
        if is_stop or is_complete or (detokenizer is not None and detokenizer.stopped):
            reason = "stop"
        elif len(self.token_ids) + 1 >= self.max_len:
            if detokenizer is not None:
                detokenizer.finish()  # held-back text may complete a stop string
            reason = "stop" if detokenizer is not None and detokenizer.stopped else "length"
        self.token_ids.append(token_id)
        self.sources.append(source)
        self.drafters.append(drafter)
        if logprob is not None:
            self.logprobs.append(logprob)
        if top_logprobs is not None:
            self.top_logprobs.append(top_logprobs)
        return reason

    def give_up_text(self) -> None:
        """Decode nothing more, because the tokenizer fails; the text so far stays."""
        if self.detokenizer is not None:
            self.detokenizer.stopped = True

    def output(
        self, finish_reason: str, error: str | None = None, is_request_error: bool = False
    ) -> RequestOutput:
        """Return the output for the user."""
        if self.detokenizer is not None:
            self.detokenizer.finish()
        return RequestOutput(
            request_id=self.public_id,
            index=self.index,
            prompt_token_ids=tuple(self.prompt_ids),
            token_ids=tuple(self.token_ids[self.num_prompt_tokens :]),
            text=self.detokenizer.text if self.detokenizer is not None else "",
            logprobs=None if self.params.logprobs is None else tuple(self.logprobs),
            top_logprobs=tuple(self.top_logprobs) if self.params.logprobs else None,
            prompt_logprobs=None
            if self.params.prompt_logprobs is None or self.index
            else tuple(self.prompt_logprobs),
            finish_reason=finish_reason,
            stop_reason=self._stop_reason() if finish_reason == "stop" else None,
            sources=tuple(self.sources),
            drafters=tuple(self.drafters),
            stats=self.stats,
            error=error,
            is_request_error=is_request_error,
        )

    def _stop_reason(self) -> str | int | None:
        if self.detokenizer is not None and self.detokenizer.stop_found is not None:
            return self.detokenizer.stop_found
        last = self.token_ids[-1]
        return last if last in (self.params.stop_token_ids or ()) else None
