"""Chi-square of what verify_chain emits, jointly with accepted_len, against the exact law.

The false-alarm rate is 1e-6 per test; seeds are fixed. The same statistic must reject every broken
rule of chain_rules on the same draws.
"""

import itertools

import numpy as np
import pytest
import torch

from fastspec_kernels import verify_chain

from . import chain_rules, oracle
from .cases import backends_of, device_of
from .chi_square import p_value

VOCAB, NUM_DRAFT = 8, 3
ALPHA = 1e-6
FILTERS = {"temperature": 0.8, "top_k": 7, "top_p": 0.95, "min_p": 0.01}
FILTER_DTYPES = {"top_k": torch.int32}  # the others follow the value
DRAFTS = ["certain", "random", "equal", "disjoint"]


class Setup:
    """Fixed rows for every position, and many proposals and uniform numbers."""

    def __init__(self, draft: str, filtered: bool, num_draws: int = 30_000):
        generator = torch.Generator().manual_seed(0)
        self.target_logits = torch.randn(NUM_DRAFT + 1, VOCAB, generator=generator) * 1.5
        self.draft_logits = torch.randn(NUM_DRAFT, VOCAB, generator=generator) * 1.5
        if draft == "equal":
            self.draft_logits = self.target_logits[:NUM_DRAFT].clone()
        elif draft == "disjoint":
            self.target_logits[:NUM_DRAFT, : VOCAB // 2] = -torch.inf
            self.draft_logits[:, VOCAB // 2 :] = -torch.inf
        self.certain = draft == "certain"
        self.params = FILTERS if filtered else {}
        self.target = self._probs(self.target_logits)  # [K+1, V]
        self.draft = self._probs(self.draft_logits)  # [K, V]
        shape = (num_draws, NUM_DRAFT + 1)
        self.uniform_samples = torch.rand(shape, generator=generator)
        proposing = torch.rand(shape, generator=generator, dtype=torch.float64).numpy()
        steps = self.draft.cumsum(-1)
        bounds = (proposing[:, :NUM_DRAFT] * steps[:, -1]).T
        columns = [np.searchsorted(*pair, "right") for pair in zip(steps, bounds, strict=True)]
        self.tokens = np.stack(columns, axis=1).astype(np.int32)

    def _probs(self, logits):
        return np.stack([oracle.row(row.double().numpy(), **self.params).probs for row in logits])


def exact_law(setup: Setup, lenience: float = 1.0) -> np.ndarray:
    """Probability of each cell (emitted tokens; the number of them is accepted_len + 1)."""
    law = np.zeros(num_cells())
    for num in range(NUM_DRAFT + 1):
        for tokens in itertools.product(range(VOCAB), repeat=num + 1):
            probability = 1.0
            for i, token in enumerate(tokens[:num]):
                probability *= accepted_share(setup, i, lenience)[token]
            if num < NUM_DRAFT:
                probability *= recovered_share(setup, num, lenience)[tokens[-1]]
            else:
                probability *= setup.target[num][tokens[-1]]
            law[cell(tokens)] = probability
    return law


def accepted_share(setup, i, lenience):
    """Probability that a token is proposed and accepted at position i."""
    target, draft = lenience * setup.target[i], setup.draft[i]
    return draft * np.minimum(target, 1) if setup.certain else np.minimum(target, draft)


def recovered_share(setup, i, lenience):
    """Probability that position i rejects and emits a token in place."""
    target, draft = lenience * setup.target[i], setup.draft[i]
    rejected = draft - accepted_share(setup, i, lenience)
    if setup.certain:
        rests = [np.maximum(target - (np.arange(VOCAB) == token), 0) for token in range(VOCAB)]
        return sum(
            share * (rest / rest.sum() if rest.sum() > 0 else setup.target[i])
            for share, rest in zip(rejected, rests, strict=True)
        )
    rest = np.maximum(target - draft, 0)
    return rejected.sum() * (rest / rest.sum()) if rejected.sum() > 1e-12 else np.zeros(VOCAB)


def cell(tokens) -> int:
    """Index of a sequence of 1 to K+1 tokens."""
    index = 0
    for token in tokens:
        index = index * (VOCAB + 1) + int(token) + 1
    return index


def num_cells() -> int:
    return (VOCAB + 1) ** (NUM_DRAFT + 1)


def count(output: np.ndarray) -> np.ndarray:
    """Histogram of the rows of an output, padded with -1."""
    index = np.zeros(len(output), dtype=np.int64)
    for column in output.T:
        index = np.where(column >= 0, index * (VOCAB + 1) + column + 1, index)
    return np.bincount(index, minlength=num_cells())


def run(setup: Setup, backend: str, lenience: float = 1.0) -> np.ndarray:
    """The draws through the op, as one batch; output and accepted_len must tell the same."""
    device = device_of(backend)
    num, rows = len(setup.tokens), NUM_DRAFT + 1
    params = {
        name: torch.full((num,), value, dtype=FILTER_DTYPES.get(name), device=device)
        for name, value in setup.params.items()
    }
    draft_logits = setup.draft_logits.to(device).expand(num, NUM_DRAFT, VOCAB)
    output, accepted_len, _ = verify_chain(
        setup.target_logits.to(device).repeat(num, 1),
        (torch.arange(num + 1, dtype=torch.int32) * rows).to(device),
        torch.from_numpy(setup.tokens).to(device),
        setup.uniform_samples.to(device),
        draft_logits=None if setup.certain else draft_logits,
        lenience=lenience,
        backend=backend,
        **params,
    )
    assert ((output >= 0).sum(-1) == accepted_len + 1).all()
    return output.cpu().numpy()


def simulate(setup: Setup, rule) -> np.ndarray:
    """The same draws through a rule of chain_rules."""
    output = np.full((len(setup.tokens), NUM_DRAFT + 1), -1)
    target, draft = setup.target.tolist(), setup.draft.tolist()
    one_hot = np.eye(VOCAB).tolist()
    samples, tokens = setup.uniform_samples.double().tolist(), setup.tokens.tolist()
    for n in range(len(output)):
        extra = samples[n][-1]
        for i in range(NUM_DRAFT):
            token = tokens[n][i]
            row = one_hot[token] if setup.certain else draft[i]
            emitted, accepted = rule(target[i], row, token, samples[n][i], extra)
            output[n, i] = emitted
            if not accepted:
                break
        else:
            output[n, NUM_DRAFT] = chain_rules.inverse_cdf(target[NUM_DRAFT], extra)
    return output


def num_draws(backend: str) -> int:
    """Fewer where they are slow."""
    return 30_000 if backend == "reference" else 200_000


@pytest.mark.parametrize("backend", backends_of("verify_chain"))
@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("draft", DRAFTS)
def test_joint_law(backend, draft, filtered):
    setup = Setup(draft, filtered, num_draws(backend))
    law = exact_law(setup)
    assert law.sum() == pytest.approx(1)
    assert p_value(count(run(setup, backend)), law) > ALPHA


@pytest.mark.parametrize("backend", backends_of("verify_chain"))
@pytest.mark.parametrize("draft", ["certain", "random"])
def test_joint_law_with_lenience(backend, draft):
    setup = Setup(draft, True, num_draws(backend))
    law = exact_law(setup, lenience=1.5)
    assert law.sum() == pytest.approx(1)
    assert p_value(count(run(setup, backend, lenience=1.5)), law) > ALPHA


def test_statistic_passes_the_standard_rule():
    setup = Setup("random", filtered=True)
    assert p_value(count(simulate(setup, chain_rules.standard)), exact_law(setup)) > ALPHA


@pytest.mark.parametrize(
    ("draft", "rule"),
    [
        ("random", chain_rules.without_subtraction),
        ("random", chain_rules.models_swapped),
        ("random", chain_rules.shared_uniform),
        ("random", chain_rules.always_accepted),
        ("certain", chain_rules.without_subtraction),
        ("certain", chain_rules.shared_uniform),
        ("certain", chain_rules.drawn_again),
        ("disjoint", chain_rules.models_swapped),
    ],
)
def test_statistic_rejects_broken_rules(draft, rule):
    setup = Setup(draft, filtered=True)
    assert p_value(count(simulate(setup, rule)), exact_law(setup)) < ALPHA
