"""Trees of a draft model's tokens with a branch copied from texts."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import takewhile

from fastspec.drafters.base import Batch, Branch, Proposal, Request
from fastspec.drafters.draft_model import DraftModelDrafter
from fastspec.drafters.suffix import SuffixDrafter
from fastspec.drafters.tree.drafter import TreeDrafter, TreePlan
from fastspec.models.transfer import padded_tensor


class MixedTreeDrafter(TreeDrafter):
    """Drafts trees with a draft model, with a likely copy as a branch of each tree.

    Trees of most probable tokens contain the whole copy, as far as nodes allow. If siblings are
    drawn, the copied tokens are drawn nearly always (`CopiedPaths`), and end before one for which
    the draft model has no logits; if the model has no room for a token, nothing is copied either.

    Args:
        draft: the draft model, which reads the texts.
        plan: the form of the trees, without a fixed shape.
        copies: drafts the copies.
        num_tokens: maximum tokens that the model drafts on a path.
    """

    _plan: TreePlan

    def __init__(
        self, draft: DraftModelDrafter, plan: TreePlan, copies: SuffixDrafter, num_tokens: int
    ):
        super().__init__(draft, plan)
        self.copies_texts = True
        self._copies = copies
        self._num_tokens = num_tokens

    def add_corpus(self, texts: Iterable[Sequence[int]]) -> None:
        """Add texts to copy from, as token ids."""
        self._copies.add_corpus(texts)

    def propose(self, batch: Batch) -> Proposal:
        num = min(batch.num_speculative_tokens, self._num_tokens)
        own = replace(batch, num_speculative_tokens=num)
        is_drawn = self._plan.is_probabilistic and not batch.all_greedy
        is_verified_by_rows = is_drawn and not batch.is_coupled
        copies = [
            self._copy(request, wanted, batch.is_coupled, is_verified_by_rows)
            for request, wanted in zip(batch.requests, batch.num_draft_tokens, strict=True)
        ]
        tree = self._plan.start(own, copies if is_verified_by_rows else None)
        passes = self._grow(tree, own)
        if not is_verified_by_rows and any(copies):
            tree.add_branch(padded_tensor(copies, max(map(len, copies)), batch.device))
        branch = Branch(self._copies.name, copies)
        return replace(tree.proposal(), passes=passes, branch=branch)

    def release(self, request: Request) -> None:
        super().release(request)
        self._copies.release(request)

    def _copy(
        self, request: Request, wanted: int, is_coupled: bool, needs_columns: bool
    ) -> Sequence[int]:
        """Return the tokens for a branch of a request's tree, if likely enough."""
        most = min(wanted, self._plan.num_copied)
        copy = self._copies.find_copy(request, most, is_coupled)
        if not needs_columns:
            return copy
        if not self.draft.room(len(request.token_ids)):
            return ()
        return [*takewhile(self._has_column, copy)]

    def _has_column(self, token_id: int) -> bool:
        """Whether the draft model has logits for a token."""
        vocabulary = self.draft.vocabulary
        is_within = vocabulary.token_map is not None or token_id < self.draft.runner.vocab_size
        return is_within and vocabulary.knows(token_id)
