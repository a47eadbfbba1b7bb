"""The byte-level BPE tokenizer shared by the bundled target and drafters."""

import random
from collections.abc import Iterable
from itertools import chain

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from scripts.tiny.corpus import Document

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0
CUT_LINES = 0.15


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, max_length: int
) -> PreTrainedTokenizerFast:
    """Trains byte-level BPE; every text round-trips, and `<|endoftext|>` (id 0) is bos and eos.

    No special token is added to encoded text. Raises `ValueError` when `vocab_size` cannot hold the
    256 bytes and the special token.
    """
    if vocab_size < 257:
        raise ValueError(f"vocab_size: must be at least 257, got {vocab_size}")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
        model_max_length=max_length,
    )


def encode_documents(
    tokenizer: PreTrainedTokenizerFast, documents: Iterable[Document]
) -> np.ndarray:
    """Concatenates the documents, each after one `<|endoftext|>`, into uint16 token ids [T].

    A line's end and the next one's indentation are often one token. After some lines, chosen at
    random, they are two, as they are where a prompt ends with its line.
    """
    pieces = []
    for document in documents:
        parts, rng = [""], random.Random(document.source)
        for line in document.text.splitlines(keepends=True):
            parts[-1] += line
            if rng.random() < CUT_LINES:
                parts.append("")
        ids = chain.from_iterable(
            tokenizer.encode(part, add_special_tokens=False) for part in parts
        )
        pieces.append(np.array([END_OF_TEXT_ID, *ids], dtype=np.uint16))
    return np.concatenate(pieces)
