"""Random draws of small models, as logits over a larger vocabulary, and their counts."""

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from fastspec_kernels.testing.models import TableModel, decode
from fastspec_kernels.testing.statistics import assert_counts

NOT_A_TOKEN = -1
# With filters on, this share of every row is on tokens that each of the filters removes.
FILTERED_SHARE = 0.05
TOP_P, MIN_P = 0.9, 0.1
TEMPERATURES = (0.5, 1.0, 2.0)
FILTERS = ("top_k", "top_p", "min_p", "all", "greedy")
MIN_VOCAB_SIZE = 12


@dataclass(frozen=True)
class Vocabulary:
    """The positions of a small model's tokens in a larger vocabulary.

    Attributes:
        size: number of ids.
        ids: [vocab of the model] ascending ids of its tokens.
        filtered: whether the other ids have some probability, for the filters to remove, or none.
    """

    size: int
    ids: np.ndarray
    filtered: bool

    def logits(self, probs: np.ndarray, temperature: np.ndarray) -> Tensor:
        """Make float32 logits [..., size] that give rows [..., vocab] at these temperatures."""
        others = self.size - len(self.ids)
        share = FILTERED_SHARE if self.filtered else 0.0
        whole = np.full((*probs.shape[:-1], self.size), share / max(others, 1))
        whole[..., self.ids] = (1 - share) * probs
        scale = np.where(temperature > 0, temperature, 1.0)
        with np.errstate(divide="ignore"):
            return torch.from_numpy((scale[..., None] * np.log(whole)).astype(np.float32))

    def tokens(self, output: np.ndarray) -> np.ndarray:
        """Translate ids back to tokens of the model; -1 for the others and for padding."""
        table = np.full(self.size + 1, NOT_A_TOKEN)
        table[self.ids] = np.arange(len(self.ids))
        return table[np.where((output >= 0) & (output < self.size), output, self.size)]


def scatter(model: TableModel, size: int, filtered: bool, rng: np.random.Generator) -> Vocabulary:
    """Choose ids for the tokens of a model.

    Args:
        model: the model.
        size: ids to choose from.
        filtered: see `Vocabulary`.
        rng: random generator.
    Returns:
        The vocabulary.
    """
    if size < MIN_VOCAB_SIZE:
        raise ValueError(f"vocab_size: expected at least {MIN_VOCAB_SIZE}, got {size}")
    ids = np.sort(rng.choice(size, model.vocab, replace=False))
    return Vocabulary(size, ids, filtered)


def sampling_parameters(num: int, vocab: int) -> dict[str, np.ndarray]:
    """Assign each of `FILTERS` to sequences in turn; all keep the same tokens, or are greedy.

    Args:
        num: number of sequences.
        vocab: number of tokens of the model, which the filters keep.
    Returns:
        temperature, top_k, top_p and min_p, [num] each.
    """
    way = np.arange(num) % len(FILTERS)

    def when(names, value, off):
        return np.where(np.isin(np.array(FILTERS)[way], names), value, off)

    temperature = np.array(TEMPERATURES)[np.arange(num) // len(FILTERS) % len(TEMPERATURES)]
    return {
        "temperature": when(["greedy"], 0.0, temperature).astype(np.float32),
        "top_k": when(["top_k", "all"], vocab, 0).astype(np.int32),
        "top_p": when(["top_p", "all"], TOP_P, 1.0).astype(np.float32),
        "min_p": when(["min_p", "all"], MIN_P, 0.0).astype(np.float32),
    }


def draw_tokens(probs: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draw one token from each row.

    Args:
        probs: [R, vocab] weights, not normalised; a row of zeros gives -1.
        rng: random generator.
    Returns:
        [R] tokens.
    """
    steps = probs.cumsum(-1)
    bounds = rng.random(len(probs)) * steps[:, -1]
    tokens = (steps <= bounds[:, None]).sum(-1)
    return np.where(steps[:, -1] > 0, np.minimum(tokens, probs.shape[1] - 1), NOT_A_TOKEN)


def assert_possible(
    tokens: np.ndarray, lengths: np.ndarray, model: TableModel, label: str, inputs: np.ndarray
) -> None:
    """Check that no token of probability 0 was emitted.

    Args:
        tokens: [B, L] tokens of the model, -1 for ids that the model does not have.
        lengths: [B] number of emitted tokens.
        model: the target.
        label: name of the case.
        inputs: [B, n] the uniform numbers, for the message.
    Raises:
        AssertionError: names the first such sequence.
    """
    codes = np.zeros(len(tokens), dtype=np.int64)
    for i in range(tokens.shape[1]):
        counted = i < lengths
        probs = model.probs(i)[codes, np.maximum(tokens[:, i], 0)]
        wrong = counted & ((tokens[:, i] < 0) | (probs == 0))
        if wrong.any():
            b = int(wrong.argmax())
            emitted = tokens[b, : lengths[b]].tolist()
            raise AssertionError(
                f"{label}: sequence {b} emits tokens {emitted} (-1: outside the target's support);"
                f" number {i} has probability 0; uniform numbers {inputs[b].tolist()}"
            )
        codes = np.where(counted, codes * model.vocab + tokens[:, i], 0)


def assert_target_distribution(
    tokens: np.ndarray,
    lengths: np.ndarray,
    model: TableModel,
    label: str,
    alpha: float,
    rng: np.random.Generator,
) -> None:
    """Check emitted tokens, continued by sampling from the model, against its distribution.

    Also checks that neighbours in the batch are independent.

    Args:
        tokens: [B, L] tokens of the model.
        lengths: [B] number of emitted tokens.
        model: the target.
        label: name of the case.
        alpha: false alarm rate of each test.
        rng: draws the continuation.
    Raises:
        AssertionError: see `assert_counts`.
    """
    vocab = model.vocab
    codes, distribution = np.zeros(len(tokens), dtype=np.int64), np.ones(1)
    for i in range(tokens.shape[1]):
        probs = model.probs(i)
        own = draw_tokens(probs[codes], rng)
        codes = codes * vocab + np.where(i < lengths, tokens[:, i], own)
        distribution = (distribution[:, None] * probs).ravel()
        counts = np.bincount(codes, minlength=len(distribution))
        what = f"{label}, first {i + 1} tokens of completed sequences"
        assert_counts(counts, distribution, what, alpha, partial(decode, vocab=vocab, length=i + 1))
    first = model.probs(0)[0]
    pairs = tokens[: len(tokens) // 2 * 2, 0].reshape(-1, 2)
    assert_counts(
        np.bincount(pairs[:, 0] * vocab + pairs[:, 1], minlength=vocab**2),
        np.outer(first, first),
        f"{label}, first tokens of neighbours in the batch",
        alpha,
        partial(decode, vocab=vocab, length=2),
    )
