"""Draft models whose tokenizer differs from the target's, which draft the tokens that both have.

Token-level intersection: the draft's distribution over the shared tokens is a valid proposal, so
output is exact at any temperature (Timor et al., arXiv 2502.05202).
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from fastspec.models.reduced_vocabulary import ReducedHead
from fastspec.models.twin import copy_of_modules

logger = logging.getLogger(__name__)

Spelling = str | bytes  # a special token's name, any other token's bytes
_FIELD = "num_shared_tokens"  # field of a draft's configuration
_PER_LAYER = "embed_tokens_per_layer"  # Gemma's embeddings of tokens for each layer
_SPACE = "\u2581"  # in SentencePiece
# Bytes by the characters that byte-level tokenizers such as GPT-2's write for them.
BYTE_OF = {character: byte for byte, character in bytes_to_unicode().items()}


def with_vocabulary_of(
    draft: PreTrainedModel,
    own: PreTrainedTokenizerBase,
    target: PreTrainedTokenizerBase,
    vocab_size: int,
) -> PreTrainedModel:
    """Copy a draft model, sharing its weights, to read and write the target's token ids.

    A token that it lacks is read as the mean of the longest tokens that spell it, and never
    written.

    Args:
        own, target: the tokenizers.
        vocab_size: columns of the target's logits.
    Raises:
        ValueError: the tokenizers share no token, or the draft model's head has a bias.
    """
    theirs, ours = spellings(target), spellings(own)
    twin, head = copy_of_modules(draft), cast(Any, draft.get_output_embeddings())
    tables: list[Any] = [twin.get_input_embeddings()]
    tables += [part for name, part in twin.named_modules() if name.endswith(_PER_LAYER)]
    num_known = min(len(part.weight) for part in (*tables, head))
    known = {index: spelling for index, spelling in ours.items() if index < num_known}
    id_of = {spelling: index for index, spelling in sorted(known.items(), reverse=True)}
    pairs = {index: id_of[spelling] for index, spelling in theirs.items() if spelling in id_of}
    ends = cast(Any, target.eos_token_id), cast(Any, own.eos_token_id)
    if ends[0] is not None and ends[1] in known:
        pairs[ends[0]] = ends[1]
    pairs = {index: pairs[index] for index in sorted(pairs) if index < vocab_size}
    if not pairs:
        raise ValueError("drafter: its tokenizer has no token in common with the target's")
    if getattr(head, "bias", None) is not None:
        name = type(draft).__name__
        raise ValueError(
            f"drafter: {name} has another tokenizer, and a head with a bias; heterogeneous_vocab"
            " 'reencoding' supports it"
        )
    logger.warning(
        "drafter: its tokenizer is not the target's; it drafts the %d of %d tokens that both have",
        len(pairs),
        vocab_size,
    )
    device = head.weight.device
    kept = torch.tensor([*pairs], device=device)
    rows = torch.tensor([*pairs.values()], device=device)
    missing = {i: _pieces(theirs[i], id_of) for i in theirs.keys() - pairs.keys() if i < vocab_size}
    for table in tables:
        own_rows = table.weight
        weight = own_rows.new_zeros((vocab_size, own_rows.shape[1]))
        with torch.no_grad():
            for index, pieces in missing.items():
                if pieces:
                    weight[index] = own_rows[pieces].float().mean(0).to(weight.dtype)
            weight[kept] = own_rows[rows]
        table._parameters = {"weight": nn.Parameter(weight, requires_grad=False)}
        table.num_embeddings, table.padding_idx = vocab_size, None
    twin.set_output_embeddings(ReducedHead(head.weight.detach()[rows], kept, vocab_size))
    text_config: Any = twin.config.get_text_config(decoder=True)
    setattr(text_config, _FIELD, len(pairs))
    text_config.vocab_size, text_config.tie_word_embeddings = vocab_size, False
    if len(tables) > 1:
        text_config.vocab_size_per_layer_input = vocab_size
    return twin.train(draft.training)


def spellings(tokenizer: PreTrainedTokenizerBase) -> dict[int, Spelling]:
    """Return the spelling of each token, however its tokenizer writes spaces and bytes."""
    vocab = tokenizer.get_vocab()
    special = set(tokenizer.all_special_ids)
    first = {token[:1] for token in vocab}  # Gemma's tokens have "\u0120" as an ordinary character
    is_byte_level = "\u0120" in first and _SPACE not in first
    found: dict[int, Spelling] = {}
    for token, index in vocab.items():
        if index in special:
            found[index] = token
        elif is_byte_level and BYTE_OF.keys() >= set(token):
            found[index] = bytes(map(BYTE_OF.__getitem__, token))
        elif len(token) == 6 and token.startswith("<0x"):
            found[index] = bytes.fromhex(token[3:5])
        else:
            found[index] = token.replace(_SPACE, " ").encode()
    return found


def _pieces(spelling: Spelling, id_of: Mapping[Spelling, int]) -> Sequence[int]:
    """Return the tokens that spell another one, greedily longest first; none for special ones."""
    if isinstance(spelling, str):
        return []
    pieces, start = [], 0
    while start < len(spelling):
        ends = range(len(spelling), start, -1)
        end = next((end for end in ends if spelling[start:end] in id_of), None)
        if end is not None:
            pieces.append(id_of[spelling[start:end]])
        start = end or start + 1
    return pieces


def vocabulary_of(model: Any) -> str | None:
    """Return the part of the vocabulary that a draft model drafts, as text; None = all."""
    head = model.get_output_embeddings()
    return f"{len(head.token_ids)} of {head.out_features}" if type(head) is ReducedHead else None


def is_intersection(model: Any) -> bool:
    """Whether a draft model was made by `with_vocabulary_of`."""
    return hasattr(model.config.get_text_config(decoder=True), _FIELD)
