"""What a drafter is: it proposes, and is told what was kept. It knows nothing of the verifier."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from fastspec.config.checks import is_int
from fastspec.request import Batch, Request

_SIBLING_RULES = ("target_only", "without_replacement", "with_replacement")


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
        ValueError: a tree without its rule, or a rule alone.
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


def check_proposal(proposal: Any, batch: Batch, vocab_size: int) -> None:
    """Refuse what a drafter must not propose, as far as that shows without reading the tokens.

    Raises:
        ValueError: the field, what the protocol expects there and what the drafter gave.
    """
    if not isinstance(proposal, Proposal):
        raise ValueError(f"propose: expected a Proposal, got {type(proposal).__name__}")
    num_requests, num = len(batch.requests), batch.num_speculative_tokens
    is_chain = proposal.parents is None
    width = num if is_chain else getattr(proposal.token_ids, "shape", [0])[-1]
    shape = (num_requests, width)
    _check_tensor("token_ids", proposal.token_ids, shape, {torch.int32}, batch)
    if not is_chain:
        _check_tensor("parents", proposal.parents, shape, {torch.int32}, batch)
        if proposal.sibling_rule not in _SIBLING_RULES:
            expected = f"one of {_SIBLING_RULES}"
            raise ValueError(f"sibling_rule: expected {expected}, got {proposal.sibling_rule!r}")
        if proposal.on_judged is not None:
            raise ValueError("on_judged: expected None for trees")
    if proposal.draft_logits is not None:
        columns = getattr(proposal.draft_logits, "shape", [0])[-1]
        rows = (num_requests, width if is_chain else width + 1, columns)
        floats = {torch.float32, torch.bfloat16, torch.float16}
        _check_tensor("draft_logits", proposal.draft_logits, rows, floats, batch)
        if not 1 <= columns <= vocab_size:
            expected = f"at most the target's {vocab_size} columns"
            raise ValueError(f"draft_logits: expected {expected}, got {columns}")
    counts = batch.num_draft_tokens
    if (num_tokens := proposal.num_tokens) is not None:
        if len(num_tokens) != num_requests or not all(is_int(n) and n >= 0 for n in num_tokens):
            raise ValueError(f"num_tokens: expected {num_requests} ints >= 0, got {num_tokens!r}")
        counts = [min(pair) for pair in zip(counts, num_tokens, strict=True)]
    if (writers := proposal.writers) is not None:
        lengths = [len(names) for names in writers]
        least = [min(count, width) for count in counts]
        if len(lengths) != num_requests or any(a < b for a, b in zip(lengths, least, strict=True)):
            raise ValueError(f"writers: expected names of {least} tokens, got {lengths}")
    if (passes := proposal.passes) is not None and len(passes) != num_requests:
        raise ValueError(f"passes: expected those of {num_requests} requests, got {len(passes)}")


def _check_tensor(
    name: str, value: Any, shape: tuple[int, ...], dtypes: set[torch.dtype], batch: Batch
) -> None:
    if not isinstance(value, Tensor):
        raise ValueError(f"{name}: expected a tensor, got {type(value).__name__}")
    if tuple(value.shape) != shape:
        raise ValueError(f"{name}: expected shape {list(shape)}, got {list(value.shape)}")
    if value.dtype not in dtypes:
        expected = " or ".join(sorted(str(dtype) for dtype in dtypes))
        raise ValueError(f"{name}: expected {expected}, got {value.dtype}")
    if value.device != batch.device:
        raise ValueError(f"{name}: expected a tensor on {batch.device}, got {value.device}")


@runtime_checkable
class Drafter(Protocol):
    """Anything that proposes tokens; `name` is shown as the writer of the accepted ones.

    Where a method raises, or a proposal is not of the documented form, the engine decodes that step
    plainly, releases the requests, hands the error to the caller once, and asks again in the next
    step.
    """

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
