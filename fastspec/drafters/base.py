"""What a drafter is: it proposes, and is told what was kept. It knows nothing of the verifier."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from fastspec.request import Batch, Request


@dataclass(frozen=True)
class Proposal:
    """Draft tokens of a batch, one chain or one tree for each request.

    Attributes:
        token_ids: [B, K] int32, -1 after the last proposal of a row, in a tree for no token.
        parents: [B, K] int32, None = chains. Node 0 of a tree is the last committed token, node
            i + 1 is token_ids[:, i], and parents[:, i] < i + 1 the node that it follows.
        draft_logits: logits that the tokens were sampled from under the request's own sampling
            parameters, V' at most the target's vocabulary: [B, K, V'], row i for token i of a
            chain; [B, K + 1, V'], row i for the tokens that follow node i of a tree. None when
            the tokens are point masses, that is picked by any rule that leaves no other choice
            (argmax, the k most likely, a match in the text).
        num_tokens: proposals in each row, for a drafter that knows them without waiting for the
            device: the target then reads no more than these. None = as many as were wanted.
        sibling_rule: of trees, and only of these: how tokens with the same parent were chosen, see
            `fastspec_kernels.verify_tree`.
        writers: who wrote each proposal, for a drafter with several parts; None = the drafter.
        passes: of each request, passes through each draft model in this step, by its name.
        on_judged: of chains: is told the target's logits [T, V], packed: num_rows[b] of each
            request, after its last committed token and after each proposal that was read.
    Raises:
        ValueError: a tree without its rule or of another shape than its tokens, or a rule alone.
    """

    token_ids: Tensor
    parents: Tensor | None = None
    draft_logits: Tensor | None = None
    num_tokens: list[int] | None = None
    sibling_rule: str | None = None
    writers: list[list[str]] | None = None
    passes: list[dict[str, int]] | None = None
    on_judged: Callable[[Tensor, list[int]], None] | None = None

    def __post_init__(self):
        if (self.parents is None) != (self.sibling_rule is None):
            expected = "None without parents" if self.parents is None else "the rule of the tree"
            raise ValueError(f"sibling_rule: expected {expected}, got {self.sibling_rule!r}")
        if self.parents is not None and self.parents.shape != self.token_ids.shape:
            shapes = f"{list(self.token_ids.shape)}, got {list(self.parents.shape)}"
            raise ValueError(f"parents: expected the shape of token_ids, {shapes}")


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


@runtime_checkable
class TreeProposer(Drafter, Protocol):
    """A drafter whose proposals hold more tokens than can be accepted of them.

    batch.num_draft_tokens[b] is then what there is room for; no path may have more tokens than
    batch.num_speculative_tokens and batch.requests[b].room.
    """

    def num_nodes(self, num_speculative_tokens: int) -> int:
        """Columns of a proposal at most, when the longest path may have that many tokens."""
        ...
