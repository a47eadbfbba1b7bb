"""A cascade's draft for one request so far, with the probability of each token."""

from collections import Counter
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

import torch
from torch import Tensor

from fastspec.drafters.base import CASCADE_STREAM, Batch, Request
from fastspec.models.transfer import device_tensor
from fastspec_kernels import uniform

_DRAW_SHIFT = 32  # positions are below 2**32, so the draw's number goes above them


class DraftToken(NamedTuple):
    """One drafted token.

    Attributes:
        writer: the level that wrote it, regardless of levels that accept it later.
        logits: [V'] that it was drawn from, under the request's sampling parameters; None = a point
            mass.
        prob: its probability at temperature 1 for the level that wrote or reviewed it last; 1 if it
            was copied.
        is_surplus: whether MaG wrote it beyond the tokens of its piece that k_matrix counts.
    """

    token_id: int
    writer: str
    logits: Tensor | None = None
    prob: float = 1.0
    is_surplus: bool = False


@dataclass(eq=False)
class Draft:
    """One request's draft in one step; it ends at a token that would end the text.

    Attributes:
        num_draft_tokens: maximum number of tokens.
        is_greedy: whether its tokens are argmaxes.
        passes: passes of each level's model so far.
        num_unchanged: leading tokens that the last change left unchanged.
    """

    request: Request
    num_draft_tokens: int
    is_greedy: bool
    tokens: list[DraftToken] = field(default_factory=list)
    passes: Counter[str] = field(default_factory=Counter)
    num_draws: int = 0
    num_unchanged: int = 0

    @property
    def text(self) -> list[int]:
        """The committed tokens and the draft."""
        return self.request.token_ids + [token.token_id for token in self.tokens]

    @property
    def num_counted(self) -> int:
        """Number of its tokens without surplus ones."""
        return sum(not token.is_surplus for token in self.tokens)

    def lacks(self, count: int) -> bool:
        """Whether it has fewer than `count` tokens without surplus ones, and room for another."""
        is_ended = self.tokens and self.tokens[-1].token_id in self.request.stop_ids
        has_room = len(self.tokens) < self.num_draft_tokens
        return has_room and self.num_counted < count and not is_ended

    def replace(self, start: int, tokens: list[DraftToken]) -> None:
        """Replace the tokens from `start` on by these, cut to the room and at a stop token."""
        tokens = tokens[: max(0, self.num_draft_tokens - start)]
        is_last = [token.token_id in self.request.stop_ids for token in tokens]
        if any(is_last):
            tokens = tokens[: is_last.index(True) + 1]
        pairs = zip(self.tokens[start:], tokens, strict=False)
        same = takewhile(bool, (old.token_id == new.token_id for old, new in pairs))
        self.num_unchanged = start + sum(same)
        self.tokens[start:] = tokens


def draw_uniforms(drafts: list[Draft], num: int, batch: Batch) -> Tensor:
    """Return [B, num] random numbers that no other decision of this or any other step uses."""
    seeds, positions = [], []
    for draft in drafts:
        seeds.append(draft.request.seed)
        positions.append(len(draft.request.token_ids) + (draft.num_draws << _DRAW_SHIFT))
        draft.num_draws += 1
    keys = device_tensor([seeds, positions], torch.int64, batch.device)
    return uniform(keys[0], keys[1], num, CASCADE_STREAM, backend=batch.backend)


def stacked_logits(tokens: list[list[DraftToken]], width: int, vocab_size: int) -> Tensor | None:
    """Return logits [B, width, V] that the tokens were drawn from; None if all are point masses."""
    places, rows, point_masses = [], [], []
    for b, row in enumerate(tokens):
        for place, token in enumerate(row, start=b * width):
            if token.logits is None:
                point_masses.append(place * vocab_size + token.token_id)
            else:
                places.append(place)
                rows.append(token.logits)
    if not rows:
        return None
    like = rows[0]
    out = like.new_full((len(tokens), width, vocab_size), -torch.inf)
    index = device_tensor(places, torch.int64, like.device)
    out.view(-1, vocab_size)[index, : like.shape[0]] = torch.stack(rows)
    out.view(-1)[device_tensor(point_masses, torch.int64, like.device)] = 0.0
    return out
