"""The most probable tokens of a place: in an order that depends on nothing but their logits."""

import pytest
import torch

from fastspec import Engine, SamplingParams
from fastspec.engine.verify import largest

from ..models import random_model


def test_of_equally_probable_tokens_the_lowest_come_first():
    """Whatever others ask for; the greedy token is the first of them."""
    tied = (152, 75, 243, 20)
    biases = dict.fromkeys(tied, 3e38)  # which swallows the logits
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=2, logit_bias=biases)
    engine = Engine(random_model("llama"))
    for others in ([], [3], [4, 5], [20]):
        beside = [SamplingParams(temperature=0, max_tokens=3, logprobs=num) for num in others]
        output = engine.generate([[5, 6, 7]] * (1 + len(others)), [params, *beside])[0]
        assert output.token_ids == (20, 20, 20)
        assert [list(top) for top in output.top_logprobs] == [[20, 75]] * 3
        assert all(len({*top.values()}) == 1 for top in output.top_logprobs)


def test_values_descend_from_the_greedy_token():
    params = SamplingParams(temperature=0, max_tokens=40, logprobs=20, prompt_logprobs=20)
    half = random_model("llama").bfloat16()  # in which many logits are equal
    (output,) = Engine(half).generate([[5, 6, 7, 30, 2]], params)
    for token_id, top in zip(output.token_ids, output.top_logprobs, strict=True):
        assert next(iter(top)) == token_id
    for top in (*output.top_logprobs, *output.prompt_logprobs[1:]):
        pairs = list(top.items())[:20]
        assert pairs == sorted(pairs, key=lambda pair: (-pair[1], pair[0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_largest(dtype):
    logits = torch.randint(-3, 4, (8, 50)).to(dtype)
    logits[1] = 2.0
    logits[2, 5:] = -torch.inf
    logits[3] = torch.randn(50).to(dtype)
    for counts in ([0] * 8, [0, 1, 5, 7, 20, 49, 50, 60], [3] * 8, [60] * 8):
        for own, count, row in zip(largest(logits, counts), counts, logits.tolist(), strict=True):
            ordered = sorted(enumerate(row), key=lambda pair: (-pair[1], pair[0]))
            known = [pair for pair in ordered[:count] if pair[1] > -torch.inf]
            assert own[: len(known)] == known
            assert len(own) == min(count, 50)
