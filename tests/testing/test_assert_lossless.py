"""assert_lossless passes what is lossless and catches what is not."""

from functools import partial

import pytest
import torch

from fastspec_kernels import verify_chain, verify_tree
from fastspec_kernels.testing import (
    CHAIN_CASES,
    CHAIN_EDGES,
    assert_chain_edge,
    assert_lossless,
    assert_lossless_tree,
    rules,
)

from . import broken_rules
from .plain_verifiers import chain_verifier, tree_verifier

FEW = {"num_draws": 4_000, "vocab_size": 12}  # plain Python is slow


@pytest.mark.parametrize("rule", [rules.standard, rules.block])
def test_passes_the_rules_in_plain_python(rule):
    verify = chain_verifier(rule)
    assert_lossless(verify, **FEW)
    assert_lossless(verify, rule=rule, **FEW, cases=["random", "point_mass"])


@pytest.mark.parametrize(
    ("rule", "case"),
    [
        (broken_rules.without_subtraction, "random"),
        (broken_rules.without_subtraction, "point_mass"),
        (broken_rules.models_swapped, "random"),
        (broken_rules.models_swapped, "disjoint"),
        (broken_rules.shared_uniform, "random"),
        (broken_rules.shared_uniform, "point_mass"),
        (broken_rules.drawn_again, "point_mass"),
        (broken_rules.always_accepted, "filtered"),
        (broken_rules.one_number_for_all, "random"),
        (broken_rules.without_subtraction, "filtered_point_mass"),
        (broken_rules.bonus_of_the_last_row, "random"),
        (broken_rules.bonus_of_the_last_row, "equal"),
        (broken_rules.block_of(stops_early=True), "random"),
        (broken_rules.block_of(plain_residual=True), "random"),
        (partial(rules.standard, lenience=1.5), "random"),
    ],
)
def test_catches_broken_rules(rule, case):
    with pytest.raises(AssertionError, match=f"^{case}.*(expected|probability 0)"):
        assert_lossless(chain_verifier(rule), cases=[case], edges=False, **FEW)


@pytest.mark.parametrize("rule", [broken_rules.not_strict, broken_rules.block_of(inclusive=True)])
def test_edges_catch_a_number_of_zero_that_accepts_what_is_impossible(rule):
    verify = chain_verifier(rule)
    assert_lossless(verify, cases=["random"], edges=False, **FEW)  # no float is 0 among so few
    with pytest.raises(AssertionError, match="a uniform number of 0"):
        assert_lossless(verify)


@pytest.mark.parametrize(
    ("rule", "claimed"), [(rules.standard, rules.block), (rules.block, rules.standard)]
)
def test_joint_law_tells_lossless_rules_apart(rule, claimed):
    with pytest.raises(AssertionError, match="accepted_len: the counts do not follow"):
        assert_lossless(chain_verifier(rule), rule=claimed, cases=["random"], edges=False, **FEW)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda output, accepted_len: (output[:, :-1], accepted_len), "output of shape"),
        (lambda output, accepted_len: (output, accepted_len + 1), "accepted_len"),
        (lambda output, accepted_len: (output.clamp(min=0), accepted_len), "followed by -1"),
        (lambda output, accepted_len: (output.flip(0), accepted_len.flip(0)), "accepted"),
        (lambda output, accepted_len: (output + (output >= 0), accepted_len), "accepted other"),
    ],
)
def test_catches_outputs_of_the_wrong_form(spoil, message):
    def verify(**arguments):
        output, accepted_len, _ = verify_chain(**arguments)
        return spoil(output, accepted_len)

    with pytest.raises(AssertionError, match=message):
        assert_lossless(verify, edges=False, num_draws=1000)


def test_catches_one_number_shared_by_neighbours():
    """A number used for two sequences leaves each of them alone exact."""

    def verify(uniform_samples, **arguments):
        shared = uniform_samples[::2].repeat_interleave(2, 0)
        return verify_chain(uniform_samples=shared, **arguments)

    with pytest.raises(AssertionError, match="neighbours in the batch"):
        assert_lossless(verify, cases=["point_mass"], edges=False, num_draws=50_000)


def test_catches_a_greedy_sequence_that_samples():
    def verify(temperature=None, **arguments):
        warm = None if temperature is None else temperature.clamp(min=0.5)
        return verify_chain(temperature=warm, **arguments)

    with pytest.raises(AssertionError, match="greedy sequence"):
        assert_lossless(verify, cases=["filtered"], edges=False, num_draws=1000)


@pytest.mark.parametrize("name", ["temperature", "top_k", "top_p", "min_p"])
def test_catches_a_parameter_that_is_ignored(name):
    def verify(**arguments):
        if name in arguments and name != "temperature":
            arguments.pop(name)
        elif name in arguments:
            greedy = arguments[name] == 0
            arguments[name] = torch.where(greedy, 0.0, 1.0)
        return verify_chain(**arguments)

    with pytest.raises(AssertionError, match="filtered"):
        assert_lossless(verify, cases=["filtered"], edges=False, num_draws=20_000)


def test_an_adapter_with_its_own_random_numbers():
    """For a verifier of rectangular probabilities; the one of the docstring."""
    generator = torch.Generator().manual_seed(3)

    def theirs(draft_probs, draft_token_ids, target_probs):
        index = draft_token_ids.long()[..., None]
        ratio = (target_probs[:, :-1].gather(-1, index) / draft_probs.gather(-1, index))[..., 0]
        accepted = torch.rand(ratio.shape, generator=generator) < ratio
        accepted_len = accepted.long().cumprod(-1).sum(-1)
        rows = torch.arange(len(index))
        padded = torch.nn.functional.pad(draft_probs, (0, 0, 0, 1))
        rest = (target_probs[rows, accepted_len] - padded[rows, accepted_len]).clamp(min=0)
        extra = rest.multinomial(1, generator=generator)
        steps = torch.arange(target_probs.shape[1])
        output = torch.nn.functional.pad(draft_token_ids.long(), (0, 1))
        output = torch.where(steps == accepted_len[:, None], extra, output)
        return output.masked_fill(steps > accepted_len[:, None], -1), accepted_len

    def verify(target_logits, cu_rows, draft_token_ids, uniform_samples, draft_logits):
        batch, num = draft_token_ids.shape
        target_probs = target_logits.softmax(-1).view(batch, num + 1, -1)
        return theirs(draft_logits.softmax(-1), draft_token_ids, target_probs)

    options = {"cases": ["random", "disjoint"], "edges": False, "ragged": False}
    assert_lossless(verify, num_draws=20_000, **options)


def test_unknown_arguments():
    with pytest.raises(ValueError, match="cases"):
        assert_lossless(verify_chain, cases=["tree"], edges=False)
    with pytest.raises(ValueError, match="vocab_size"):
        assert_lossless(verify_chain, vocab_size=5, edges=False)
    with pytest.raises(ValueError, match="sibling_rule"):
        assert_lossless_tree(verify_tree, "beam")


@pytest.mark.parametrize(
    ("rule", "siblings"),
    [
        (rules.without_replacement, "with_replacement"),
        (rules.with_replacement, "without_replacement"),
        (broken_rules.every_sibling_alike, "without_replacement"),
        (broken_rules.every_sibling_alike, "with_replacement"),
        (broken_rules.repeated_siblings_count_again, "target_only"),
        (broken_rules.siblings_not_zeroed, "target_only"),
        (broken_rules.draft_not_taken_away, "without_replacement"),
        (broken_rules.one_coin_for_all_siblings, "without_replacement"),
    ],
)
def test_catches_broken_tree_rules(rule, siblings):
    with pytest.raises(AssertionError, match=r"^random, parents .*(expected|probability 0)"):
        assert_lossless_tree(tree_verifier(rule), siblings, cases=["random"], edges=False, **FEW)


def test_edges_catch_a_child_of_probability_zero_and_a_repeated_one():
    for rule, message in (
        (broken_rules.coin_zero_accepts, "a uniform number of 0"),
        (broken_rules.repeated_siblings_count_again, "same token counts again"),
    ):
        with pytest.raises(AssertionError, match=message):
            assert_lossless_tree(tree_verifier(rule), "target_only")


@pytest.mark.parametrize("siblings", ["target_only", "without_replacement", "with_replacement"])
def test_passes_the_tree_rules_in_plain_python(siblings):
    rule = getattr(rules, siblings)
    verify = tree_verifier(rule)
    few = {"edges": False, "num_draws": 1500, "vocab_size": 12}
    assert_lossless_tree(verify, siblings, cases=["random", "disjoint"], **few)
    assert_lossless_tree(verify, siblings, rule=rule, cases=["random"], **few)


def test_every_case_name_is_run():
    seen = []

    def verify(**arguments):
        seen.append(sorted(name for name, value in arguments.items() if value is not None))
        return verify_chain(**arguments)

    assert_lossless(verify, edges=False, num_draws=1000)
    assert len(seen) == len(CHAIN_CASES)
    assert sum("draft_logits" in names for names in seen) == 4
    assert sum("min_p" in names for names in seen) == 2


def test_edge_message_names_the_case_and_both_answers():
    def verify(**arguments):
        return torch.full((1, 2), 7), torch.zeros(1)

    with pytest.raises(AssertionError, match=r"probability 0: .*\(\(7, 7\), 0\), expected"):
        assert_chain_edge(verify, CHAIN_EDGES[0])


@pytest.mark.parametrize(
    ("field", "value"), [("cases", ()), ("num_draws", 50), ("alpha", 0.0), ("alpha", 1.5)]
)
def test_refuses_to_test_nothing(field, value):
    with pytest.raises(ValueError, match=f"^{field}: "):
        assert_lossless(verify_chain, **{field: value})
