"""Statistical proof that a verifier of chains preserves the target's distribution."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from fastspec_kernels.testing.draws import (
    Vocabulary,
    assert_possible,
    assert_target_distribution,
    draw_tokens,
    sampling_parameters,
    scatter,
)
from fastspec_kernels.testing.edge_tables import CHAIN_EDGES
from fastspec_kernels.testing.edges import assert_chain_edge
from fastspec_kernels.testing.enumeration import chain_distribution
from fastspec_kernels.testing.models import TableModel, decode, encode, random_model
from fastspec_kernels.testing.rules import ChainRule
from fastspec_kernels.testing.statistics import ALPHA, assert_counts, require_a_test

NUM_PROPOSALS = 3
VOCAB = 4
TARGET_SEED, DRAFT_SEED = 234, 235  # a pair that exposes every known mistake
CHAIN_CASES = (
    "random",
    "equal",
    "disjoint",
    "point_mass",
    "filtered",
    "filtered_point_mass",
)


@dataclass(frozen=True)
class ChainDraws:
    """One case of `assert_lossless`: two models, and a batch of proposals from one of them."""

    label: str
    target: TableModel
    draft: TableModel
    vocabulary: Vocabulary
    proposals: np.ndarray  # [B, K] tokens of the model
    num: np.ndarray  # [B] number of proposals
    uniforms: np.ndarray  # [B, K+1] float32
    parameters: dict[str, np.ndarray]  # of each sequence, or empty

    @property
    def point_mass(self) -> bool:
        """Whether the verifier is told that proposals are point masses."""
        return self.label.endswith("point_mass")

    @property
    def greedy(self) -> np.ndarray:
        """Which sequences [B] are greedy."""
        return self.parameters.get("temperature", np.ones(len(self.num))) == 0

    @cached_property
    def codes(self) -> np.ndarray:
        """Code [B, K+1] of the prefix before each row."""
        codes = np.zeros((len(self.num), NUM_PROPOSALS + 1), dtype=np.int64)
        for i in range(NUM_PROPOSALS):
            codes[:, i + 1] = codes[:, i] * VOCAB + self.proposals[:, i]
        return codes

    def arguments(self, device: str) -> dict[str, Any]:
        """Make the arguments of verify_chain."""
        steps = np.arange(NUM_PROPOSALS + 1)
        temperature = self.parameters.get("temperature", np.ones(len(self.num)))
        used = steps <= self.num[:, None]  # [B, K+1] rows that exist
        temperatures = np.broadcast_to(temperature[:, None], used.shape)
        target = [self.target.probs(i)[self.codes[:, i]] for i in range(NUM_PROPOSALS + 1)]
        draft = [self.draft.probs(i)[self.codes[:, i]] for i in range(NUM_PROPOSALS)]
        ids = self.vocabulary.ids[self.proposals]
        arguments = {
            "target_logits": self.vocabulary.logits(np.stack(target, 1)[used], temperatures[used]),
            "cu_rows": torch.from_numpy(np.append(0, np.cumsum(self.num + 1)).astype(np.int32)),
            "draft_token_ids": torch.from_numpy(np.where(used[:, 1:], ids, -1).astype(np.int32)),
            "uniform_samples": torch.from_numpy(self.uniforms),
            "draft_logits": None
            if self.point_mass
            else self.vocabulary.logits(np.stack(draft, 1), temperatures[:, 1:]),
            **{name: torch.from_numpy(value) for name, value in self.parameters.items()},
        }
        return {
            name: None if value is None else value.to(device) for name, value in arguments.items()
        }


def assert_lossless(
    verify: Callable[..., Any],
    *,
    rule: ChainRule | None = None,
    cases: Collection[str] = CHAIN_CASES,
    edges: bool = True,
    ragged: bool = True,
    num_draws: int = 100_000,
    vocab_size: int = 37,
    device: str = "cpu",
    alpha: float = ALPHA,
) -> None:
    """Check that the output of a verifier of chains has the target's distribution.

    `verify` is called like `fastspec_kernels.verify_chain`:

        verify(target_logits=, cu_rows=, draft_token_ids=, uniform_samples=, draft_logits=, ...)
            -> (output_token_ids, accepted_len, ...)

    with temperature, top_k, top_p and min_p only in the "filtered" cases, and draft_logits=None in
    the "point_mass" cases. Other verifiers are checked through an adapter. For example, for one
    that takes probabilities of a rectangular batch and uses its own random numbers:

        def verify(target_logits, cu_rows, draft_token_ids, uniform_samples, draft_logits):
            batch, num = draft_token_ids.shape
            target_probs = target_logits.softmax(-1).view(batch, num + 1, -1)
            return theirs(draft_logits.softmax(-1), draft_token_ids, target_probs)

        assert_lossless(verify, cases=["random", "equal", "disjoint"], edges=False, ragged=False)

    Each case is one batch of independent draws. Models are tables whose distributions differ from
    prefix to prefix; their four tokens are scattered over a larger vocabulary. The emitted tokens,
    continued by sampling from the target, must follow the target's distribution of sequences; this
    exposes a wrong distribution of the extra token, and one that depends on what was accepted. A
    verifier that emits a wrong number of tokens, or a token of probability 0, fails at once.

    Args:
        verify: the verifier.
        rule: check the joint distribution of emitted tokens and accepted_len against this rule, for
            example `rules.standard` or `rules.block`. Only the joint distribution is then checked,
            so a rule may be lossy on purpose.
        cases: which of `CHAIN_CASES` to run; "equal" and "disjoint" say how the draft compares to
            the target; "filtered" gives each sequence different parameters, some of them greedy.
        edges: also run `CHAIN_EDGES`, where given uniform numbers allow only one right answer; not
            for verifiers that use their own numbers, or do not support greedy sequences.
        ragged: include sequences with fewer proposals, or none.
        num_draws: sequences per case; 100000 detect a total variation of about 0.02.
        vocab_size: at least 12.
        device: device of the tensors.
        alpha: false alarm rate of each test; seeds are fixed, so a deterministic verifier that
            passes once always passes.
    Raises:
        AssertionError: names the case, the distribution, the p value, and observed and expected
            counts.
        ValueError: nothing to test: no cases, fewer than 1000 draws, or alpha outside (0, 1).
    """
    require_a_test(cases, num_draws, alpha)
    if edges:
        for edge in CHAIN_EDGES:
            assert_chain_edge(verify, edge, device)
    for case in cases:
        draws = chain_draws(case, num_draws, vocab_size, ragged)
        output, accepted_len = verify(**draws.arguments(device))[:2]
        tokens = _checked_tokens(draws, _to_numpy(output), _to_numpy(accepted_len))
        _assert_greedy(draws, tokens)
        sampled = ~draws.greedy
        tokens, lengths = tokens[sampled], (_to_numpy(accepted_len) + 1)[sampled]
        if rule is not None:
            _assert_joint_distribution(draws, rule, tokens, alpha)
            continue
        assert_possible(tokens, lengths, draws.target, case, draws.uniforms[sampled])
        rng = np.random.default_rng(1)
        assert_target_distribution(tokens, lengths, draws.target, case, alpha, rng)


def chain_draws(case: str, num_draws: int, vocab_size: int, ragged: bool) -> ChainDraws:
    """Make the batch of one case.

    Args:
        case: one of `CHAIN_CASES`.
        num_draws, vocab_size, ragged: see `assert_lossless`.
    Returns:
        The batch; equal arguments give equal batches.
    """
    if case not in CHAIN_CASES:
        raise ValueError(f"cases: expected some of {CHAIN_CASES}, got {case!r}")
    rng = np.random.default_rng(0)
    filtered = case.startswith("filtered")
    units = {"total": 8, "minimum": int(filtered)}
    halves = ((0, 1), (2, 3)) if case == "disjoint" else (None, None)
    target = random_model(TARGET_SEED, VOCAB, NUM_PROPOSALS, tokens=halves[0], **units)
    draft = random_model(DRAFT_SEED, VOCAB, NUM_PROPOSALS, tokens=halves[1], **units)
    if case == "equal":
        draft = target
    proposals, codes = [], np.zeros(num_draws, dtype=np.int64)
    for i in range(NUM_PROPOSALS):
        proposals.append(draw_tokens(draft.probs(i)[codes], rng))
        codes = codes * VOCAB + proposals[-1]
    num = np.full(num_draws, NUM_PROPOSALS)
    if ragged:
        num = np.minimum(rng.integers(NUM_PROPOSALS + 2, size=num_draws), NUM_PROPOSALS)
    return ChainDraws(
        case,
        target,
        draft,
        scatter(target, vocab_size, filtered, rng),
        np.stack(proposals, axis=1),
        num,
        rng.random((num_draws, NUM_PROPOSALS + 1), dtype=np.float32),
        sampling_parameters(num_draws, VOCAB) if filtered else {},
    )


def _to_numpy(tensor) -> np.ndarray:
    return torch.as_tensor(tensor).cpu().numpy()


def _checked_tokens(draws: ChainDraws, output: np.ndarray, accepted_len: np.ndarray) -> np.ndarray:
    """Check the form of an output, and return its tokens of the model."""
    label, steps = draws.label, np.arange(NUM_PROPOSALS + 1)
    shape = (len(draws.num), NUM_PROPOSALS + 1)
    assert output.shape == shape, f"{label}: output of shape {output.shape}, expected {shape}"
    emitted = steps <= accepted_len[:, None]
    accepted = steps[:-1] < accepted_len[:, None]
    tokens = draws.vocabulary.tokens(output)
    for wrong, what in (
        ((accepted_len < 0) | (accepted_len > draws.num), "accepted_len out of range"),
        (((output >= 0) != emitted).any(-1), "not accepted_len + 1 tokens followed by -1"),
        ((accepted & (tokens[:, :-1] != draws.proposals)).any(-1), "accepted other tokens"),
    ):
        if wrong.any():
            b = int(wrong.argmax())
            raise AssertionError(
                f"{label}: sequence {b}: {what}: output {output[b].tolist()}, accepted_len"
                f" {accepted_len[b]}, proposals"
                f" {draws.vocabulary.ids[draws.proposals[b, : draws.num[b]]].tolist()}"
            )
    return tokens


def _assert_greedy(draws: ChainDraws, tokens: np.ndarray) -> None:
    """Check that greedy sequences accept argmaxes, and emit the argmax after them."""
    greedy = np.flatnonzero(draws.greedy)
    going = np.ones(len(greedy), dtype=bool)
    for i in range(NUM_PROPOSALS + 1):
        best = draws.target.units[i][draws.codes[greedy, i]].argmax(-1)
        wrong = going & (tokens[greedy, i] != best)
        if wrong.any():
            b = int(greedy[wrong.argmax()])
            raise AssertionError(
                f"{draws.label}: greedy sequence {b} with proposals {draws.proposals[b].tolist()}"
                f" emits {tokens[b].tolist()}; number {i} is not the target's argmax"
            )
        if i < NUM_PROPOSALS:
            going &= (i < draws.num[greedy]) & (draws.proposals[greedy, i] == best)


def _assert_joint_distribution(
    draws: ChainDraws, rule: ChainRule, tokens: np.ndarray, alpha: float
) -> None:
    """Compare emitted tokens, hence accepted_len, with the exact distribution of a rule."""
    base, length = VOCAB + 1, NUM_PROPOSALS + 1
    distribution = np.zeros(base**length)
    num = draws.num[~draws.greedy]
    for count in np.unique(num):
        joint = chain_distribution(rule, draws.target, draws.draft, int(count), draws.point_mass)
        for emitted, probability in joint.items():
            padded = (*emitted, *[-1] * (length - len(emitted)))
            cell = encode(tuple(token + 1 for token in padded), base)
            distribution[cell] += float(probability) * (num == count).mean()
    cells = (tokens + 1) @ base ** np.arange(length - 1, -1, -1)

    def name(cell: int) -> tuple[int, ...]:
        return tuple(digit - 1 for digit in decode(cell, base, length) if digit > 0)

    counts = np.bincount(cells, minlength=len(distribution))
    assert_counts(counts, distribution, f"{draws.label}, tokens and accepted_len", alpha, name)
