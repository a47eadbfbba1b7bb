"""Suffix decoding: copies what followed earlier occurrences of the text's end, in any text."""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import ClassVar, NamedTuple
from weakref import WeakKeyDictionary

from fastspec.drafters.base import Batch, Proposal, Request
from fastspec.drafters.context import DrafterContext
from fastspec.models.transfer import padded_tensor

_NO_TOKEN = -1  # separates texts: it matches nothing, and copies end before it
_MOST_MATCH = 32
_LEAST_EXPECTED = 1.0  # accepted tokens that a likely copy must be expected to have
_MOST_PLACES = 32  # of earlier occurrences of a suffix, only the latest are used


class Copy(NamedTuple):
    """Copied tokens, their parents (0 = the end of the text), and the expected number accepted."""

    token_ids: Sequence[int] = ()
    parents: Sequence[int] = ()
    expected: float = 0.0


class SuffixIndex:
    """Texts, with an index to find earlier occurrences of a text's last tokens in them.

    Each place links to the previous one that follows the same two tokens, and to the previous one
    that follows the same single token, as in the hash chains of LZ77 compressors: a new token costs
    two steps, and a search visits only the latest places, so neither slows down as texts grow.
    """

    def __init__(self):
        self._token_ids = array("i")
        # For each token, the previous places after the same token, and after the same two tokens.
        self._earlier = array("i"), array("i")
        self._latest: tuple[dict[int, int], dict[int, int]] = {}, {}

    def __len__(self) -> int:
        return len(self._token_ids)

    def add(self, token_ids: Iterable[int]) -> None:
        """Append tokens to the text; an interrupt leaves a beginning of them."""
        known = self._token_ids
        last = known[-1] if known else _NO_TOKEN
        (after_one, after_two), (latest_one, latest_two) = self._earlier, self._latest
        for links in self._earlier:
            del links[len(known) :]  # of a token that an interrupt kept out
        for token in token_ids:
            pair, last = _pair(last, token), token
            after_one.append(latest_one.get(token, 0))
            after_two.append(latest_two.get(pair, 0))
            known.append(token)
            latest_one[token] = latest_two[pair] = len(known)

    def end(self, num: int) -> array:
        """Return the last tokens."""
        return self._token_ids[-num:]

    def places(self, end: array, least: int = 2) -> list[tuple[int, int]]:
        """Find earlier occurrences of a text's end, latest first: match length and place.

        At least `least` tokens (1 or 2) match. A place is that of the token that follows.
        """
        known, found, size = self._token_ids, [], len(end)
        if size < least:
            return found
        earlier, latest = self._earlier[least - 1], self._latest[least - 1]
        place = latest.get(end[-1] if least == 1 else _pair(*end[-2:]), 0)
        while place and len(found) < _MOST_PLACES:
            if place < len(known):
                length, most = least, min(size, place)
                if most == size and known[place - size : place] == end:
                    length = size
                while length < most and known[place - 1 - length] == end[-1 - length]:
                    length += 1
                found.append((length, place))
            place = earlier[place - 1]
        return found

    def draft(
        self, places: list[int], depth: int, max_nodes: int, least: float, is_chain: bool
    ) -> Copy:
        """Draft the most frequent paths among those that followed some places.

        Args:
            depth: maximum tokens of a path.
            least: minimum share of the places that must continue along a path.
            is_chain: follow only the most frequent token at each fork; the latest wins ties.
        """
        known, token_ids, parents = self._token_ids, [], []
        # Paths to extend: minus their share, a number that breaks ties, the last token, the node
        # before it, their length, and their places.
        paths = [(-1.0, 0, _NO_TOKEN, 0, 0, places)]
        expected, num_paths = 0.0, 1
        while paths and len(token_ids) < max_nodes:
            share, _, token, parent, length, places = heappop(paths)
            if length:
                token_ids.append(token)
                parents.append(parent)
                expected -= share
            if length == depth:
                continue
            following: dict[int, list[int]] = {}
            for place in places:
                if place < len(known) and known[place] != _NO_TOKEN:
                    following.setdefault(known[place], []).append(place + 1)
            total = sum(map(len, following.values()))
            branches = following.items()
            if is_chain and following:
                branches = [max(branches, key=lambda branch: len(branch[1]))]
            for token, after in branches:
                part = share * len(after) / total
                if -part >= least:
                    node = len(token_ids)
                    heappush(paths, (part, num_paths, token, node, length + 1, after))
                    num_paths += 1
        return Copy(token_ids, parents, expected)


class PastTexts:
    """The latest texts, in two indices: when the newer one is full, the older one is dropped.

    Args:
        max_tokens: capacity of both together.
    """

    def __init__(self, max_tokens: int):
        self._most = max(1, max_tokens // 2)
        self.indices = [SuffixIndex(), SuffixIndex()]

    def add(self, token_ids: Sequence[int]) -> None:
        """Add a text, or its end if it is too long."""
        text = [*token_ids[max(0, len(token_ids) - self._most + 1) :], _NO_TOKEN]
        if len(self.indices[0]) + len(text) > self._most:
            self.indices = [SuffixIndex(), self.indices[0]]
        self.indices[0].add(text)


@dataclass(eq=False)
class SuffixDrafter:
    """Copies the most frequent continuation of the text's longest known suffix, as far as likely.

    It searches the request's own text and prediction, the outputs of ended requests, and a corpus.
    A longer match allows a longer draft; among all match lengths and texts, the draft with the most
    tokens expected to be accepted is used. A match of one token is used only if there is none of
    two. Outputs of other requests are used for greedy requests and, with coupled verification, for
    all: otherwise drafts determine which random numbers are used, and a sampled text must not
    depend on other requests.

    Args:
        max_spec_factor: maximum draft length as a multiple of the match length.
        min_token_prob: minimum share of a match's places that must agree on a path.
        max_cached_tokens: capacity for past texts, and again for the corpus; the oldest go first.

    Source: Oliaro et al., "SuffixDecoding: Extreme Speculative Decoding for Emerging AI
    Applications", arXiv 2411.04975.
    """

    name: ClassVar[str] = "suffix"
    copies_texts: ClassVar[bool] = True

    max_spec_factor: float
    min_token_prob: float
    max_cached_tokens: int

    def __post_init__(self):
        self._own: WeakKeyDictionary[Request, SuffixIndex] = WeakKeyDictionary()
        self._num_shared: WeakKeyDictionary[Request, int] = WeakKeyDictionary()
        self._past, self._corpus = (PastTexts(self.max_cached_tokens) for _ in range(2))

    def add_corpus(self, texts: Iterable[Sequence[int]]) -> None:
        """Add texts to copy from, as token ids."""
        for token_ids in texts:
            self._corpus.add(token_ids)

    def propose(self, batch: Batch) -> Proposal:
        num = batch.num_speculative_tokens
        drafts = [
            self.draft(request, wanted, wanted, batch.is_coupled)
            for request, wanted in zip(batch.requests, batch.num_draft_tokens, strict=True)
        ]
        rows = [draft.token_ids for draft in drafts]
        return Proposal(padded_tensor(rows, num, batch.device), num_tokens=[*map(len, rows)])

    def commit(self, batch: Batch, accepted: list[int]) -> None:
        """Do nothing: the next proposal reads the new tokens."""

    def release(self, request: Request) -> None:
        """Make new output available to other requests; a resumed one adds only what is new."""
        if request not in self._own:
            return
        start = self._num_shared.get(request, request.num_prompt_tokens)
        if said := request.token_ids[start:]:
            self._past.add(said)
            self._num_shared[request] = start + len(said)

    def find_copy(self, request: Request, most: int, is_coupled: bool) -> Sequence[int]:
        """Return up to `most` tokens of one path after a match of two or more tokens.

        Empty unless at least one token is expected to be accepted.
        """
        draft = self.draft(request, most, most, is_coupled, least_match=2)
        return draft.token_ids if draft.expected >= _LEAST_EXPECTED else ()

    def draft(
        self,
        request: Request,
        depth: int,
        max_nodes: int,
        is_coupled: bool,
        is_chain: bool = True,
        least_match: int = 1,
    ) -> Copy:
        """Draft what may follow a request's text: up to max_nodes, on paths of up to `depth`."""
        if depth == 0:  # perhaps of another drafter, so that its text is not to be kept
            return Copy()
        own = self._own.get(request)
        if own is None:
            own = self._own[request] = SuffixIndex()
        prompt = request.prompt_to_copy
        own.add(prompt[len(own) :])
        own.add(request.token_ids[request.num_prompt_tokens + len(own) - len(prompt) :])
        indices = [own, *self._corpus.indices]
        if is_coupled or request.params.temperature == 0:
            indices += self._past.indices
        matches = indices, own.end(_MOST_MATCH)
        limits = depth, max_nodes, is_chain
        best = self._best(*matches, 2, *limits)
        if not best.token_ids and least_match == 1:
            best = self._best(*matches, 1, *limits)
        return best

    def _best(
        self,
        indices: list[SuffixIndex],
        end: array,
        least: int,
        depth: int,
        max_nodes: int,
        is_chain: bool,
    ) -> Copy:
        """Return the draft with the most expected accepted tokens over all matches of an end."""
        best = Copy()
        for index in indices:
            places = index.places(end, least)
            for length in sorted({length for length, _ in places}, reverse=True):
                most = int(min(depth, self.max_spec_factor * length))
                if most <= best.expected:
                    break
                agreeing = [place for agreed, place in places if agreed >= length]
                draft = index.draft(agreeing, most, max_nodes, self.min_token_prob, is_chain)
                best = max(best, draft, key=lambda draft: draft.expected)
        return best


class SuffixTreeDrafter(SuffixDrafter):
    """Suffix decoding with a tree of the most frequent paths for each request.

    Args:
        tree_nodes: maximum nodes of a tree, excluding its root.
    """

    def __init__(self, tree_nodes: int, *args):
        super().__init__(*args)
        self._tree_nodes = tree_nodes

    def max_nodes(self, num_speculative_tokens: int) -> int:
        """Return the maximum nodes of a tree."""
        return self._tree_nodes

    def propose(self, batch: Batch) -> Proposal:
        limits = zip(batch.requests, batch.num_draft_tokens, batch.max_nodes, strict=True)
        drafts = [self.draft(*limit, batch.is_coupled, is_chain=False) for limit in limits]
        rows = [part for draft in drafts for part in (draft.token_ids, draft.parents)]
        packed = padded_tensor(rows, self._tree_nodes, batch.device)
        token_ids, parents = packed.view(len(drafts), 2, -1).unbind(1)
        counts = [len(draft.token_ids) for draft in drafts]
        return Proposal(token_ids, parents, num_tokens=counts, sibling_rule="target_only")


def _pair(token: int, other: int) -> int:
    return token << 32 | other


def build(context: DrafterContext) -> SuffixDrafter:
    """Build method "suffix"."""
    spec = context.spec
    if spec.tree_nodes is not None:
        return SuffixTreeDrafter(spec.tree_nodes, *spec.suffix_limits)
    return SuffixDrafter(*spec.suffix_limits)
