"""Dialogues to train the EAGLE-3 draft for SmolLM2: `python -m scripts.smollm2.dialogues`.

Answers of the target to prompts put together (`scripts.smollm2.prompts`) and to prompts of its own,
which it writes after the beginning of a user's turn (Xu et al., "Magpie", arXiv 2406.08464). Every
other answer is greedy, the rest are drawn. One JSON line each, in ids; `--out` goes on where it
stopped.
"""

import argparse
import json
from collections.abc import Iterator
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

from fastspec import Engine, EngineConfig, SamplingParams
from fastspec.models.chat import prompt_ids
from scripts.smollm2.prompts import make_prompts

_TOGETHER = 64
_LONGEST_PROMPT = 500  # tokens


def given_prompts(tokenizer: Any, seed: int) -> Iterator[list[int]]:
    """Ids of prompts put together, without the longest."""
    ids = (prompt_ids(tokenizer, text, True) for text in make_prompts(1_000_000, seed))
    return (each for each in ids if len(each) < _LONGEST_PROMPT)


def own_prompts(engine: Engine, seed: int) -> Iterator[list[int]]:
    """Ids of turns that the target writes in the user's place, without those it does not end."""
    tokenizer: Any = engine.tokenizer
    turn = [{"role": "user", "content": "@@"}]
    text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    head, tail = (
        tokenizer(part, add_special_tokens=False)["input_ids"] for part in text.split("@@")
    )
    special = {*tokenizer.all_special_ids}
    for first in count(1_000_000 * seed, _TOGETHER):
        params = [
            SamplingParams(temperature=1.0, top_p=0.95, max_tokens=96, seed=first + place)
            for place in range(_TOGETHER)
        ]
        for output in engine.generate([head] * _TOGETHER, params):
            ids = [token_id for token_id in output.token_ids if token_id not in special]
            if output.finish_reason == "stop" and len(ids) >= 4:
                yield head + ids + tail


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--given", type=int, default=3600, help="prompts put together")
    parser.add_argument("--own", type=int, default=1200, help="prompts of the target's own")
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=0.8, help="of the answers drawn")
    parser.add_argument("--seed", type=int, default=0, help="another one gives other dialogues")
    options = parser.parse_args()
    config = EngineConfig(dtype="bfloat16", max_batch_size=_TOGETHER, max_model_len=1024)
    engine = Engine("smollm2", config=config)
    given = islice(given_prompts(engine.tokenizer, options.seed), options.given)
    prompts = chain(given, islice(own_prompts(engine, options.seed), options.own))
    options.out.touch()
    with options.out.open("r+", encoding="utf-8") as file:
        done = sum(1 for _ in file)
        prompts = islice(prompts, done, None)
        while part := list(islice(prompts, _TOGETHER)):
            params = [
                SamplingParams(
                    temperature=options.temperature * (n % 2),
                    max_tokens=options.max_tokens,
                    seed=n + 1_000_000 * options.seed,
                )
                for n in range(done, done + len(part))
            ]
            for ids, output in zip(part, engine.generate(part, params), strict=True):
                line = {"prompt_ids": ids, "token_ids": list(output.token_ids)}
                file.write(json.dumps(line) + "\n")
            file.flush()
            done += len(part)
            print(f"{done} of {options.given + options.own}", flush=True)


if __name__ == "__main__":
    main()
