"""Every method on the bundled models gives the ids that it gave before: a record, not an opinion.

`python -m tests.engine.test_recorded_ids` writes the record anew, after a change that is meant to
change what is sampled. Greedy ids never change.
"""

import json
from pathlib import Path

import pytest

from fastspec import Engine, SamplingParams, SpecConfig

RECORD = Path(__file__).with_name("recorded_ids.json")
PROMPTS = [
    "import os\nimport sys\n\n\ndef main(",
    "class Stack:\n    def push(self, item):\n",
    "x = 1",
]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=24),
    SamplingParams(temperature=0.8, top_p=0.95, seed=11, max_tokens=30),
    SamplingParams(temperature=1.0, top_k=40, min_p=0.01, seed=12, max_tokens=20),
]
COPIED = {"tree_prompt_lookup": True, "draft_sample_method": "greedy"}
METHODS = {
    "none": {},
    "draft_model": {"num_speculative_tokens": 4},
    "draft_model, greedy drafts": {"draft_sample_method": "greedy"},
    "draft_model, block": {"rejection_sample_method": "block"},
    "draft_model, adaptive": {"schedule": "adaptive", "step_costs": [8, 9, 10, 11, 12, 13]},
    "prompt_lookup": {"prompt_lookup_min": 1, "prompt_lookup_max": 4},
    "mag": {},
    "ngram": {},
    "suffix": {},
    "suffix, trees": {"tree_nodes": 12},
    "cascade": {},
    "cascade, reviewing": {"k_matrix": [[5, 4], [0, 4]], "lenience": 2.0},
    "tree": {},
    "tree, greedy drafts": {"draft_sample_method": "greedy", "tree_width": 3, "tree_nodes": 9},
    "tree, fixed": {"tree_paths": [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]},
    "tree, copied branch": COPIED,
    "draft_model, cape": {"cape": True, "num_speculative_tokens": 4},
    "early_exit": {"exit_layer": 6},
    "glide": {"num_speculative_tokens": 4},
    "glide, cape": {"cape": True, "num_speculative_tokens": 3},
}


def decoded(name: str) -> list[list[int]]:
    """New ids of each prompt, in one batch."""
    spec = SpecConfig(name.split(",")[0], **METHODS[name])
    return [
        list(output.token_ids) for output in Engine("tiny", spec=spec).generate(PROMPTS, PARAMS)
    ]


@pytest.mark.parametrize("name", METHODS)
def test_ids_are_those_of_the_record(name):
    assert decoded(name) == json.loads(RECORD.read_text())[name]


if __name__ == "__main__":
    record = {name: decoded(name) for name in METHODS}
    RECORD.write_text(json.dumps(record, indent=0).replace(",\n", ", ") + "\n")
