"""What the benchmarks feed: the three kinds of rows, draws, trees."""

import pytest
import torch

from benchmarks import inputs

VOCAB = 2000


def rows(kind, dtype=torch.float32, num=3):
    return inputs.make_logits(kind, num, VOCAB, dtype, torch.Generator().manual_seed(0))


def test_zipf_rows_have_its_exponent_and_no_common_best_token():
    logits = rows("zipf")
    ordered = logits.sort(descending=True).values
    ranks = torch.arange(1, VOCAB + 1).log()
    slope = torch.linalg.lstsq(
        torch.stack([ranks, torch.ones(VOCAB)], -1).expand(3, -1, -1), ordered[..., None]
    ).solution[:, 0, 0]
    assert slope.tolist() == pytest.approx([-1.1] * 3, abs=0.02)
    assert len(set(logits.argmax(-1).tolist())) == 3


def test_peaked_rows_give_their_best_token_nine_tenths():
    assert rows("peaked").softmax(-1).amax(-1).tolist() == pytest.approx([0.9] * 3, abs=0.01)


def test_flat_rows_are_flat():
    assert float(rows("flat").softmax(-1).max()) < 0.05


@pytest.mark.parametrize("kind", ["zipf", "peaked", "flat"])
def test_rows_in_bfloat16(kind):
    logits = rows(kind, torch.bfloat16)
    assert logits.dtype == torch.bfloat16
    torch.testing.assert_close(logits, rows(kind).bfloat16())


def test_draws_stay_within_the_filters():
    logits = rows("flat")
    values = {"temperature": 0.8, "top_k": 5, "top_p": 0.9}
    tokens = inputs.draw_tokens(logits, values, 4, True, torch.Generator().manual_seed(0))
    kept = logits.topk(5).indices
    assert all(int(token) in kept[row] for row in range(3) for token in tokens[row])


def test_siblings_without_replacement_differ():
    tokens = inputs.draw_tokens(
        rows("peaked"), {"top_p": 0.5}, 2, False, torch.Generator().manual_seed(0)
    )
    assert (tokens[:, 0] != tokens[:, 1]).all()


def test_binary_tree():
    assert inputs.binary_tree(7).tolist() == [-1, 0, 0, 1, 1, 2, 2]
