"""The measurement of lenience, with a second draft that is there."""

from benchmarks import lenience, report

from ..test_docs import ASSETS
from .records import ENVIRONMENT


def test_lenience_is_measured_and_told():
    """With the first draft once more as the second, lenience has little to forgive."""
    rows = lenience.measured(ASSETS / "tiny-draft", num_prompts=1, max_tokens=12, values=(1, 4))
    assert [row["lenience"] for row in rows] == [1, 4]
    for row in rows:
        assert row["tokens_per_target_pass"] > 1
        assert len(row["draft_passes_per_token"]) == 2
    record = {
        **ENVIRONMENT,
        "target": "tiny",
        "draft": "tiny-draft",
        "second": {"layers": 1, "hidden_size": 128, "steps": 5},
        "k_matrix": lenience.K_MATRIX,
        "num_prompts": 1,
        "max_tokens": 12,
        "results": rows,
    }
    assert "\n| 4 | " in report.lenience(record)
