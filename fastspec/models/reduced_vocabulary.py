"""Draft models that know a part of the vocabulary, and take embeddings from their target.

A draft model may propose from any subset of the tokens and stay exact: its distribution is then
over these (FR-Spec, arXiv 2502.14856). Verification is unchanged; the head, which makes up most of
the weights that a shallow draft reads per token, becomes small.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils.hub import cached_file

from fastspec.models.sharded import whole

_FIELD = "reduced_vocab_size"  # in config.json
_FILE = "model.safetensors"
_SCALE = ".scale"
_MOST = 127  # largest 8-bit value


class ReducedHead(nn.Module):
    """A language model head reduced to R tokens: weight [R, E].

    All other tokens get logits of -inf. In training mode, and if `is_spread` is false, they are
    left out and logits are [.., R].
    """

    is_spread = True

    def __init__(self, weight: Tensor, token_ids: Tensor, vocab_size: int):
        super().__init__()
        rows, size = weight.shape
        self.linear = nn.Linear(size, rows, bias=False, device="meta")
        self.linear.weight = nn.Parameter(weight, requires_grad=False)
        self.token_ids: Tensor
        self.register_buffer("token_ids", token_ids)
        self.out_features = vocab_size

    @property
    def weight(self) -> Tensor:
        """[R, E]; some models, such as Mamba, read the dtype of a head's weight."""
        return self.linear.weight

    def forward(self, hidden: Tensor) -> Tensor:
        known = self.linear(hidden)
        if self.training or not self.is_spread:
            return known
        return spread(known, self.token_ids, self.out_features)


def spread(known: Tensor, token_ids: Tensor, vocab_size: int) -> Tensor:
    """Return logits [.., V] from those of R tokens [.., R]; -inf for all others."""
    logits = known.new_full((*known.shape[:-1], vocab_size), -torch.inf)
    return logits.index_copy_(-1, token_ids, known)


class DraftVocabulary:
    """Maps the columns of a draft's logits to tokens.

    A draft that knows few tokens draws from only these columns; a full row is several times as
    wide.

    Args:
        size: V, the target's vocabulary size.
        token_ids: [R] int64, the tokens of the columns, each once; None = column x is token x.
    Attributes:
        token_map: [V] int32, the column of each token, -1 if there is none; None = column x is x.
    """

    def __init__(self, size: int, token_ids: Tensor | None = None):
        self.size = size
        self.token_map: Tensor | None = None
        self._token_ids = token_ids
        if token_ids is not None:
            options = {"dtype": torch.int32, "device": token_ids.device}
            self.token_map = torch.full((size,), -1, **options)
            self.token_map[token_ids] = torch.arange(len(token_ids), **options)
            self._known = frozenset(token_ids.tolist())
            self._tokens = pad(token_ids.int(), (0, 1), value=-1)  # index -1 gives -1

    def knows(self, token_id: int) -> bool:
        """Whether a token has a column."""
        return self._token_ids is None or token_id in self._known

    def tokens(self, columns: Tensor) -> Tensor:
        """Return the tokens int32 of columns; -1 stays -1."""
        if self._token_ids is None:
            return columns
        return self._tokens[columns.long()]

    def whole(self, logits: Tensor) -> Tensor:
        """Return logits [.., V] of all tokens from those of the columns."""
        return logits if self._token_ids is None else spread(logits, self._token_ids, self.size)

    def own(self, logits: Tensor) -> Tensor:
        """Return logits [.., R] of the columns from those of all tokens."""
        return logits if self._token_ids is None else logits[..., self._token_ids]


def reduce_vocabulary(draft: PreTrainedModel, target: PreTrainedModel, token_ids: Tensor) -> None:
    """Give a draft the target's frozen embeddings, and its head's rows for some tokens [R].

    Raises:
        ValueError: the target's hidden states or vocabulary differ in size from the draft's, or its
            head has a bias.
    """
    embeddings: Any = target.get_input_embeddings()
    head: Any = target.get_output_embeddings()
    config = draft.config
    shapes = {tuple(part.weight.shape) for part in (embeddings, head)}
    if shapes != {(config.vocab_size, config.hidden_size)}:
        raise ValueError(
            f"drafter: needs embeddings {(config.vocab_size, config.hidden_size)} from its target,"
            f" which has {' and '.join(map(str, sorted(shapes)))}"
        )
    shared = nn.Embedding.from_pretrained(whole(embeddings.weight.detach()).to(draft.dtype))
    rows = reduced_rows(target, token_ids).to(draft.dtype)
    draft.set_input_embeddings(shared)
    config.tie_word_embeddings = False
    draft.lm_head = ReducedHead(rows, token_ids.to(rows.device), config.vocab_size)
    setattr(config, _FIELD, len(token_ids))


def reduced_rows(target: PreTrainedModel, token_ids: Tensor) -> Tensor:
    """Return the rows [R, E] of a target's head for some tokens [R].

    Raises:
        ValueError: the head has a bias.
    """
    head: Any = target.get_output_embeddings()
    if getattr(head, "bias", None) is not None:
        raise ValueError(f"drafter: {type(target).__name__} has a head with a bias: not supported")
    weight = whole(head.weight.detach())
    return weight[token_ids.to(weight.device)]


def stored_token_ids(tensors: dict[str, Tensor], vocab_size: int) -> Tensor:
    """Return the tokens [R] that a draft of a published layout can write; removes the maps for them
    from `tensors`.

    Raises:
        ValueError: the maps name tokens twice or outside the vocabulary, or contradict each other.
    """
    offsets, is_known = tensors.pop("d2t", None), tensors.pop("t2d", None)
    num_ids = vocab_size if offsets is None else len(offsets)
    token_ids = torch.arange(num_ids, device="cpu") + (0 if offsets is None else offsets.long())
    if not 0 <= int(token_ids.min()) <= int(token_ids.max()) < vocab_size:
        raise ValueError(f"d2t: names tokens outside the target's vocabulary of {vocab_size}")
    named, counts = token_ids.unique(return_counts=True)
    if len(named) < num_ids:
        raise ValueError(f"d2t: names token {int(named[counts > 1][0])} more than once")
    if is_known is not None:
        marked = is_known.flatten().nonzero().flatten()
        if not torch.equal(marked, named):
            says = "there is no d2t" if offsets is None else "d2t names other tokens"
            raise ValueError(f"t2d: marks {len(marked)} of {vocab_size} tokens, but {says}")
    return token_ids


def save_beside_target(draft: PreTrainedModel, config: dict[str, Any], folder: Path) -> None:
    """Write a draft in bfloat16 with a published layout, without the embeddings and the head, which
    are the target's, but with the maps that `stored_token_ids` reads."""
    head: Any = draft.get_output_embeddings()
    token_ids = head.token_ids.cpu()
    is_known = torch.zeros(head.out_features, dtype=torch.bool, device="cpu")
    is_known[token_ids] = True
    tensors = {
        name: weight.detach().to(torch.bfloat16).contiguous()
        for name, weight in draft.named_parameters()
        if not name.startswith(("embed_tokens.", "lm_head."))
    }
    tensors |= {"d2t": token_ids - torch.arange(len(token_ids), device="cpu"), "t2d": is_known}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / _FILE, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def is_reduced(config: PreTrainedConfig) -> bool:
    """Whether a stored draft model takes embeddings from its target."""
    return hasattr(config, _FIELD)


def save_reduced(draft: PreTrainedModel, folder: Path) -> None:
    """Write a draft without its target's parts; matrices in 8 bits, with one scale per row."""
    head: Any = draft.get_output_embeddings()
    tensors = {"lm_head.token_ids": head.token_ids.to(torch.int32).contiguous()}
    for name, weight in _own_weights(draft).items():
        weight = weight.detach().float()
        if weight.dim() == 2:
            scale = weight.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / _MOST
            tensors[name + _SCALE] = scale.contiguous()
            weight = (weight / scale).round().to(torch.int8)
        tensors[name] = weight.contiguous()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / _FILE)
    draft.config.save_pretrained(folder)


def read_reduced(path: str | Path, target: PreTrainedModel, **options: Any) -> PreTrainedModel:
    """Load a draft written by `save_reduced`, in the target's dtype and on its device.

    Raises:
        ValueError: weights are missing, or the target is not the one it was made for.
    """
    config: Any = AutoConfig.from_pretrained(path)
    tensors = load_file(str(cached_file(path, _FILE)))
    token_ids = tensors.pop("lm_head.token_ids").long()
    ends = {name: getattr(config, name) for name in ("vocab_size", "pad_token_id")}
    config.update({"vocab_size": 1, "pad_token_id": None})  # embeddings and head are the target's
    draft = AutoModelForCausalLM.from_config(config, dtype=target.dtype)
    draft.config.update(ends)
    own = _own_weights(draft)
    if missing := sorted(own.keys() - tensors.keys()):
        raise ValueError(f"{len(missing)} weights are missing, such as {missing[0]}")
    with torch.no_grad():
        for name, weight in own.items():
            weight.copy_(tensors[name] * tensors.get(name + _SCALE, 1))
    draft.to(target.device)  # pyright: ignore[reportArgumentType]
    reduce_vocabulary(draft, target, token_ids)
    return draft.eval()


def _own_weights(draft: PreTrainedModel) -> dict[str, nn.Parameter]:
    """Return the weights that a draft does not take from its target."""
    ends: Any = draft.get_input_embeddings(), draft.get_output_embeddings()
    taken = {id(weight) for part in ends for weight in part.parameters()}
    return {name: each for name, each in draft.named_parameters() if id(each) not in taken}
