"""SmolLM2's greedy ids in float32 by all methods that have a draft for it, beside `generate`'s.

`python -m benchmarks.same_ids` decodes the bundled chat prompts with each method and appends a
record; `python -m benchmarks.report` prints it. The record also says how many tokens a step could
write at most with copies from the text, for each kind of prompt. SmolLM2 has to be fetched. Nothing
is timed, so what else runs on the machine does not matter. Words given on the command line choose
the methods that contain one of them, and then nothing is recorded. `--draft DIR` names a plain
draft that `fastspec train draft` made for SmolLM2; without it the methods that need one are left
out.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence

import torch
from tqdm import tqdm

from benchmarks import harness
from fastspec import Engine, EngineConfig, SamplingParams, SpecConfig
from fastspec.cli.prompts import bundled_prompts, tokenize_prompts
from fastspec.drafters.base import common_prefix_len
from fastspec.models.loading import load_model, load_tokenizer
from fastspec.models.named import ASSETS
from fastspec.tools.bench import describe_environment

RECORDS = harness.RESULTS / "same_ids.jsonl"
TARGET = "smollm2"
CONFIG = EngineConfig(dtype="float32", device="cpu")
# The draft that comes with fastspec, where a method does not choose it by itself.
DRAFTS = {"cascade, 8-bit copy, eagle3": "smollm2-eagle3"}
_EAGLE3 = {"num_speculative_tokens": 3, "confidence_threshold": 0.3}
_GLIDE = {"num_speculative_tokens": 2, "confidence_threshold": 0.3}
SPECS = {
    "none": SpecConfig("none"),
    "prompt_lookup": SpecConfig("prompt_lookup", num_speculative_tokens=4),
    "ngram": SpecConfig("ngram", num_speculative_tokens=4),
    "mag": SpecConfig("mag", num_speculative_tokens=4),
    "suffix": SpecConfig("suffix", num_speculative_tokens=6),
    "early_exit": SpecConfig("early_exit", exit_layer=20, num_speculative_tokens=2),
    "quantized": SpecConfig("quantized", num_speculative_tokens=5),
    "quantized, copies": SpecConfig("quantized", num_speculative_tokens=5, suffix_tokens=8),
    "eagle3": SpecConfig("eagle3", **_EAGLE3),
    "eagle3, 8 bits": SpecConfig("eagle3", draft_bits=8, **_EAGLE3),
    "eagle3, 8 bits, copies": SpecConfig("eagle3", draft_bits=8, suffix_tokens=8, **_EAGLE3),
    "eagle3, tree": SpecConfig("eagle3", num_speculative_tokens=2, tree_nodes=4),
    "eagle3, tree, copied branch": SpecConfig(
        "eagle3", num_speculative_tokens=2, tree_nodes=6, tree_suffix=5
    ),
    "glide": SpecConfig("glide", **_GLIDE),
    "glide, copies": SpecConfig("glide", suffix_tokens=8, **_GLIDE),
    "cascade, 8-bit copy, eagle3": SpecConfig("cascade", draft_bits=8),
}
SPECS_OF_A_DRAFT = {
    "draft_model": SpecConfig("draft_model", num_speculative_tokens=2),
    "draft_model, copies": SpecConfig("draft_model", num_speculative_tokens=2, suffix_tokens=8),
    "tree": SpecConfig("tree", num_speculative_tokens=2, tree_nodes=4),
    "cascade, draft and MaG": SpecConfig("cascade", k_matrix=[[1, 8], [0, 0]]),
}


@torch.no_grad()
def of_generate(target: str, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """What transformers writes after each prompt."""
    model = load_model("target", target, CONFIG)
    new_ids = []
    for prompt in tqdm(prompts, desc="generate"):
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        out = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=max_tokens)
        new_ids.append(out[0, len(prompt) :].tolist())
    return new_ids


def compared(
    engine: Engine, prompts: list[list[int]], expected: list[list[int]], max_tokens: int
) -> dict[str, float]:
    """Of how many prompts our ids are the expected ones, and what a pass brought."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    outputs = [engine.generate([prompt], params)[0] for prompt in tqdm(prompts)]
    equal = sum([*out.token_ids] == ids for out, ids in zip(outputs, expected, strict=True))
    stats = engine.stats
    per_step = round(stats.num_output_tokens / stats.num_steps, 2)
    return {"equal": equal, "tokens_per_step": per_step}


def steps_with_best_copies(prompt: Sequence[int], new_ids: Sequence[int]) -> int:
    """Target steps for `new_ids` if each copies from the best place before it in the text.

    Copies begin where the token before occurs once more, as those of drafters do, and go as far as
    they are right, so that no choice of places needs fewer steps.
    """
    text, place, steps = [*prompt, *new_ids], len(prompt), 0
    while place < len(text):
        rest = text[place:]
        copies = (text[at:] for at in range(1, place) if text[at - 1] == text[place - 1])
        place += 1 + max((common_prefix_len(copy, rest) for copy in copies), default=0)
        steps += 1
    return steps


def kinds_of(texts: Sequence[str]) -> list[str]:
    """The kind of each bundled chat prompt: chat, code, summary or edit."""
    lines = (ASSETS / "chat-prompts.jsonl").read_text(encoding="utf-8").splitlines()
    kind_of = {each["prompt"]: each["kind"] for each in map(json.loads, lines)}
    return [kind_of[text] for text in texts]


def most_by_copies(
    texts: list[str], prompts: list[list[int]], new_ids: list[list[int]]
) -> dict[str, float]:
    """Tokens per step with the best copies, for each kind of bundled prompt."""
    tokens, steps = Counter(), Counter()
    for kind, prompt, ids in zip(kinds_of(texts), prompts, new_ids, strict=True):
        tokens[kind] += len(ids)
        steps[kind] += steps_with_best_copies(prompt, ids)
    return {kind: round(tokens[kind] / steps[kind], 2) for kind in tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("words", nargs="*", help="of the methods to compare; by default all")
    parser.add_argument("--draft", metavar="DIR", help="a draft of `fastspec train draft`")
    parser.add_argument("--num-prompts", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=128)
    options = parser.parse_args()
    specs = dict(SPECS) if options.draft is None else SPECS | SPECS_OF_A_DRAFT
    if options.words:
        specs = {
            name: spec for name, spec in specs.items() if any(w in name for w in options.words)
        }
        for word in options.words:
            if not any(word in name for name in specs):
                parser.error(f"words: no method contains {word!r} (some need --draft)")
    tokenizer = load_tokenizer("target", TARGET)
    texts = bundled_prompts(options.num_prompts, chat=True)
    prompts = tokenize_prompts(tokenizer, texts, True)
    expected = of_generate(TARGET, prompts, options.max_tokens)
    methods = {}
    for name, spec in specs.items():
        draft = options.draft if name in SPECS_OF_A_DRAFT else DRAFTS.get(name)
        engine = Engine(TARGET, draft, spec=spec, config=CONFIG)
        methods[name] = compared(engine, prompts, expected, options.max_tokens)
        sys.stderr.write(f"{name}: {json.dumps(methods[name])}\n")
    record = {
        "op": "same_ids",
        "target": TARGET,
        "dtype": CONFIG.dtype,
        "num_prompts": len(prompts),
        "num_tokens": sum(map(len, expected)),
        "methods": methods,
        "most_by_copies": most_by_copies(texts, prompts, expected),
        **describe_environment(),
    }
    if options.words:
        print(json.dumps(record))
    else:
        harness.append_to(RECORDS, record)
    if any(row["equal"] < len(prompts) for row in methods.values()):
        raise SystemExit("some ids differ")


if __name__ == "__main__":
    main()
