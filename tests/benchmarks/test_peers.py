"""The peers do the work that they stand for."""

import pytest
import torch

from benchmarks import inputs, peers
from benchmarks.cases import SAMPLING


def rows(num=6):
    return inputs.make_logits("zipf", num, 500, torch.float32, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("sampling", SAMPLING)
def test_one_sort_draws_from_the_distribution_of_the_warpers(sampling):
    logits = rows(1).expand(4000, -1)
    kept = peers.hf_probs(logits[:1], SAMPLING[sampling])[0]
    tokens = peers.torch_sample(logits.clone(), SAMPLING[sampling])[:, 0]
    assert (kept[tokens] > 0).all()
    seen = torch.bincount(tokens, minlength=500) / len(tokens)
    assert float((seen - kept).abs().sum()) / 2 < 0.2


def test_warpers_leave_the_logits_as_they_are():
    logits = rows()
    before = logits.clone()
    peers.hf_probs(logits, SAMPLING["filtered"])
    assert torch.equal(logits, before)


@pytest.mark.parametrize("older", [False, True])
def test_the_rule_of_two_generations_of_transformers(older, monkeypatch):
    seen = []

    def newer_rule(ids, draft, length, target):
        seen.append((ids.shape, draft.shape, length, target.shape))

    def older_rule(ids, draft, length, target, is_done_candidate):
        assert is_done_candidate is False
        newer_rule(ids, draft, length, target)

    monkeypatch.setattr(peers, "_speculative_sampling", older_rule if older else newer_rule)
    target, draft = rows().view(2, 3, 500), rows(4).view(2, 2, 500)
    peers.hf_chain(target, draft, torch.zeros(2, 2, dtype=torch.int32), {})
    assert seen == [((1, 2), (1, 2, 500), 2, (1, 3, 500))] * 2
