"""Draft models with another tokenizer, which draft text that is re-encoded in both directions.

String-level drafting with one candidate (SLEM of Timor et al., arXiv 2502.05202; transformers'
universal assisted generation). The draft model reads the text in its own tokens and continues it
greedily; the text of its tokens is encoded by the target's tokenizer. The resulting tokens depend
only on the text, so they are point masses, and output is exact at any temperature.
"""

import json
import logging
from codecs import IncrementalDecoder, getincrementaldecoder
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedTokenizerBase

from fastspec.config import SamplingParams
from fastspec.drafters.auto import kind_of
from fastspec.drafters.base import Batch, Proposal, Request, common_prefix_len, greedy_sampling
from fastspec.drafters.context import DrafterContext, DrafterPlan
from fastspec.drafters.draft_model import DraftModelDrafter
from fastspec.models.blocks import Blocks
from fastspec.models.layout import StateKey
from fastspec.models.loading import load_model
from fastspec.models.named import ASSETS
from fastspec.models.runner import ModelRunner
from fastspec.models.shared_vocabulary import spellings
from fastspec.models.transfer import padded_tensor

logger = logging.getLogger(__name__)

_LEAST_SHARE = 0.5  # of runs of K tokens that both tokenizers must have to use the intersection
_LOOK_BEHIND = 4  # last tokens of a text that are re-encoded with what follows
_MOST_BEHIND = 20  # the same if none of these opens a word, but an earlier one does
_SAMPLE = "Two words, 1+2:\n  caf\u00e9"
_DECODER = partial(getincrementaldecoder("utf-8"), "replace")


class SpelledTokenizer:
    """A tokenizer that can continue encoding a text where its tokens end.

    A text is the bytes that its tokens spell, not the result of `decode`, which drops spaces and
    depends on where a text is cut. Special tokens spell their names.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer: Any = tokenizer
        found = spellings(tokenizer)
        self.names = {index: name for index, name in found.items() if isinstance(name, str)}
        self.bytes = {index: name.encode() for index, name in self.names.items()}
        self.bytes |= {i: text for i, text in found.items() if isinstance(text, bytes)}
        self.end_id, self.begin_id = self._tokenizer.eos_token_id, self._tokenizer.bos_token_id
        self.end = self.names.get(self.end_id)
        first = self._tokenizer("a")["input_ids"][:1]
        self.beginning = first if first == [self.begin_id] else []
        self._adds_space = self.spelled(self._ids("a")) == b" a"  # as SentencePiece
        self._doubles_space = self.spelled(self._ids(" a")) == b"  a"

    @property
    def is_faithful(self) -> bool:
        """Whether the tokens of a text spell it."""
        return self.spelled(self._ids(_SAMPLE)).removeprefix(b" ") == _SAMPLE.encode()

    def spelled(self, token_ids: Iterable[int]) -> bytes:
        """Return the text of tokens; those without a spelling are skipped."""
        return b"".join(self.bytes.get(index, b"") for index in token_ids)

    def extended(
        self, token_ids: Sequence[int], more: str, num_dropped: int = 0
    ) -> tuple[int, list[int]]:
        """Re-encode the last tokens of a text together with the `more` text after them.

        Args:
            num_dropped: bytes at the end of the text with which `more` begins as well.
        Returns:
            A position in the text, and the tokens from there on.
        """
        least = max(0, len(token_ids) - _MOST_BEHIND)
        places = range(max(0, len(token_ids) - _LOOK_BEHIND), least, -1)
        start = next((place for place in places if self._opens_word(token_ids[place])), least)
        end = self.spelled(token_ids[start:])
        text = end[: len(end) - num_dropped].decode(errors="replace") + more
        begins = text.startswith(" ")
        ids = self._ids(text[1:] if begins and self._doubles_space else text)
        if self._adds_space and not begins and self.spelled(ids[:1]) == b" ":
            del ids[0]
        return start, ids

    def _opens_word(self, index: int) -> bool:
        return index in self.names or self.bytes.get(index, b"")[:1].isspace()

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


@dataclass(eq=False)
class _Text:
    """A request's text as the draft model reads it.

    Attributes:
        own: the text in tokens of the draft model, with its own blocks.
        num_read: number of the target's tokens that it covers.
        decoder: holds an incomplete character at their end.
        drafted: the last draft after it.
    """

    own: Request
    num_read: int = 0
    decoder: IncrementalDecoder = field(default_factory=_DECODER)
    drafted: list[int] = field(default_factory=list)

    @property
    def pending(self) -> bytes:
        """The bytes of the incomplete character."""
        return self.decoder.getstate()[0]


class _UnsharedBlocks(Blocks):
    """Blocks that are never shared between tables."""

    def free(self, block_table: list[int]) -> None:
        """Free all blocks of a table."""
        self._free += block_table
        self.num_free += len(block_table)
        block_table.clear()


class ReencodingDrafter(DraftModelDrafter):
    """Drafts text with a language model whose tokenizer differs from the target's.

    The model's cache has its own block tables, because a text has different numbers of tokens in
    the two tokenizers; when it is full, requests take turns and texts are reread. If a text's
    tokens change, those before the first change stay cached. Nothing is drafted after tokens that
    the target's tokenizer would not have produced.

    Args:
        blocks: number and size of the blocks.
        target, own: the tokenizers of the target and of the draft model.
        target_vocab_size: columns of the target's logits.
        confidence_threshold: see `DraftModelDrafter`.
    """

    def __init__(
        self,
        runner: ModelRunner,
        blocks: Blocks,
        target: SpelledTokenizer,
        own: SpelledTokenizer,
        target_vocab_size: int,
        confidence_threshold: float | None = None,
    ):
        self._blocks = _UnsharedBlocks(blocks.num_blocks, blocks.block_size)
        super().__init__(runner, self._blocks, runner.vocab_size, False, confidence_threshold)
        self._target, self._own, self._num_ids = target, own, target_vocab_size
        self._read, self._written = _texts_for(target, own), _texts_for(own, target)
        self._texts: WeakKeyDictionary[Request, _Text] = WeakKeyDictionary()

    def propose(self, batch: Batch) -> Proposal:
        num = batch.num_speculative_tokens
        rows: list[list[int]] = [[] for _ in batch.requests]
        passes: list[dict[str, int]] = [{} for _ in batch.requests]
        group: dict[int, tuple[_Text, int]] = {}  # by place in the batch: texts drafted together
        for place, request in enumerate(batch.requests):
            if not batch.num_draft_tokens[place]:
                continue
            text = self._text_of(request)
            length = len(text.own.token_ids)
            limit = min(batch.num_draft_tokens[place], self.room(length))
            if not length or not limit or not self._blocks.fits(length + limit):
                continue
            if not self._make_room(text, length + limit, group):
                self._draft(batch, group, rows, passes)
                group = {}
                self._make_room(text, length + limit, group)
            group[place] = text, limit
        self._draft(batch, group, rows, passes)
        counts = [len(row) for row in rows]
        token_ids = padded_tensor(rows, num, batch.device)
        return Proposal(token_ids, num_tokens=counts, passes=passes)

    def commit(self, batch: Batch, accepted: list[int]) -> None:
        """Do nothing: the next proposal reads the new tokens."""

    def release(self, request: Request) -> None:
        """Free the blocks; the text lives as long as the request, so its tokenization is stable."""
        if (text := self._texts.get(request)) is not None:
            self._evict(text)

    def _text_of(self, request: Request) -> _Text:
        """Return the text extended by new target tokens, with its cache rolled back to match."""
        if (text := self._texts.get(request)) is None:
            params = SamplingParams(temperature=0)
            beginning = list(self._own.beginning)
            own = Request(request.request_id, beginning, params, 0, frozenset(), 0)
            text = self._texts[request] = _Text(own)
            if beginning and request.token_ids[0] == self._target.begin_id:
                text.num_read = 1  # replaced by the draft model's own begin token
        new, text.num_read = request.token_ids[text.num_read :], len(request.token_ids)
        piece = text.decoder.decode(b"".join(self._read.get(index, b"") for index in new))
        if not piece:
            return text
        own_ids = text.own.token_ids
        is_new = own_ids == self._own.beginning
        start, ids = self._own.extended(own_ids, piece)
        known = own_ids[start:] + text.drafted
        self.shorten(request.request_id, start + common_prefix_len(known, ids))
        own_ids[start:] = ids
        if is_new:
            text.own.first_read_len = len(own_ids)
        text.drafted = []
        return text

    def _draft(
        self,
        batch: Batch,
        group: dict[int, tuple[_Text, int]],
        rows: list[list[int]],
        passes: list[dict[str, int]],
    ) -> None:
        """Draft for a group of texts together, and fill their rows."""
        if not group:
            return
        requests = [text.own for text, _ in group.values()]
        num_draft_tokens = [limit for _, limit in group.values()]
        sampling = greedy_sampling(len(requests), batch.device)
        shape = len(group), max(num_draft_tokens)
        unused = torch.zeros(shape, dtype=torch.float32, device=batch.device)
        texts = [request.token_ids for request in requests]
        drafts, _, counts = self.write(requests, texts, num_draft_tokens, sampling, unused, False)
        for (place, (text, _)), draft, count in zip(
            group.items(), drafts.tolist(), counts, strict=True
        ):
            text.drafted = draft[:count]
            wanted = batch.num_draft_tokens[place]
            rows[place] = self._encoded(batch.requests[place], text, text.drafted)[:wanted]
            passes[place] = {self.name: count}

    def _encoded(self, request: Request, text: _Text, draft: Sequence[int]) -> list[int]:
        """Encode a draft in the target's tokens; empty if re-encoding changes existing tokens."""
        known = list(takewhile(self._written.__contains__, draft))
        if self._own.end_id in known:
            known = known[: known.index(self._own.end_id) + 1]
        more = _DECODER().decode(b"".join(self._written[index] for index in known))
        start, ids = self._target.extended(request.token_ids, more, len(text.pending))
        end = request.token_ids[start:]
        if ids[: len(end)] != end:
            return []
        return list(takewhile(lambda index: index < self._num_ids, ids[len(end) :]))

    def _make_room(self, text: _Text, num_tokens: int, group: dict[int, tuple[_Text, int]]) -> bool:
        """Reserve blocks for a text, evicting texts outside the group if necessary."""
        kept = [text, *(other for other, _ in group.values())]
        while not self._blocks.reserve(text.own.block_table, num_tokens):
            others = (other for other in self._texts.values() if other.own.block_table)
            other = next((other for other in others if other not in kept), None)
            if other is None:
                return False
            self._evict(other)
        return True

    def _evict(self, text: _Text) -> None:
        """Free a text's blocks."""
        super().release(text.own)
        self._blocks.free(text.own.block_table)
        text.own.state_key = StateKey()


def _texts_for(source: SpelledTokenizer, reader: SpelledTokenizer) -> dict[int, bytes]:
    """Return each token's text for another tokenizer, without special tokens that it lacks."""
    known = set(reader.names.values())
    found = dict(source.bytes)
    for index, name in source.names.items():
        name = reader.end if name == source.end else name
        if name in known:
            found[index] = str(name).encode()
        else:
            del found[index]
    return found


def share_of_runs(
    target: PreTrainedTokenizerBase, own: PreTrainedTokenizerBase, num_tokens: int
) -> float:
    """Return the share of runs of `num_tokens` target tokens in ordinary text that both have."""
    theirs, ours = spellings(target), set(spellings(own).values())
    lines = (ASSETS / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    num_runs, num_shared = 0, 0
    for line in lines:
        ids = target(json.loads(line)["text"], add_special_tokens=False)["input_ids"]
        shared = [theirs[index] in ours for index in ids]
        runs = [shared[at : at + num_tokens] for at in range(len(ids) - num_tokens + 1)]
        num_runs, num_shared = num_runs + len(runs), num_shared + sum(map(all, runs))
    return num_shared / max(1, num_runs)


def tokenizers_of(context: DrafterContext) -> tuple[SpelledTokenizer, SpelledTokenizer] | None:
    """Return the target's and the draft model's tokenizers if drafts are re-encoded; None if the
    draft model can use the target's token ids.

    Raises:
        ValueError: re-encoding is requested but impossible.
    """
    spec, source, target = context.spec, context.drafter, context.tokenizer
    must = spec.heterogeneous_vocab == "reencoding"
    takes_ids = spec.heterogeneous_vocab == "intersection" or spec.cape
    if takes_ids or spec.draft_sample_method == "probabilistic":
        return None
    if (
        not isinstance(source, (str, Path))
        or target is None
        or context.wants_glide
        or kind_of(source, context.read_config) != "model"
        or context.read_config("drafter", source).is_encoder_decoder
    ):
        if must:
            expected = "a decoder by its path or hub id, and the target's tokenizer"
            raise ValueError(f"heterogeneous_vocab: 'reencoding' needs {expected}")
        return None
    own = context.read_tokenizer("drafter", source)
    if not must:
        if own.get_vocab() == target.get_vocab():
            return None
        if share_of_runs(target, own, spec.num_model_tokens()) >= _LEAST_SHARE:
            return None
    tokenizers = SpelledTokenizer(target), SpelledTokenizer(own)
    if not all(each.is_faithful for each in tokenizers):
        if must:
            raise ValueError("heterogeneous_vocab: 'reencoding' needs tokens that spell their text")
        return None
    return tokenizers


def build(context: DrafterContext) -> DrafterPlan | None:
    """Plan a drafter that re-encodes; None if the draft model can use the target's token ids.

    Raises:
        ValueError: re-encoding is requested but impossible.
    """
    if (tokenizers := tokenizers_of(context)) is None:
        return None
    model = context.on_pages(load_model("drafter", context.drafter, context.config_of_files))
    logger.warning("drafter: its tokenizer is not the target's; its text is re-encoded")

    def drafter(target_runner: ModelRunner | None, blocks: Blocks) -> ReencodingDrafter:
        runner = context.runner(model, blocks)
        options = context.vocab_size, context.spec.confidence_threshold
        return ReencodingDrafter(runner, blocks, *tokenizers, *options)

    return DrafterPlan([model], drafter, "reencoding")
