"""What a drafter is: it proposes, and is told what was kept. It knows nothing of the verifier."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from fastspec.request import Batch, Request


@dataclass(frozen=True)
class Proposal:
    """Draft tokens of a batch.

    Attributes:
        token_ids: [B, K] int32, -1 after the last proposal of a row.
        parents: token trees are not supported yet; None = a chain.
        draft_logits: [B, K, V'] logits that each token was sampled from under the request's own
            sampling parameters, V' at most the target's vocabulary; None when the tokens are point
            masses, that is picked by any rule that leaves no other choice (argmax, a match in the
            text).
        num_tokens: proposals in each row, for a drafter that knows them without waiting for the
            device: the target then reads no more than these. None = as many as were wanted.
    """

    token_ids: Tensor
    parents: Tensor | None = None
    draft_logits: Tensor | None = None
    num_tokens: list[int] | None = None


@runtime_checkable
class Drafter(Protocol):
    """Anything that proposes tokens; `name` is shown as the writer of the accepted ones."""

    name: str

    def propose(self, batch: Batch) -> Proposal:
        """Propose up to batch.num_draft_tokens[b] tokens after each request's committed tokens."""
        ...

    def commit(self, batch: Batch, accepted: list[int]) -> None:
        """The requests hold their new tokens; accepted[b] of them were proposed in this step."""
        ...

    def release(self, request: Request) -> None:
        """The request has ended or lost its blocks: forget what was cached for it."""
        ...
