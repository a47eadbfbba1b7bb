"""What the engine reads off the outputs of verification."""

import pytest

from fastspec.engine.verify import verdict_of


@pytest.mark.parametrize(
    ("accepted_len", "token_ids", "count", "proposed", "source"),
    [
        (2, [1, 5, 6], 3, 2, "bonus"),
        (1, [1, 5, 6], 3, 2, "recovered"),
        (0, [1, 5, 6], 3, 2, "recovered"),
        (1, [1, 5, -1], 3, 1, "bonus"),
        (1, [1, 5, 6], 2, 1, "bonus"),
        (0, [1, -1, -1], 3, 0, "target"),
    ],
)
def test_the_token_after_a_chain(accepted_len, token_ids, count, proposed, source):
    """A bonus where all that was proposed was taken, of those nodes that the target read."""
    verdict = verdict_of(accepted_len, [5, 7, 9], token_ids[:count])
    assert (verdict.num_draft_tokens, verdict.extra_source) == (proposed, source)
    assert verdict.output_ids == [5, 7, 9][: accepted_len + 1]


@pytest.mark.parametrize(
    ("path", "proposed", "source"),
    [([1, 3], 2, "bonus"), ([2], 2, "bonus"), ([1], 2, "recovered"), ([], 2, "recovered")],
)
def test_the_token_after_a_tree(path, proposed, source):
    """A bonus where the path ends at a node without children."""
    tree = [1, 5, 8, 7], [*path, -1, -1], [-1, 0, 0, 1]
    verdict = verdict_of(len(path), [5, 7, 9, 9], *tree)
    assert (verdict.num_draft_tokens, verdict.extra_source) == (proposed, source)
