"""Drafters that copy, by kind of prompt: SmolLM2's bundled questions, code, summaries and edits.

`python -m benchmarks.copying` decodes the bundled chat prompts greedily, one after the other, with
plain decoding and each method in turn, and appends a record; `python -m benchmarks.report` prints
it. SmolLM2 has to be fetched. Times are of whole requests, with the reading of the prompt. Suffix
copies are also of the engine's earlier answers, as they would be in use; with `--corpus`, a file of
`scripts.smollm2.dialogues`, they are measured again with the answers in it to copy from.
"""

import argparse
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter

from tqdm import tqdm

from benchmarks import harness
from benchmarks.same_ids import TARGET, kinds_of
from fastspec import Engine, EngineConfig, SamplingParams, SpecConfig
from fastspec.cli.prompts import bundled_prompts, tokenize_prompts
from fastspec.models.loading import load_tokenizer
from fastspec.tools.bench import describe_environment

RECORDS = harness.RESULTS / "copying.jsonl"
PLAIN = "plain"
SUFFIX = {"num_speculative_tokens": 15, "suffix_max_spec_factor": 3.0}
SETTINGS = {
    "prompt_lookup": {
        "num_speculative_tokens": 12,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 16,
    },
    "prompt_lookup, K=4": {
        "num_speculative_tokens": 4,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 4,
    },
    "suffix": SUFFIX,
    "suffix, tree": SUFFIX | {"tree_nodes": 11},
    "eagle3, copies first": {
        "num_speculative_tokens": 3,
        "confidence_threshold": 0.3,
        "draft_bits": 8,
        "suffix_tokens": 15,
    },
}
SPECS = {name: SpecConfig(name.split(",")[0], **given) for name, given in SETTINGS.items()}
WITH_CORPUS = ", corpus"
# Kinds whose answers repeat much of the prompt; they are also counted together.
REPEATING = ("summary", "edit")
BOTH = " and ".join(REPEATING)


def measured(
    target: str,
    specs: Mapping[str, SpecConfig],
    prompts: Sequence[list[int]],
    kinds: Sequence[str],
    config: EngineConfig,
    max_tokens: int,
    corpus: Sequence[list[int]] = (),
) -> dict[str, dict[str, dict[str, float]]]:
    """For each method and kind the speed-up over plain decoding, and tokens per target step.

    The methods take turns at each prompt, so that all meet the same state of the machine. In
    float32 all of them have to write the ids of plain decoding. Those named so read the corpus.
    """
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    all_specs = {PLAIN: SpecConfig("none"), **specs}
    engines = {name: Engine(target, spec=spec, config=config) for name, spec in all_specs.items()}
    for name, engine in engines.items():
        if name.endswith(WITH_CORPUS):
            engine.add_corpus(corpus)
        engine.generate([prompts[0][:16]], SamplingParams(temperature=0, max_tokens=4))
    tokens, steps, seconds = Counter(), Counter(), defaultdict(float)
    for prompt, kind in zip(tqdm(prompts), kinds, strict=True):
        expected: Sequence[int] = ()
        for name, engine in engines.items():
            start = perf_counter()
            (output,) = engine.generate([prompt], params)
            elapsed = perf_counter() - start
            expected = output.token_ids if name == PLAIN else expected
            assert config.dtype != "float32" or output.token_ids == expected, name
            for group in groups_of(kind):
                tokens[name, group] += len(output.token_ids)
                steps[name, group] += output.stats.num_steps
                seconds[name, group] += elapsed

    def row(name: str, group: str) -> dict[str, float]:
        speed, plain = (tokens[n, group] / seconds[n, group] for n in (name, PLAIN))
        per_step = tokens[name, group] / steps[name, group]
        return {"speed_up": round(speed / plain, 3), "tokens_per_step": round(per_step, 2)}

    groups = [*dict.fromkeys(kinds)] + ([BOTH] if {*REPEATING} <= {*kinds} else [])
    return {name: {group: row(name, group) for group in groups} for name in specs}


def groups_of(kind: str) -> list[str]:
    """What a prompt of that kind counts for."""
    return [kind, BOTH] if kind in REPEATING else [kind]


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--num-prompts", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--corpus", type=Path, help="answers to copy from as well")
    options = parser.parse_args()
    texts = bundled_prompts(options.num_prompts, chat=True)
    prompts = tokenize_prompts(load_tokenizer("target", TARGET), texts, True)
    config = EngineConfig(dtype=options.dtype, device="cpu")
    specs, settings, corpus = dict(SPECS), dict(SETTINGS), []
    if options.corpus is not None:
        lines = options.corpus.read_text().splitlines()
        corpus = [json.loads(line)["token_ids"] for line in lines]
        # Half of the room is for the latest texts.
        room = {"suffix_max_cached_tokens": 2 * sum(len(text) + 1 for text in corpus)}
        for name in [name for name in SETTINGS if name.startswith("suffix")]:
            specs[name + WITH_CORPUS] = replace(specs[name], **room)
            settings[name + WITH_CORPUS] = settings[name]
    kinds, max_tokens = kinds_of(texts), options.max_tokens
    methods = measured(TARGET, specs, prompts, kinds, config, max_tokens, corpus)
    for name, row in methods.items():
        sys.stderr.write(f"{name}: {json.dumps(row)}\n")
    record = {
        "op": "copying",
        "target": TARGET,
        "dtype": options.dtype,
        "num_prompts": len(prompts),
        "max_tokens": options.max_tokens,
        "settings": settings,
        "corpus": {"texts": len(corpus), "tokens": sum(map(len, corpus))},
        "methods": methods,
        **describe_environment(),
    }
    harness.append_to(RECORDS, record)


if __name__ == "__main__":
    main()
