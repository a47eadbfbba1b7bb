"""Bigram tables: for each token, the one that followed it most often."""

import json
from pathlib import Path

import torch
from torch import Tensor

from fastspec.config.checks import is_int
from fastspec.config.files import read_json, write_whole


def load_bigram(path: str | Path, vocab_size: int | None = None) -> Tensor:
    """Load a flat JSON list as published with CS-Drafting: entry i is the id that follows token i.

    Args:
        path: the file.
        vocab_size: the target's vocabulary size; None skips the check against it.
    Returns:
        [n] int32, n <= vocab_size; tokens beyond the list have no successor.
    Raises:
        ValueError: there is no such file, or it is not such a list, is longer than the vocabulary
            or contains an id outside it.
    """
    file = Path(path).expanduser()
    successors = read_json("bigram_path", file)
    if not isinstance(successors, list) or not successors:
        raise ValueError(f"bigram_path: {file} does not contain a list of token ids")
    if vocab_size is None:
        vocab_size = 2**31
    if len(successors) > vocab_size:
        raise ValueError(
            f"bigram_path: {file} has {len(successors)} entries, the vocabulary only {vocab_size}"
        )
    for token_id, successor in enumerate(successors):
        if not is_int(successor) or not 0 <= successor < vocab_size:
            raise ValueError(
                f"bigram_path: {file}, entry {token_id}: expected an id in 0..{vocab_size - 1},"
                f" got {successor!r}"
            )
    return torch.tensor(successors, dtype=torch.int32, device="cpu")


def save_bigram(successors: list[int], path: Path) -> None:
    """Write a table atomically: readers find either the old file or the whole new one."""
    write_whole(json.dumps(successors) + "\n", path)
