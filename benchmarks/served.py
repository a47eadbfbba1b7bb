"""A server's tokens per second for one user and for several, drafting and plain.

`python -m benchmarks.served` serves SmolLM2, which has to be fetched, with the draft that it comes
with, in a process of its own. Users ask the questions of `fastspec bench --chat` through the HTTP
interface, each the next one when it has its answer; all modes take turns, and a record is appended.
The same questions come again, so nothing is to be copied from earlier answers. Options after `--`
are the server's in place of these. --out names another file.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx2

from benchmarks import harness
from fastspec.cli.prompts import bundled_prompts
from fastspec.tools.bench import describe_environment

RESULTS = harness.RESULTS / "served.jsonl"
QUESTIONS_OF_A_USER = {1: 8, 8: 2}
SERVER = "--target smollm2 --dtype bfloat16 --method eagle3 --num-speculative-tokens 4"
SERVER += " --confidence-threshold 0.3 --suffix-tokens 8 --suffix-max-cached-tokens 2"
SERVER += " --disable-by-batch-size 4"


@contextmanager
def serving(options: Sequence[str], threads: int):
    """The address of a server in a process of its own."""
    command = [sys.executable, "-m", "fastspec", "serve", "--port", "0", "--threads", str(threads)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    server = subprocess.Popen(
        [*command, *options], stderr=subprocess.PIPE, text=True, env=environment
    )
    try:
        said = []
        for line in server.stderr:
            said.append(line)
            if " at http" in line:
                yield line.split(" at ")[1].split("/ until")[0]
                return
        raise RuntimeError(f"the server ended: {''.join(said)}")
    finally:
        server.terminate()
        server.communicate(timeout=60)


async def answered(address: str, users: int, bodies: list[dict]) -> tuple[float, list[str]]:
    """New tokens per second of all users together, and the texts in the order of the bodies."""
    texts = [""] * len(bodies)
    pending, num_tokens = list(enumerate(bodies)), 0

    async def user(client: httpx2.AsyncClient) -> None:
        nonlocal num_tokens
        while pending:
            place, body = pending.pop(0)
            response = await client.post("/v1/chat/completions", json=body)
            answer = response.raise_for_status().json()
            texts[place] = answer["choices"][0]["message"]["content"]
            num_tokens += answer["usage"]["completion_tokens"]

    async with httpx2.AsyncClient(base_url=address, timeout=600, trust_env=False) as client:
        start = time.perf_counter()
        await asyncio.gather(*(user(client) for _ in range(users)))
        return num_tokens / (time.perf_counter() - start), texts


def measured(address: str, temperature: float, max_tokens: int, repeats: int) -> list[dict]:
    """Medians of speeds and of ratios within a round, for each number of users."""
    with httpx2.Client(base_url=address, trust_env=False) as client:
        own = client.get("/v1/models").json()["data"][0]["speculation"]["default"]
    rows = []
    for users, count in QUESTIONS_OF_A_USER.items():
        questions = bundled_prompts(users * count, True)
        speeds: dict[str, list[float]] = {"none": [], own: []}
        texts = {}
        for repeat in range(repeats + 1):  # the first fills caches
            for method in speeds:
                bodies = [
                    {
                        "messages": [{"role": "user", "content": question}],
                        "temperature": temperature,
                        "max_tokens": max_tokens,
                        "seed": seed,
                        "speculation": {"method": method},
                    }
                    for seed, question in enumerate(questions)
                ]
                speed, texts[method] = asyncio.run(answered(address, users, bodies))
                if repeat:
                    speeds[method].append(speed)
            print(users, {name: [round(s, 1) for s in each] for name, each in speeds.items()})
        pairs = list(zip(*speeds.values(), strict=True))
        rows.append(
            {
                "users": users,
                "questions": len(questions),
                "tokens_per_s": {
                    name: round(statistics.median(each), 1) for name, each in speeds.items()
                },
                "ratio": round(statistics.median(drafted / plain for plain, drafted in pairs), 3),
                "equal_texts": sum(a == b for a, b in zip(*texts.values(), strict=True)),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("server", nargs="*", help="options of fastspec serve, after --")
    options = parser.parse_args()
    server = options.server or SERVER.split()
    sizes = options.temperature, options.max_tokens, options.repeats
    with serving(server, options.threads) as address:
        rows = measured(address, *sizes)
    record = {
        "op": "served",
        **describe_environment(),
        "threads": options.threads,
        "server": " ".join(server),
        **dict(zip(("temperature", "max_tokens", "repeats"), sizes, strict=True)),
        "results": rows,
    }
    print(json.dumps(rows, indent=2))
    harness.append_to(options.out, record)


if __name__ == "__main__":
    main()
