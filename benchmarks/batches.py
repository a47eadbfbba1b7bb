"""What a batch brings: tokens per second of 8 requests together and one by one.

`python -m benchmarks.batches` runs the bundled pair with plain decoding, the draft model, and the
draft model with the adaptive schedule, in turns, and appends a record; --out names another file.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

from benchmarks import harness
from fastspec import Engine, SamplingParams, SpecConfig
from fastspec.cli.prompts import bundled_prompts
from fastspec.tools.bench import describe_environment

RESULTS = harness.RESULTS / "batches.jsonl"
BATCH_SIZE = 8
SPECS = {
    "plain": SpecConfig("none"),
    "draft_model": SpecConfig("draft_model"),
    "draft_model, adaptive": SpecConfig("draft_model", schedule="adaptive"),
}


def measured(max_tokens: int, repeats: int) -> dict:
    """The record of one run: medians of speeds, and of ratios within a round."""
    prompts = bundled_prompts(BATCH_SIZE, False)
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    engines = {name: Engine("tiny", spec=spec) for name, spec in SPECS.items()}
    texts = {name: engine.generate(prompts, params) for name, engine in engines.items()}
    for name, outputs in texts.items():
        expected = [output.token_ids for output in texts["plain"]]
        assert [output.token_ids for output in outputs] == expected, name
    speeds: dict[str, list[tuple[float, float]]] = {name: [] for name in SPECS}
    for _ in range(repeats):
        for name, engine in engines.items():
            start = time.perf_counter()
            for prompt in prompts:
                engine.generate([prompt], params)
            middle = time.perf_counter()
            engine.generate(prompts, params)
            seconds = middle - start, time.perf_counter() - middle
            alone, together = (len(prompts) * max_tokens / each for each in seconds)
            speeds[name].append((alone, together))
    plain = [together for _, together in speeds["plain"]]
    return {
        "tokens_per_s": {
            name: [round(statistics.median(column), 1) for column in zip(*pairs, strict=True)]
            for name, pairs in speeds.items()
        },
        "ratios": {
            name: [
                round(statistics.median(together / alone for alone, together in pairs), 3),
                round(
                    statistics.median(
                        together / other for (_, together), other in zip(pairs, plain, strict=True)
                    ),
                    3,
                ),
            ]
            for name, pairs in speeds.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    record = {
        "op": "batches",
        **describe_environment(),
        "target": "tiny",
        "batch_size": BATCH_SIZE,
        "max_tokens": options.max_tokens,
        "repeats": options.repeats,
        **measured(options.max_tokens, options.repeats),
    }
    print(json.dumps({name: record[name] for name in ("tokens_per_s", "ratios")}, indent=2))
    harness.append_to(options.out, record)


if __name__ == "__main__":
    main()
