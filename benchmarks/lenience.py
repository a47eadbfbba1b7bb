"""What lenience does to a cascade with a weak second draft: tokens of a target pass, and passes.

`python -m benchmarks.lenience` trains a draft of one layer for a few steps, lets the cascade of the
bundled draft, this one and MaG decode held-out prompts greedily with several values of lenience,
and appends a record; `python -m benchmarks.report` prints it. It counts passes, so what else runs
on the machine does not matter. `--out FOLDER` names another place for the draft.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks import harness
from benchmarks.draft_economics import ROOT, trained
from fastspec import Engine, SamplingParams, SpecConfig
from fastspec.cli.prompts import bundled_prompts
from fastspec.tools.bench import describe_environment

RECORDS = harness.RESULTS / "lenience.jsonl"
WEAK = (1, 128, 256)  # layers, width, feed-forward
K_MATRIX = [[3, 2, 6], [0, 3, 6], [0, 0, 10]]
VALUES = (1, 2, 4)


def measured(
    weak: Path, num_prompts: int, max_tokens: int, values: Sequence[float] = VALUES
) -> list[dict]:
    """For each value what a target pass brings and how many draft passes a token takes."""
    prompts = bundled_prompts(num_prompts, False)
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    plain = Engine("tiny", spec="none").generate(prompts, params)
    expected = [output.token_ids for output in plain]
    rows = []
    for lenience in values:
        spec = SpecConfig("cascade", k_matrix=K_MATRIX, lenience=lenience)
        engine = Engine("tiny", ["tiny-draft", str(weak)], spec=spec)
        outputs = engine.generate(prompts, params)
        assert [output.token_ids for output in outputs] == expected, lenience
        stats = engine.stats
        passes = [count for _, count in sorted(stats.num_draft_passes.items())]
        rows.append(
            {
                "lenience": lenience,
                "tokens_per_target_pass": round(stats.num_output_tokens / stats.num_steps, 3),
                "acceptance_rate": round(stats.acceptance_rate or 0.0, 4),
                "draft_passes_per_token": [round(n / stats.num_output_tokens, 3) for n in passes],
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "lenience")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--num-prompts", type=int, default=6)
    parser.add_argument("--max-tokens", type=int, default=96)
    options = parser.parse_args()
    torch.set_num_threads(1)
    weak = trained(WEAK, options.out, options.steps, context=256)
    record = {
        "op": "lenience",
        **describe_environment(),
        "target": "tiny",
        "draft": "tiny-draft",
        "second": {"layers": WEAK[0], "hidden_size": WEAK[1], "steps": options.steps},
        "k_matrix": K_MATRIX,
        "num_prompts": options.num_prompts,
        "max_tokens": options.max_tokens,
        "results": measured(weak, options.num_prompts, options.max_tokens),
    }
    harness.append_to(RECORDS, record)


if __name__ == "__main__":
    main()
