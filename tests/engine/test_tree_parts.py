"""The parts that token trees are made of, each alone."""

import pytest
import torch

from fastspec import SamplingParams
from fastspec.config.tree_shapes import TreeShape, balanced_shape
from fastspec.drafters import CapePlan
from fastspec.drafters.base import SamplingTensors
from fastspec.drafters.tree.grow import best_nodes, with_chain
from fastspec.drafters.tree.siblings import draw_siblings, top_tokens
from fastspec.models.layout import packed, tree_positions
from fastspec.models.reduced_vocabulary import DraftVocabulary
from fastspec_kernels import build_tree
from fastspec_kernels.testing import chi_square

from .probes import batch_of, request_of


def test_shapes_number_their_nodes_level_by_level():
    shape = TreeShape([[1, 0], [0], [0, 1], [1], [0, 0], [0, 1, 0]])
    assert shape.parents == [0, 0, 1, 1, 2, 4]
    assert [shape.num_nodes(depth) for depth in range(5)] == [0, 2, 5, 6, 6]
    first, second, third = shape.levels
    assert (first.expanded, first.num_children, first.children) == ([0], 2, [1, 2])
    assert (second.expanded, second.places, second.kept) == ([1, 2], [0, 1], [0, 1, 2])
    assert (third.expanded, third.places, third.num_children) == ([4], [1], 1)


@pytest.mark.parametrize(("width", "num_nodes", "depth"), [(1, 5, 3), (4, 16, 5), (2, 127, 6)])
def test_balanced_shapes_keep_their_limits(width, num_nodes, depth):
    shape = balanced_shape(width, num_nodes, depth)
    assert shape.depth <= depth
    assert shape.num_nodes(depth) == min(num_nodes, sum(width**d for d in range(1, depth + 1)))
    assert all(level.num_children <= width for level in shape.levels)


def candidates():
    """a -> (b, c), d -> (e)."""
    scores = torch.tensor([[-0.1, -0.5, -0.6, -0.3, -0.4]])
    token_ids = torch.tensor([[10, 11, 12, 13, 14]], dtype=torch.int32)
    return token_ids, torch.tensor([[0, 1, 1, 0, 4]]), scores


@pytest.mark.parametrize(
    ("limit", "token_ids", "parents"),
    [
        (0, [-1] * 4, [-1] * 4),
        (1, [10, -1, -1, -1], [0, -1, -1, -1]),
        (3, [10, 13, 14, -1], [0, 0, 2, -1]),
        (4, [10, 11, 13, 14], [0, 1, 0, 3]),
    ],
)
def test_the_best_candidates_make_the_tree(limit, token_ids, parents):
    chosen = best_nodes(candidates(), 4, torch.tensor([limit]))
    assert [values.tolist() for values in chosen] == [[token_ids], [parents]]


@pytest.mark.parametrize(
    ("chain", "token_ids", "parents"),
    [
        ([10, 12, 99], [10, 12, 13, 99], [0, 1, 0, 2]),
        ([98, 97, -1], [10, 13, 98, 97], [0, 0, 0, 3]),
        ([13, 14, -1], [10, 11, 13, 14], [0, 1, 0, 3]),
        ([-1, -1, -1], [10, 11, 13, 14], [0, 1, 0, 3]),
    ],
)
def test_a_chain_is_merged_with_what_it_shares(chain, token_ids, parents):
    for depth in (2, 3):
        merged = with_chain(candidates(), torch.tensor([chain], dtype=torch.int32), depth)
        chosen = best_nodes(merged, 4, torch.tensor([4]))
        assert [values.tolist() for values in chosen] == [[token_ids], [parents]]


def test_ties_keep_parents_before_their_children():
    tied = (*candidates()[:2], torch.zeros(1, 5))
    token_ids, parents = best_nodes(tied, 2, torch.tensor([2]))
    assert (token_ids.tolist(), parents.tolist()) == ([[10, 11]], [[0, 1]])


def test_likeliest_tokens():
    logits = torch.tensor([[0.0, 2.0, 1.0], [1.0, float("-inf"), 0.0], [float("nan")] * 3])
    token_ids, logprobs = top_tokens(logits, 4, None)
    assert token_ids.tolist() == [[1, 2, 0, -1], [0, 2, -1, -1], [-1] * 4]
    expected = logits[0].log_softmax(0)[[1, 2, 0]]
    torch.testing.assert_close(logprobs[0, :3], expected)
    assert (logprobs[token_ids < 0] == -torch.inf).all()
    _, sharper = top_tokens(logits[:1], 1, torch.tensor([0.5]))
    torch.testing.assert_close(sharper[0, 0], (2 * logits[0]).log_softmax(0)[1])


def test_drawn_tokens_have_the_law_of_draws_without_replacement():
    rows, logits = 40_000, torch.tensor([0.3, 1.1, -0.4, 0.8, -9.0])
    sampling = SamplingTensors(
        temperature=torch.full((rows,), 1.5),
        top_k=torch.full((rows,), 4, dtype=torch.int32),
        top_p=None,
        min_p=None,
    )
    uniforms = torch.rand((rows, 3), generator=torch.Generator().manual_seed(5))
    picked = draw_siblings(logits.expand(rows, -1).clone(), uniforms, sampling)
    probs = (logits[:4] / 1.5).softmax(0).double()
    distribution = torch.zeros(5, 5, 5, dtype=torch.float64)
    for i in range(4):
        for j in set(range(4)) - {i}:
            for k in set(range(4)) - {i, j}:
                left = 1 - probs[i]
                distribution[i, j, k] = probs[i] * probs[j] / left * probs[k] / (left - probs[j])
    counts = torch.zeros(125).index_add_(
        0, (picked.long() * torch.tensor([25, 5, 1])).sum(1), torch.ones(rows)
    )
    assert chi_square(counts.view(5, 5, 5).numpy(), distribution.numpy()) > 1e-6


def test_greedy_rows_draw_their_likeliest_tokens_until_none_is_left():
    sampling = SamplingTensors(
        temperature=torch.tensor([0.0, 1.0]), top_k=None, top_p=torch.tensor([0.1, 0.1]), min_p=None
    )
    logits = torch.tensor([[0.0, 2.0, 1.0], [0.0, 2.0, 1.0]])
    picked = draw_siblings(logits, torch.full((2, 3), 0.5), sampling)
    assert picked.tolist() == [[1, 2, 0], [1, -1, -1]]


def test_positions_and_packing():
    parents = torch.tensor([[-1, 0, 0, 1], [-1, 0, -1, -1]], dtype=torch.int32)
    depths, _ = build_tree(parents)
    context_lens = torch.tensor([10 + 4, 5 + 2], dtype=torch.int32)
    assert tree_positions(depths, [4, 2], context_lens).tolist() == [10, 11, 11, 12, 5, 6]
    assert packed(parents, [2, 3]).tolist() == [-1, 0, -1, 0, -1]


def test_a_drawn_chain_ends_where_nothing_can_be_drawn():
    params = SamplingParams(temperature=1.0)
    requests = [request_of([1], str(b), params, 50, seed=b) for b in range(2)]
    batch = batch_of(*requests, wanted=9, num=3)
    tree = CapePlan(((1.0, 2),), is_probabilistic=True).start(batch)
    for level in range(3):
        logits = torch.zeros(2, 8)
        if level == 1:
            logits[0] = float("nan")
        if level:
            tree.expanded()
        tree.add(logits, slice(None), DraftVocabulary(8))
    proposal = tree.proposal()
    assert proposal.parents is not None
    assert proposal.num_tokens == [3, 9]
    assert proposal.parents.tolist() == [[0] * 3 + [-1] * 6, [0] * 3 + [1] * 3 + [4] * 3]
    assert (proposal.token_ids >= 0).sum(dim=1).tolist() == [3, 9]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [512, 2048, 2049, 49152])
def test_the_likeliest_tokens_of_wide_rows(dtype, columns):
    """Ties, tokens that cannot follow, rows of which little or nothing is left."""
    generator = torch.Generator().manual_seed(columns)
    logits = torch.randn(5, columns, generator=generator).to(dtype)
    logits[1] = logits[1].round()
    logits[2, 7:] = -torch.inf
    logits[3] = -torch.inf
    logits[4, 100] = torch.nan
    for num in (1, 2, 8):
        token_ids, logprobs = top_tokens(logits, num, None)
        expected = logits.float().log_softmax(-1).topk(num).values
        rows = [0, 1, 2]
        torch.testing.assert_close(logprobs[rows], expected[rows].nan_to_num(neginf=-torch.inf))
        is_token = logprobs[rows] > -torch.inf
        assert ((token_ids[rows] >= 0) == is_token).all()
        found = logits[rows].float().log_softmax(-1).gather(1, token_ids[rows].clamp(min=0).long())
        torch.testing.assert_close(found[is_token], logprobs[rows][is_token])
        assert all(len(set(row)) == num for row in token_ids[:2].tolist())
        assert (token_ids[3:] == -1).all()
