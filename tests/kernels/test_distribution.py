"""What the verification ops emit follows the exact distributions of the losslessness kit."""

from functools import partial, wraps

import pytest
import torch

from fastspec_kernels import row_stats, sample, verify_chain, verify_tree
from fastspec_kernels.testing import (
    CHAIN_CASES,
    assert_draft_contract,
    assert_lossless,
    assert_lossless_tree,
    chain,
    rules,
    tree,
)

from .cases import backends_of, device_of, is_slow

METHODS = {"standard": rules.standard, "block": rules.block}
SIBLING_RULES = ("target_only", "without_replacement", "with_replacement")


@pytest.fixture(autouse=True, scope="module")
def laws_found_once():
    """For all backends: to enumerate a distribution takes longer than to draw from it."""

    def once(find):
        distributions = {}

        @wraps(find)
        def found(rule, target, draft, *shape):
            function = getattr(rule, "func", rule), repr(getattr(rule, "keywords", None))
            models = [tuple(units.tobytes() for units in model.units) for model in (target, draft)]
            key = *function, *models, shape
            if key not in distributions:
                distributions[key] = find(rule, target, draft, *shape)
            return distributions[key]

        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chain, "chain_distribution", once(chain.chain_distribution))
        patch.setattr(tree, "tree_distribution", once(tree.tree_distribution))
        yield


def fast_backends_of(op):
    """Interpreted kernels cannot draw often enough; they have the oracle."""
    return [name for name in backends_of(op) if not is_slow(name)]


def num_draws(backend):
    return 4_000 if backend == "reference" else 12_000


def with_draft_logsumexp(backend):
    """verify_chain as it is called where the drafter hands on the log-sum-exp of its rows."""

    def verify(draft_logits=None, **arguments):
        logsumexp = None
        if draft_logits is not None:
            batch, num_draft, _ = draft_logits.shape
            names = ("temperature", "top_k", "top_p", "min_p")
            params = {n: arguments[n].repeat_interleave(num_draft) for n in names if n in arguments}
            logsumexp, _ = row_stats(draft_logits.flatten(0, 1), **params)
            logsumexp = logsumexp.view(batch, num_draft)
        return verify_chain(
            draft_logits=draft_logits, draft_logsumexp=logsumexp, backend=backend, **arguments
        )

    return verify


@pytest.mark.parametrize("backend", fast_backends_of("verify_chain"))
@pytest.mark.parametrize("method", METHODS)
def test_chains_are_lossless(backend, method):
    verify = partial(verify_chain, method=method, backend=backend)
    assert_lossless(verify, num_draws=num_draws(backend), device=device_of(backend))


@pytest.mark.parametrize("backend", fast_backends_of("verify_chain"))
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", CHAIN_CASES)
def test_joint_law_of_chains(backend, method, case):
    assert_lossless(
        partial(verify_chain, method=method, backend=backend),
        rule=METHODS[method],
        cases=[case],
        edges=False,
        num_draws=num_draws(backend),
        device=device_of(backend),
    )


@pytest.mark.parametrize("backend", fast_backends_of("verify_chain"))
@pytest.mark.parametrize("case", ["random", "filtered_point_mass"])
def test_joint_law_of_chains_with_lenience(backend, case):
    assert_lossless(
        partial(verify_chain, lenience=1.5, backend=backend),
        rule=partial(rules.standard, lenience=1.5),
        cases=[case],
        edges=False,
        num_draws=num_draws(backend),
        device=device_of(backend),
    )


@pytest.mark.parametrize("backend", fast_backends_of("verify_chain"))
def test_joint_law_of_chains_with_logsumexp(backend):
    assert_lossless(
        with_draft_logsumexp(backend),
        rule=rules.standard,
        cases=["random", "disjoint", "filtered"],
        edges=False,
        num_draws=num_draws(backend),
        device=device_of(backend),
    )


@pytest.mark.parametrize("backend", fast_backends_of("verify_tree"))
@pytest.mark.parametrize("sibling_rule", SIBLING_RULES)
def test_trees_are_lossless(backend, sibling_rule):
    assert_lossless_tree(
        partial(verify_tree, backend=backend),
        sibling_rule,
        num_draws=num_draws(backend) // 4,
        device=device_of(backend),
    )


@pytest.mark.parametrize("backend", fast_backends_of("verify_tree"))
@pytest.mark.parametrize("sibling_rule", SIBLING_RULES)
def test_joint_law_of_trees(backend, sibling_rule):
    assert_lossless_tree(
        partial(verify_tree, backend=backend),
        sibling_rule,
        rule=getattr(rules, sibling_rule),
        cases=["random", "filtered"],
        edges=False,
        num_draws=num_draws(backend) // 4,
        device=device_of(backend),
    )


@pytest.mark.parametrize("backend", fast_backends_of("sample"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_proposals_of_sample_keep_the_draft_contract(backend, dtype):
    """Claimed by the very row that was drawn from; in another precision it would not hold."""
    generator = torch.Generator().manual_seed(4)
    num, vocab = num_draws(backend), 40
    logits = (torch.randn(num, vocab, generator=generator) * 4 + 40).to(dtype)
    uniform = torch.rand(num, generator=generator)
    device = device_of(backend)
    token_ids, _ = sample(logits.to(device), uniform.to(device), backend=backend)
    assert_draft_contract(token_ids.cpu(), logits.double().softmax(-1))


def test_a_draft_rounded_to_bfloat16_breaks_the_contract():
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(100_000, 40, generator=generator) * 4 + 300
    token_ids, _ = sample(logits.bfloat16(), torch.rand(len(logits), generator=generator))
    with pytest.raises(AssertionError, match="do not follow the distribution"):
        assert_draft_contract(token_ids, logits.softmax(-1))
