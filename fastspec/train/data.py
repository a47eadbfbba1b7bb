"""Training data: rows of text, and the target's outputs for them, computed live or kept on disk."""

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel

from fastspec.drafters.glide.dense import DenseGlimpse, block_mask, read_target
from fastspec.models.reduced_vocabulary import ReducedHead
from fastspec.models.twin import twin_of

_READ_TEXTS = 16  # texts per pass of the target
_MOST_HASHED = 2**20  # elements of a weight

Document = tuple[list[int], int]  # token ids, and where the part to learn begins


@dataclass(frozen=True)
class Rows:
    """Texts of equal width, padded at the end.

    Attributes:
        token_ids: [N, S + 1] int64.
        lengths: [N] int64, number of real tokens in each, >= 2.
    """

    token_ids: Tensor
    lengths: Tensor

    def __len__(self) -> int:
        return len(self.token_ids)

    def take(self, indices: Tensor) -> "Rows":
        """Return some of the rows."""
        return Rows(self.token_ids[indices], self.lengths[indices])

    @property
    def valid(self) -> Tensor:
        """Return [N, S + 1] bool, True for real tokens."""
        return torch.arange(self.token_ids.shape[1]) < self.lengths[:, None]


def cut_rows(documents: Iterable[list[int]], context: int) -> Rows:
    """Cut the concatenated documents into windows of context + 1 tokens, padding the last one.

    A window starts with the last token of the previous one, so each token is learnt once.

    Raises:
        ValueError: there are fewer than two tokens.
    """
    ids = torch.tensor([token_id for document in documents for token_id in document])
    if len(ids) < 2:
        raise ValueError("data: expected at least two tokens of text")
    count = -(-(len(ids) - 1) // context)
    last = len(ids) - (count - 1) * context
    token_ids = pad(ids, (0, context + 1 - last)).long().unfold(0, context + 1, context)
    lengths = torch.full((count,), context + 1)
    lengths[-1] = last
    return Rows(token_ids, lengths)


@dataclass(frozen=True)
class Lesson:
    """One batch on the training device.

    Attributes:
        token_ids: [B, S + 1].
        valid: [B, S + 1] bool.
        layers: for each draft layer, keys and values [B, G, S, D] of its target layer.
        target_logits: [B, S, V]; for a reduced vocabulary only its tokens.
    """

    token_ids: Tensor
    valid: Tensor
    layers: list[tuple[Tensor, Tensor]]
    target_logits: Tensor

    def read_by(self, draft: nn.Module, block_size: int) -> Any:
        """Run a draft on all tokens but the last; with block_size 0 it does not see the target."""
        valid = self.valid[:, :-1]
        extra = {}
        if block_size:
            extra["glimpse"] = DenseGlimpse(self.layers, block_mask(valid, block_size))
        inputs, kind = self.token_ids[:, :-1], self.target_logits.dtype
        with torch.autocast(inputs.device.type, torch.bfloat16, enabled=kind == torch.bfloat16):
            return draft(input_ids=inputs, attention_mask=valid.long(), use_cache=False, **extra)


Teacher = Callable[[Tensor], Lesson]  # returns the lesson for rows by index


def split_documents(
    documents: Iterable[Document], held_out: float, context: int, seed: int
) -> tuple[list[Document], list[Document]]:
    """Randomly split documents into those to train on, and those to evaluate on.

    The latter have the given part of all tokens, and at least enough for one text of `context`
    tokens, or half of all if that is less. A document is cut in two where that falls within it.

    Raises:
        ValueError: fewer than four tokens.
    """
    known = [document for document in documents if document[0]]
    total = sum(len(ids) for ids, _ in known)
    if total < 4:
        raise ValueError("data: too little text to hold any out")
    least = min(context + 1, total // 2)
    left = min(max(round(held_out * total), least), total - 2)
    training: list[Document] = []
    evaluated: list[Document] = []
    for place in torch.randperm(len(known), generator=torch.Generator().manual_seed(seed)).tolist():
        ids, start = known[place]
        cut = max(0, len(ids) - left)
        left -= len(ids) - cut
        if cut:
            training.append((ids[:cut], start))
        if cut < len(ids):
            evaluated.append((ids[cut:], max(1, start - cut)))
    return training, evaluated


def most_frequent(token_ids: Tensor, count: int) -> Tensor:
    """Return the most frequent tokens, [count] ids in ascending order, the lowest ones on ties."""
    counts = torch.bincount(token_ids)
    counts = pad(counts, (0, max(0, count - len(counts))))
    return counts.argsort(descending=True, stable=True)[:count].sort().values


def frozen_target(
    target: PreTrainedModel, rows: Rows, num_draft_layers: int, token_ids: Tensor | None = None
) -> Teacher:
    """Return a teacher that runs the frozen target on every batch.

    With token_ids [R], for a reduced vocabulary, it returns only the logits of these tokens.
    """
    target.eval()
    if token_ids is not None:
        target = _with_head(target, _head_for(target, token_ids))

    def lesson(indices: Tensor) -> Lesson:
        chosen = rows.take(indices)
        token_ids, valid = (part.to(target.device) for part in (chosen.token_ids, chosen.valid))
        layers, logits = read_target(target, token_ids[:, :-1], valid[:, :-1], num_draft_layers)
        return Lesson(token_ids, valid, layers, logits)

    return lesson


@torch.no_grad()
def stored_target(
    target: PreTrainedModel,
    rows: Rows,
    num_draft_layers: int,
    token_ids: Tensor | None,
    file: Path,
    advance: Callable[[int], None],
) -> Teacher:
    """Run the target once; return a teacher that reads its stored hidden states, keys and values.

    Args:
        num_draft_layers: layers of a GLIDE draft, for which keys and values are kept; 0 for others.
        token_ids: as for `frozen_target`.
        file, advance: as for `stored_states`.
    Raises:
        ValueError: the target's logits are not its head's output.
    """
    head, body = _head_for(target, token_ids), _with_head(target.eval(), nn.Identity())
    sample_ids = rows.token_ids[:1, :2].to(target.device)
    layers, hidden = read_target(body, sample_ids, sample_ids >= 0, num_draft_layers)
    check_head("store_target", target, sample_ids, hidden)
    shapes = [tuple(part.shape[1::2]) for pair in layers for part in pair]  # [G, D]
    sizes = [hidden.shape[-1], *(math.prod(shape) for shape in shapes)]
    count, length = rows.token_ids.shape[0], rows.token_ids.shape[1] - 1

    def read(places: list[int]) -> Tensor:
        chosen = rows.take(torch.tensor(places))
        ids, valid = (part[:, :-1].to(target.device) for part in (chosen.token_ids, chosen.valid))
        layers, hidden = read_target(body, ids, valid, num_draft_layers)
        parts = [part.transpose(1, 2).flatten(2) for pair in layers for part in pair]
        return torch.cat([hidden, *parts], dim=-1)

    states = stored_states(file, target.dtype, [length] * count, sum(sizes), read, advance)

    def lesson(indices: Tensor) -> Lesson:
        chosen = rows.take(indices)
        token_ids, valid = (part.to(target.device) for part in (chosen.token_ids, chosen.valid))
        chosen_states = torch.stack([states[place] for place in indices.tolist()])
        hidden, *parts = chosen_states.to(target.device).split(sizes, dim=-1)
        heads = [
            part.unflatten(-1, shape).transpose(1, 2)
            for part, shape in zip(parts, shapes, strict=True)
        ]
        with torch.no_grad():
            logits = head(hidden)
        return Lesson(token_ids, valid, list(zip(heads[::2], heads[1::2], strict=True)), logits)

    return lesson


def stored_states(
    file: Path,
    dtype: torch.dtype,
    lengths: Sequence[int],
    width: int,
    read: Callable[[list[int]], Tensor],
    advance: Callable[[int], None],
) -> Sequence[Tensor]:
    """Return the states [S, width] of each text, kept on disk.

    Args:
        file: memory-mapped file with one text after another; its folder is created. Texts whose
            states it already contains are not read.
        lengths: number of tokens of each text.
        read: returns the states [n, S, width] of texts by index, padded to the longest.
        advance: called with the number of texts done, after each read.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    whole = torch.from_file(str(file), shared=True, size=sum(lengths) * width, dtype=dtype)
    states = whole.view(-1, width).split(list(lengths))
    by_length = sorted(range(len(lengths)), key=lambda place: lengths[place])
    for first in range(0, len(lengths), _READ_TEXTS):
        places = by_length[first : first + _READ_TEXTS]
        unread = [place for place in places if not states[place][0].any()]
        if unread:
            for place, own in zip(unread, read(unread).cpu(), strict=True):
                states[place][1:].copy_(own[1 : lengths[place]])
                states[place][0].copy_(own[0])  # written last, to mark the text as done
            advance(first + len(places))
    return states


def check_head(field: str, target: Any, token_ids: Tensor, hidden: Tensor) -> None:
    """Refuse a target that caps or scales its head's output to get logits."""
    head = target.get_output_embeddings()
    if not torch.equal(head(hidden), target(token_ids, use_cache=False).logits):
        raise ValueError(f"{field}: {type(target).__name__} modifies the logits of its head")


def digest_of(tensors: Iterable[Tensor]) -> str:
    """Return a digest of tensors, such as the token ids of texts."""
    digest = hashlib.sha256()
    for each in tensors:
        digest.update(repr(each.shape).encode() + each.cpu().numpy().tobytes())
    return f"sha256:{digest.hexdigest()[:16]}"


def describe_target(target: PreTrainedModel) -> str:
    """Return a target's name, after a digest of its name, its config and some of its weights.

    These are the beginnings of the first and the last matrix between embeddings and head.
    """
    ends = target.get_input_embeddings(), target.get_output_embeddings()
    at_ends = {id(weight) for end in ends if end is not None for weight in end.parameters()}
    matrices = [part for part in target.parameters() if part.ndim > 1 and id(part) not in at_ends]
    some = [part.detach().flatten()[:_MOST_HASHED] for part in (matrices[:1] + matrices[-1:])]
    name, config = target.name_or_path, target.config.to_json_string()
    if name and Path(name).is_dir():
        name = str(Path(name).resolve())
    weights = digest_of(part.cpu().view(torch.uint8) for part in some)
    digest = hashlib.sha256(repr((name, config, weights)).encode())
    return f"{digest.hexdigest()[:16]} {name}".strip()


def states_file(
    folder: Path, resume: bool, target: PreTrainedModel, texts: Iterable[Tensor], *kept: Any
) -> Path:
    """Return the file, in a run's folder, for stored states of its target.

    The name depends on the target, the token ids of the texts, and what is `kept` of them, so a
    resumed run never uses states of another one; files of other names are deleted.

    Raises:
        ValueError: the folder contains a checkpoint, but the run does not resume.
    """
    if (folder / "checkpoint.pt").exists() and not resume:
        raise ValueError(f"out: {folder} has a checkpoint: resume it, or choose another folder")
    known = describe_target(target), target.dtype, kept
    digest = hashlib.sha256(repr((known, digest_of(texts))).encode())
    file = folder / f"target-states-{digest.hexdigest()[:16]}.bin"
    for other in folder.glob("target-states*.bin"):
        if not resume or other != file:
            other.unlink(missing_ok=True)
    return file


def _head_for(target: PreTrainedModel, token_ids: Tensor | None) -> Any:
    """Return the target's head, or only its rows for some tokens."""
    head: Any = target.get_output_embeddings()
    if token_ids is None:
        return head
    token_ids = token_ids.to(target.device)
    return ReducedHead(head.weight.detach()[token_ids], token_ids, len(head.weight)).train()


def _with_head(target: PreTrainedModel, head: nn.Module) -> PreTrainedModel:
    """Return the same target with another head."""
    config: Any = target.config
    twin = twin_of(target, config._attn_implementation).eval()
    own: Any = target.get_output_embeddings()
    head.__dict__["weight"] = getattr(own, "weight", None)  # whose dtype Mamba's forward reads
    twin.set_output_embeddings(head)
    return twin
