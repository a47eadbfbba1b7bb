"""Drafters that copy, on the turns of an agent: `python -m benchmarks.agent --target tiny`.

`agent_trace.jsonl` holds 40 turns of an agent that runs tests, reads files and edits functions: the
observation before each turn, and what the agent does. The target writes each turn after those of
the task before and of its own; greedily, and nothing is forced on it. Small models do not write
what the trace says, so each drafter is also run against the trace itself: tokens per pass of a
target that had written that. A record is appended; --out names another file.
"""

import argparse
import json
from pathlib import Path

import torch

from benchmarks import harness
from fastspec import Engine, EngineConfig, SamplingParams, SpecConfig
from fastspec.models.loading import load_tokenizer, target_vocab_size
from fastspec.tools.bench import describe_environment
from fastspec.tools.simulate import Simulator
from fastspec.tools.stored_outputs import StoredOutput

TRACE = Path(__file__).with_name("agent_trace.jsonl")
RESULTS = harness.RESULTS / "agent.jsonl"
TURNS_OF_A_TASK = 4
SPECS = {
    "plain": SpecConfig("none"),
    "prompt_lookup": SpecConfig("prompt_lookup"),
    "prompt_lookup, 10 after 2": SpecConfig("prompt_lookup", 10, prompt_lookup_min=2),
    "prompt_lookup, 24 after 2 to 5": SpecConfig(
        "prompt_lookup", 24, prompt_lookup_min=2, prompt_lookup_max=5
    ),
    "suffix": SpecConfig("suffix"),
    "suffix, factor 8": SpecConfig("suffix", suffix_max_spec_factor=8.0),
}


def turns() -> list[tuple[str, str]]:
    """Each turn: what stands before it, and what the agent does."""
    trace = [json.loads(line) for line in TRACE.read_text(encoding="utf-8").splitlines()]
    pairs = []
    for place, turn in enumerate(trace):
        first = max(0, place // TURNS_OF_A_TASK - 1) * TURNS_OF_A_TASK
        before = [part for old in trace[first:place] for part in old.values()]
        pairs.append(("".join([*before, turn["observation"]]), turn["action"]))
    return pairs


def generated(target: str, max_tokens: int, repeats: int) -> tuple[dict, list[StoredOutput]]:
    """Speeds and tokens per pass of each drafter, and what the target has written.

    The drafters take turns at each prompt, so that all meet the same state of the machine. Each
    round begins with engines that have seen nothing.
    """
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    best: dict[str, dict] = {}
    written: dict[str, list[StoredOutput]] = {}
    for _ in range(repeats):
        config = EngineConfig(prefix_caching=True)
        engines = {name: Engine(target, spec=spec, config=config) for name, spec in SPECS.items()}
        written = {name: [] for name in engines}
        for prompt, _ in turns():
            for name, engine in engines.items():
                (out,) = engine.generate(prompt, params)
                stored = StoredOutput([*out.prompt_token_ids], [*out.token_ids], params)
                written[name].append(stored)
        for name, engine in engines.items():
            assert written[name] == written["plain"], name
            stats = engine.stats
            decoding = sum(s for phase, s in stats.seconds.items() if phase != "prefill")
            # The tokens that came with the reading of prompts are not those of decoding.
            decoded = stats.num_output_tokens - stats.num_prompt_steps
            row = {
                "tokens_per_s": round(decoded / decoding, 1),
                "tokens_per_pass": round(stats.num_output_tokens / stats.num_steps, 2),
                "drafting_share": round(stats.seconds["propose"] / decoding, 4),
            }
            best[name] = max(row, best.get(name, row), key=lambda row: row["tokens_per_s"])
    return best, written["plain"]


def replayed(target: str, outputs: list[StoredOutput]) -> dict[str, float]:
    """Tokens per pass of each drafter, one turn after the other."""
    found = {}
    for name, spec in SPECS.items():
        if name != "plain":
            config = EngineConfig(max_batch_size=1)
            size = target_vocab_size(target)
            simulator = Simulator(target, None, size, spec=spec, config=config)
            simulator.run(outputs)
            stats = simulator.stats
            found[name] = round(stats.num_output_tokens / stats.num_steps, 2)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--target", default="tiny")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    speeds, written = generated(options.target, options.max_tokens, options.repeats)
    tokenizer = load_tokenizer("target", options.target)
    greedy = SamplingParams(temperature=0, max_tokens=None)
    trace = [
        StoredOutput(tokenizer(prompt)["input_ids"], tokenizer(action)["input_ids"], greedy)
        for prompt, action in turns()
    ]
    record = {
        "op": "agent",
        **describe_environment(),
        "target": options.target,
        "max_tokens": options.max_tokens,
        "repeats": options.repeats,
        "generated": speeds,
        "replayed": replayed(options.target, written),
        "replayed_trace": replayed(options.target, trace),
    }
    harness.append_to(options.out, record)
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
