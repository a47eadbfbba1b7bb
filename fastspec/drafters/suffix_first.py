"""Drafts by copying where the text repeats itself, and by a draft model elsewhere."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from fastspec.config import SpecConfig
from fastspec.drafters.base import Batch, Drafter, Proposal, Request, TreeProposer
from fastspec.drafters.context import DrafterPlan
from fastspec.drafters.draft_model import DraftModelDrafter, draft_model_of
from fastspec.drafters.suffix import SuffixDrafter
from fastspec.drafters.tree.copied import put_point_masses
from fastspec.models.reduced_vocabulary import DraftVocabulary
from fastspec.models.transfer import device_tensor, padded_tensor

_VECTOR = 16  # columns


class SuffixFirst:
    """Runs a draft model only for the requests whose text has no likely copy.

    A copy costs no pass, and is accepted further than what a draft model of any size guesses. The
    choice depends only on the text, and each proposal is verified against the distribution it was
    drawn from, so output stays exact. A schedule learns from the model's own drafts alone.

    Args:
        model: drafts chains or trees.
        copies: drafts the copies.
        num_model_tokens: maximum tokens that the model drafts on a path.
        num_copied: maximum tokens of a copy.
        draws: whether the model samples for sampled requests, so that its proposals have logits.
    """

    copies_texts = True
    _is_tree = False

    def __init__(
        self,
        model: Drafter,
        copies: SuffixDrafter,
        num_model_tokens: int,
        num_copied: int,
        draws: bool,
    ):
        self.name = model.name
        draft = draft_model_of(model)
        assert draft is not None
        self.draft = draft
        self.reads_target = draft.reads_target
        self._vocabulary = draft.vocabulary
        # For proposals without the model: one column, plus those for copied tokens.
        token_0 = torch.zeros(1, dtype=torch.int64, device=draft.runner.device)
        self._least_vocabulary = DraftVocabulary(draft.vocabulary.size, token_0)
        self.model, self.num_model_tokens = model, num_model_tokens
        self._copies, self._num_copied = copies, num_copied
        self._draws = draws

    def add_corpus(self, texts: Iterable[Sequence[int]]) -> None:
        """Add texts to copy from, as token ids."""
        self._copies.add_corpus(texts)

    def propose(self, batch: Batch) -> Proposal:
        wanted = batch.num_draft_tokens
        copied: dict[int, Sequence[int]] = {}  # by place in the batch
        for place, (request, num) in enumerate(zip(batch.requests, wanted, strict=True)):
            most = min(num, self._num_copied)
            if copy := self._copies.find_copy(request, most, batch.is_coupled):
                copied[place] = copy
        asked = [
            None if place in copied else min(num, self.num_model_tokens)
            for place, num in enumerate(batch.num_model_tokens or wanted)
        ]
        depths = [num or 0 for num in asked]
        proposal = self._drafted(batch, depths) if any(depths) else self._nothing(batch)
        if proposal.draft_logits is not None:
            columns = self._with_columns(proposal.draft_logits, proposal.draft_token_map, copied)
            proposal = replace(proposal, draft_logits=columns[0], draft_token_map=columns[1])
        if copied:
            proposal = self._with_copies(proposal, copied, batch)
        return replace(proposal, num_asked=asked)

    def commit(self, batch: Batch, accepted: list[int]) -> None:
        self.model.commit(batch, accepted)

    def release(self, request: Request) -> None:
        self.model.release(request)
        self._copies.release(request)

    def _drafted(self, batch: Batch, depths: list[int]) -> Proposal:
        """Return the model's proposal for the requests with a depth, with counts and writers."""
        num, nodes = min(batch.num_speculative_tokens, self.num_model_tokens), depths
        if self._is_tree:
            most = cast(TreeProposer, self.model).max_nodes(num)
            room = zip(batch.max_nodes, depths, strict=True)
            nodes = [min(free, most) if depth else 0 for free, depth in room]
        own = replace(batch, num_draft_tokens=depths, max_nodes=nodes, num_speculative_tokens=num)
        proposal = self.model.propose(own)
        if proposal.draft_logits is None and self._has_logits(batch):  # it had no room for a token
            return replace(self._nothing(batch), passes=proposal.passes)
        counts = nodes if proposal.num_tokens is None else proposal.num_tokens
        writers = proposal.writers or [[self.name] * count for count in counts]
        return replace(proposal, num_tokens=counts, writers=writers)

    def _has_logits(self, batch: Batch) -> bool:
        """Whether the model's proposals for this batch have logits."""
        return self._draws and not batch.all_greedy and not batch.is_coupled

    def _nothing(self, batch: Batch) -> Proposal:
        """Return an empty proposal that is verified by the same rule as the model's own.

        Another rule would give another text for a seed, so the text would depend on which other
        requests are in the batch.
        """
        num, device = len(batch.requests), batch.device
        is_tree = self._is_tree
        rule, draft_logits = "target_only" if is_tree else None, None
        token_map = None
        if self._has_logits(batch):
            draft_logits = torch.zeros((num, int(is_tree), 1), dtype=torch.bfloat16, device=device)
            token_map = self._least_vocabulary.token_map
            rule = "without_replacement" if is_tree else None
        token_ids = torch.empty((num, 0), dtype=torch.int32, device=device)
        return Proposal(
            token_ids,
            parents=token_ids if is_tree else None,
            draft_logits=draft_logits,
            num_tokens=[0] * num,
            sibling_rule=rule,
            writers=[[] for _ in range(num)],
            draft_token_map=token_map,
        )

    def _with_copies(
        self, proposal: Proposal, copied: dict[int, Sequence[int]], batch: Batch
    ) -> Proposal:
        """Put copies in the rows of some requests; chains are widened to K columns, so that kernels
        are compiled for few widths."""
        token_ids, parents, device = proposal.token_ids, proposal.parents, batch.device
        lengths = [len(copy) for copy in copied.values()]
        most = batch.num_speculative_tokens
        width = most if parents is None else max(token_ids.shape[1], *lengths)
        missing = width - token_ids.shape[1]
        token_ids = pad(token_ids, (0, missing), value=-1)
        parents = None if parents is None else pad(parents, (0, missing), value=-1)
        draft_logits, token_map = proposal.draft_logits, proposal.draft_token_map
        if draft_logits is not None:
            draft_logits = pad(draft_logits, (0, 0, 0, missing))
        counts, writers = list(proposal.num_tokens or ()), list(proposal.writers or ())
        for place, copy in copied.items():
            token_ids[place] = padded_tensor([copy], width, device)[0]
            if draft_logits is not None:
                nodes = torch.arange(len(copy), device=device)[None]
                ids = token_ids[place, None, : len(copy)]
                put_point_masses(draft_logits[place, None], nodes, ids, token_map)
            if parents is not None:
                parents[place] = padded_tensor([range(len(copy))], width, device)[0]
            counts[place], writers[place] = len(copy), [self._copies.name] * len(copy)
        return replace(
            proposal,
            token_ids=token_ids,
            parents=parents,
            draft_logits=draft_logits,
            num_tokens=counts,
            writers=writers,
        )

    def _with_columns(
        self, logits: Tensor, token_map: Tensor | None, copied: dict[int, Sequence[int]]
    ) -> tuple[Tensor, Tensor | None]:
        """Return logits [B, N, V'] with added columns for copied tokens that lack one; their map.

        Rows are padded to whole vectors, so columns for other requests' copies change no bit of
        their sums. Without a map, a draft model may lack the last tokens of its target.
        """
        count, device = logits.shape[2], logits.device
        copies = {token for copy in copied.values() for token in copy}
        if token_map is None:
            least = max(count, 1 + max(copies, default=0))
        else:
            is_own = token_map is self._vocabulary.token_map
            vocabulary = self._vocabulary if is_own else self._least_vocabulary
            new = sorted(token for token in copies if not vocabulary.knows(token))
            least = count + len(new)
            if new:
                token_map = token_map.clone()
                columns = torch.arange(count, least, dtype=torch.int32, device=device)
                token_map[device_tensor(new, torch.int64, device)] = columns
        width = min(self._vocabulary.size, -(-least // _VECTOR) * _VECTOR)
        if width > count:
            logits = pad(logits, (0, width - count), value=-torch.inf)
        return logits, token_map


class SuffixFirstTrees(SuffixFirst):
    """`SuffixFirst` with a drafter of trees; a copy is a tree of one branch."""

    _is_tree = True
    model: TreeProposer

    def max_nodes(self, num_speculative_tokens: int) -> int:
        """Return the maximum nodes of a tree whose paths may have that many tokens."""
        num = min(num_speculative_tokens, self.num_model_tokens)
        copied = min(num_speculative_tokens, self._num_copied)
        return max(copied, self.model.max_nodes(num))


def with_copies(plan: DrafterPlan, spec: SpecConfig) -> DrafterPlan:
    """Plan the plan's drafter combined with copies of the text, see `SuffixFirst`."""

    def drafter(target, block_manager) -> Drafter:
        model = plan.build(target, block_manager)
        if draft_model_of(model) is None:
            raise ValueError(f"suffix_tokens: needs a draft model, got drafter {model.name!r}")
        kind = SuffixFirstTrees if isinstance(model, TreeProposer) else SuffixFirst
        copies = SuffixDrafter(*spec.suffix_limits)
        sizes = spec.num_model_tokens(), spec.suffix_tokens or 0
        is_chain = isinstance(model, DraftModelDrafter)  # may be a user's with other options
        draws = model.is_probabilistic if is_chain else spec.draws_drafts
        return kind(model, copies, *sizes, draws)

    return replace(plan, build=drafter)
