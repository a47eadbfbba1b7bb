"""What the engine hands back."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from fastspec.engine.stats import SpecStats

_MOST_SHOWN = 40  # characters of a text in a repr


@dataclass(frozen=True, repr=False)
class RequestOutput:
    """A finished request, or one of its samples.

    Attributes:
        request_id: the id given to, or made by, add_request.
        prompt_token_ids: ids of the prompt.
        token_ids: new ids; an end-of-sequence or stop id is kept as the last one.
        text: the new text, by default without special tokens and ending before a stop string; ""
            without a tokenizer.
        logprobs: the target's log-probability of each new token, or None if not asked for.
        top_logprobs: for each new token, those of the best tokens at its place, best first, and its
            own; tokens that a filter leaves no probability are not there. None if not asked for.
        prompt_logprobs: the same for the tokens of the prompt, whatever temperature and filters;
            None for the first token. None if not asked for, and for all samples but the first.
        finish_reason: "stop", "length", "abort" or "error".
        sources: who wrote each token: "draft" (proposed and accepted), "recovered" (drawn after a
            rejection), "bonus" (drawn after full acceptance) or "target" (nothing was proposed).
        drafters: the name of the drafter of each "draft" token, else None.
        stats: counters of this request.
        error: why the request failed, when finish_reason is "error".
        index: of the sample, 0 to n - 1.
        others: the other samples, where they have ended together.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...] = ()
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[float, ...] | None = None
    finish_reason: str = "stop"
    sources: tuple[str, ...] = ()
    drafters: tuple[str | None, ...] = ()
    stats: SpecStats = field(default_factory=SpecStats)
    error: str | None = None
    top_logprobs: tuple[dict[int, float], ...] | None = None
    prompt_logprobs: tuple[dict[int, float] | None, ...] | None = None
    index: int = 0
    others: tuple["RequestOutput", ...] = field(default=(), repr=False)

    @property
    def outputs(self) -> tuple["RequestOutput", ...]:
        """All samples of the prompt, this one first."""
        return (self, *self.others)

    def __repr__(self) -> str:
        error = f", error={_short(self.error)}" if self.error is not None else ""
        others = f", {len(self.others)} more samples" if self.others else ""
        return (
            f"RequestOutput({self.request_id!r}, {len(self.prompt_token_ids)} prompt tokens,"
            f" {len(self.token_ids)} new ones, text={_short(self.text)},"
            f" finish_reason={self.finish_reason!r}{error}, stats={self.stats!r}{others})"
        )


@dataclass(frozen=True)
class Verdict:
    """What the target decided in one step about what was proposed for a request.

    Attributes:
        num_draft_tokens: proposals judged; of a tree, the tokens of its longest path.
        accepted_len: how many of them were accepted; -1 = the logits were not finite.
        output_ids: the accepted tokens and one more.
        logprobs: of output_ids, or None when nobody asked.
        extra_source: who wrote the last of output_ids, see `RequestOutput.sources`.
        token_ids: of a tree's nodes; the first is the root, the last token committed before.
        parents: the node that each follows; -1 for the root and where there is no token.
        path: the nodes that were accepted, from the root down, without it.
        top_logprobs: the best tokens at the place of each of output_ids, where they are wanted.
    """

    num_draft_tokens: int
    accepted_len: int
    output_ids: list[int]
    logprobs: list[float] | None
    extra_source: str
    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    path: tuple[int, ...] = ()
    top_logprobs: list[dict[int, float]] = field(default_factory=list)


@dataclass(frozen=True, repr=False)
class StreamEvent:
    """One committed token of a request, or its end.

    `text` may be empty while a character or a possible stop string is incomplete, and then holds
    the text of several tokens; the texts of all events of a request joined are its
    RequestOutput.text. `logprob` and `top_logprobs` of the token are as there. The last event of a
    request carries its `output`, and no token. The first event of a step that proposed a token tree
    carries that and what was accepted of it. Where n > 1, `index` says which sample the event is
    of, and each sample has a last event; `prompt_index` is the place of its prompt in a `stream`.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...] = ()
    source: str | None = None
    drafter: str | None = None
    output: RequestOutput | None = None
    tree: Verdict | None = None
    logprob: float | None = None
    top_logprobs: dict[int, float] | None = None
    index: int = 0
    prompt_index: int = 0

    def __repr__(self) -> str:
        given = {
            "token_ids": self.token_ids or None,
            "source": self.source,
            "drafter": self.drafter,
            "index": self.index or None,
            "prompt_index": self.prompt_index or None,
            "output": self.output,
        }
        fields = "".join(f", {name}={v!r}" for name, v in given.items() if v is not None)
        tree = f", tree of {len(self.tree.token_ids)} nodes" if self.tree is not None else ""
        return f"StreamEvent({self.request_id!r}, {_short(self.text)}{fields}{tree})"


def first_mismatch(token_ids: Sequence[int], others: Sequence[int]) -> int:
    """Leading places that agree."""
    pairs = zip(token_ids, others, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _short(text: str) -> str:
    return repr(text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…")
