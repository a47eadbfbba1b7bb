"""CS-Drafting: drafters that review each other, the biggest closest to the target."""

import time
from collections.abc import Sequence

from fastspec.config.k_matrix import as_k_matrix
from fastspec.drafters.base import Batch, Proposal, Request
from fastspec.drafters.cascade.draft import Draft, stacked_logits
from fastspec.drafters.cascade.levels import Level
from fastspec.models.transfer import padded_tensor


class CascadeDrafter:
    """A vertical and horizontal cascade of drafters.

    Row 0 of k_matrix says what the target gets to verify: k_matrix[0][0] tokens of the first level,
    then k_matrix[0][1] of the second, and so on. Row r + 1 says the same for level r, which then
    does not write but reviews what the levels below it write: it keeps the tokens it accepts and
    adds one of its own. Levels write whole pieces, so one may give more than asked for, and the
    next one gives correspondingly less. A level whose own row is all zero, or that is the last,
    writes. The last level, if it copies, always writes k_matrix[-1][-1] tokens at a time, or only
    the missing ones if that is 0. The published MaG writes 10, which is that entry in all its
    examples, and up to 19: with SpecConfig.mag_surplus ours does the same, in addition to what
    k_matrix counts, and always writes last for the target, even if the levels above it have reached
    their totals.

    A model's review of a sampled request is speculative sampling with the model as target, so the
    tokens follow exactly its distribution, which the real target verifies them against. With
    lenience above 1 a model keeps more than its distribution allows (a greedy draft x stays while
    lenience * prob(x) > the prob its writer gave it); the target then treats each draft as a point
    mass, which is exact whatever came before. A greedy request's output never depends on lenience.
    The published code compares with the probabilities of the last piece written, mostly MaG's and
    therefore 1, so lenience rarely has an effect there; here it applies as the rule says, and with
    a weak second draft model it costs target passes.

    Args:
        levels: drafters, biggest first.
        k_matrix: n x n for n levels, lists or a tensor, upper triangular.
        lenience: between levels, >= 1; the target always verifies exactly.
        vocab_size: the target's vocabulary size.
        probabilistic: False makes every draft greedy.
    Attributes:
        seconds: wall time by level.
    Raises:
        ValueError: k_matrix does not fit the levels.

    Source: Chen et al., "Cascade Speculative Drafting for Even Faster LLM Inference",
    arXiv 2312.11462.
    """

    name = "cascade"

    def __init__(
        self,
        levels: Sequence[Level],
        k_matrix: object,
        lenience: float = 1.0,
        *,
        vocab_size: int,
        probabilistic: bool = True,
    ):
        self._levels = list(levels)
        self._k_matrix = as_k_matrix(k_matrix)
        self._check_levels()
        self._keeps_logits = lenience == 1
        self._vocab_size = vocab_size
        self._probabilistic = probabilistic
        self.copies_texts = any(getattr(level, "copies_texts", False) for level in levels)
        self.reads_target = any(getattr(level, "reads_target", False) for level in levels)
        self.seconds = {level.name: 0.0 for level in self._levels}

    def propose(self, batch: Batch) -> Proposal:
        drafts = []
        for request, wanted in zip(batch.requests, batch.num_draft_tokens, strict=True):
            # The draft must end before the last position of the model with the fewest positions.
            rooms = [level.room(len(request.token_ids)) for level in self._levels]
            is_greedy = not self._probabilistic or request.params.temperature == 0
            drafts.append(Draft(request, min(wanted, *rooms), is_greedy))
        self._fill(0, drafts, batch)
        tokens = [draft.tokens for draft in drafts]
        ids = [[token.token_id for token in row] for row in tokens]
        width = batch.num_speculative_tokens
        draft_logits = None
        if self._keeps_logits:
            draft_logits = stacked_logits(tokens, width, self._vocab_size)
        return Proposal(
            padded_tensor(ids, width, batch.device),
            draft_logits=draft_logits,
            num_tokens=[len(row) for row in tokens],
            writers=[[token.writer for token in row] for row in tokens],
            passes=[draft.passes for draft in drafts],
        )

    def commit(self, batch: Batch, accepted: list[int]) -> None:
        for level in self._levels:
            level.commit(batch, accepted)

    def release(self, request: Request) -> None:
        for level in self._levels:
            level.release(request)

    def _fill(self, row: int, drafts: list[Draft], batch: Batch) -> None:
        """Let the levels from `row` on write, one after the other, what row `row` asks for."""
        goals = [draft.num_counted for draft in drafts]
        for number, wanted in enumerate(self._k_matrix[row][row:], start=row):
            goals = [goal + wanted for goal in goals]
            if row == 0 and wanted and self._levels[number].piece:  # the target always gets one
                least = [draft.num_counted + 1 for draft in drafts]
                goals = [max(pair) for pair in zip(goals, least, strict=True)]
            pending = list(zip(drafts, goals, strict=True)) if wanted else []
            while pending := [(draft, goal) for draft, goal in pending if draft.lacks(goal)]:
                before = [len(draft.tokens) for draft, _ in pending]
                lacking = [goal - draft.num_counted for draft, goal in pending]
                self._add(number, [draft for draft, _ in pending], lacking, batch)
                grown = zip(pending, before, strict=True)
                pending = [pair for pair, num in grown if len(pair[0].tokens) > num]

    def _add(self, number: int, drafts: list[Draft], lacking: list[int], batch: Batch) -> None:
        """Add one piece by one level to each draft, as a review of the levels below or its own."""
        level, starts = self._levels[number], [len(draft.tokens) for draft in drafts]
        below, at_once = self._k_matrix[number + 1 : number + 2], self._k_matrix[-1][-1]
        reviews = level.can_review and any(map(any, below))
        if reviews:
            self._fill(number + 1, drafts, batch)
        begin = time.perf_counter()
        if reviews:
            level.review(drafts, starts, batch)
            for draft in drafts:
                for other in self._levels:
                    length = len(draft.request.token_ids) + draft.num_unchanged
                    other.shorten(draft.request, length)
        else:
            if number == len(self._levels) - 1 and not level.can_review and at_once:
                lacking = [at_once] * len(drafts)
            room = [draft.num_draft_tokens - len(draft.tokens) for draft in drafts]
            level.write(drafts, [min(pair) for pair in zip(lacking, room, strict=True)], batch)
        self.seconds[level.name] += time.perf_counter() - begin

    def _check_levels(self) -> None:
        size, num_levels = len(self._k_matrix), len(self._levels)
        if size != num_levels:
            names = [level.name for level in self._levels]
            raise ValueError(
                f"k_matrix: it is {size} x {size}, but the cascade has {num_levels} levels: {names}"
            )
        for number, level in enumerate(self._levels[:-1]):
            if not level.can_review and any(self._k_matrix[number + 1]):
                raise ValueError(
                    f"k_matrix: row {number + 1} belongs to {level.name}, which copies and cannot"
                    f" review: expected zeros, got {self._k_matrix[number + 1]}"
                )
