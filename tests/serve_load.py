"""Many clients at once, some of them rude, and everything that must hold of their answers.

`python -m tests.serve_load --clients 200 --seconds 180` serves the bundled pair in a process of its
own, on the loopback, and prints a JSON record of latencies and counts; --out appends it to a file.
It exits with 1 if anything did not hold; `tests/serve/test_load.py` runs a short form. Clients
stream, wait for whole answers, read slowly, leave in the middle, and send bodies that are malformed
or too long. Every answer must be the engine's text of its prompt, no status may be 5xx, memory
must not grow, and at the end every block must be back.
"""

import argparse
import asyncio
import json
import os
import random
import re
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import httpx2
from prometheus_client.parser import text_string_to_metric_families

from fastspec import Engine, SamplingParams
from fastspec.cli.prompts import bundled_prompts
from fastspec.tools.bench import describe_environment

COMPLETIONS = "/v1/completions"
MOST_CLIENTS, MOST_SECONDS = 500, 3600
KINDS = {"stream": 12, "whole": 3, "slow": 2, "leave": 4, "malformed": 2, "oversized": 1}
MALFORMED = [b"", b"{", b"[1]", b"\xff", b'{"prompt": 5}', b'{"prompt": "a", "what": 1}']
GROWTH, FLAT_FROM = 1.10, 60  # of memory, that counts as flat; in runs of so many seconds
SHOWN = 20


def requests_of(prompts, methods, max_tokens, rng, count=40):
    """Bodies to choose from: greedy and sampled, by all methods, of several lengths."""
    bodies = []
    for _ in range(count):
        body = {"prompt": rng.choice(prompts), "max_tokens": rng.randrange(4, max_tokens + 1)}
        body |= {"temperature": rng.choice([0, 0, 0.8]), "seed": rng.randrange(2**31)}
        body["speculation"] = {"method": rng.choice(methods)}
        bodies.append(body)
    return bodies


def expected_texts(engine, bodies):
    """What the engine says to each body."""
    own = engine.drafter.name
    params = [
        SamplingParams(
            temperature=body["temperature"],
            seed=body["seed"],
            max_tokens=body["max_tokens"],
            drafter=None if body["speculation"]["method"] == own else body["speculation"]["method"],
        )
        for body in bodies
    ]
    return [output.text for output in engine.generate([b["prompt"] for b in bodies], params)]


class Load:
    """Clients of one server, what they have seen, and what was wrong."""

    def __init__(self, address, bodies, texts, seconds, seed):
        self.address, self.pairs = address, [*zip(bodies, texts, strict=True)]
        self.end = time.monotonic() + seconds
        self.seed = seed
        self.counts, self.failures = Counter(), []
        self.first_token, self.per_token = [], []

    async def run(self, num_clients):
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=num_clients)
        async with httpx2.AsyncClient(
            base_url=self.address, timeout=300, limits=limits, trust_env=False
        ) as client:
            clients = (
                self._client(client, random.Random(n + self.seed)) for n in range(num_clients)
            )
            await asyncio.gather(*clients)

    async def _client(self, client, rng):
        while time.monotonic() < self.end:
            (kind,) = rng.choices([*KINDS], [*KINDS.values()])
            self.counts[kind] += 1
            body, text = rng.choice(self.pairs)
            try:
                if kind in ("malformed", "oversized"):
                    await self._nonsense(client, kind, rng)
                elif kind == "whole":
                    await self._whole(client, body, text)
                else:
                    await self._stream(client, body, text, kind, rng)
            except (httpx2.HTTPError, ValueError, KeyError) as error:
                self.failures.append(f"{kind}: {error!r}")

    async def _nonsense(self, client, kind, rng):
        content = rng.choice(MALFORMED)
        if kind == "oversized":
            content = json.dumps({"prompt": "x " * rng.choice([20_000, 2_000_000])}).encode()
        headers = {"content-type": "application/json"}
        response = await client.post(COMPLETIONS, content=content, headers=headers)
        if self._is_accepted(response.status_code, (400, 413)) and "error" not in response.json():
            self.failures.append(f"{kind}: {response.text:.100}")

    async def _whole(self, client, body, text):
        response = await client.post(COMPLETIONS, json=body)
        if self._is_accepted(response.status_code, (200,)):
            self._compare(body, response.json()["choices"][0]["text"], text)

    async def _stream(self, client, body, text, kind, rng):
        start, times, pieces = time.perf_counter(), [], []
        leaves_after = rng.randrange(body["max_tokens"]) if kind == "leave" else None
        asked = body | {"stream": True}
        async with client.stream("POST", COMPLETIONS, json=asked) as response:
            if not self._is_accepted(response.status_code, (200,)):
                await asyncio.sleep(float(response.headers.get("retry-after", 0)))
                return
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                times.append(time.perf_counter())
                pieces.append(chunk["choices"][0]["text"])
                if leaves_after is not None and len(pieces) > leaves_after:
                    return
                if kind == "slow":
                    await asyncio.sleep(0.02)
        self._compare(body, "".join(pieces), text)
        if kind == "stream":
            self.first_token.append(times[0] - start)
            if len(times) > 1:
                self.per_token.append((times[-1] - times[0]) / (len(times) - 1))

    def _is_accepted(self, status, expected):
        self.counts[f"status {status}"] += 1
        if status not in (*expected, 429):
            self.failures.append(f"status {status}")
        return status in expected

    def _compare(self, body, text, expected):
        self.counts["compared"] += 1
        if text != expected:
            self.failures.append(f"{body}: {text!r:.80} is not {expected!r:.80}")


def idle_gauges(address):
    """What is left when nobody asks: texts that run or wait, and used blocks."""
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    for _ in range(200):
        text = httpx2.get(f"{address}/metrics", trust_env=False).text
        samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
        values = {sample.name.removeprefix("fastspec:"): sample.value for sample in samples}
        left = {name: values[name] for name in names if values[name]}
        if not left:
            return {}
        time.sleep(0.05)
    return left


def memory_mib(process_id):
    """Resident memory of a process; 0 where the system does not tell."""
    status = Path(f"/proc/{process_id}/status")
    if not status.exists():
        return 0
    return int(re.search(r"VmRSS:\s+(\d+)", status.read_text())[1]) // 1024


def quantiles(values):
    """p50 and p99 in milliseconds."""
    if len(values) < 2:
        return None
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {"p50_ms": round(cuts[49] * 1000, 1), "p99_ms": round(cuts[98] * 1000, 1)}


def run(address, bodies, texts, num_clients, seconds, seed=0, process_id=0):
    """The summary of a run; its "failures" are empty if everything held."""
    assert num_clients <= MOST_CLIENTS
    assert seconds <= MOST_SECONDS
    warm = Load(address, bodies, texts, seconds / 5, seed)
    asyncio.run(warm.run(num_clients))
    memory = [memory_mib(process_id)]
    load = Load(address, bodies, texts, seconds * 4 / 5, seed + MOST_CLIENTS)
    start = time.perf_counter()
    asyncio.run(load.run(num_clients))
    elapsed = time.perf_counter() - start
    failures = warm.failures + load.failures
    if left := idle_gauges(address):
        failures.append(f"left behind: {left}")
    memory.append(memory_mib(process_id))
    if seconds >= FLAT_FROM and memory[1] > GROWTH * memory[0]:
        failures.append(f"memory grew from {memory[0]} to {memory[1]} MiB")
    return {
        "clients": num_clients,
        "seconds": round(elapsed, 1),
        "counts": dict(sorted((warm.counts + load.counts).items())),
        "time_to_first_token": quantiles(load.first_token),
        "time_per_token": quantiles(load.per_token),
        "memory_mib": memory,
        "num_failures": len(failures),
        "failures": failures[:SHOWN],
    }


def main():
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    methods = ["draft_model", "prompt_lookup", "none"]
    rng = random.Random(options.seed)
    bodies = requests_of(bundled_prompts(16), methods, options.max_tokens, rng)
    engine = Engine("tiny")
    engine.add_drafter("prompt_lookup", "prompt_lookup")
    texts = expected_texts(engine, bodies)
    command = [sys.executable, "-m", "fastspec", "serve", "--port", "0", "--threads", "1"]
    command += ["--methods", "prompt_lookup"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        address = server.stderr.readline().split(" at ")[1].split("/ until")[0]
        size = options.clients, options.seconds, options.seed, server.pid
        record = run(address, bodies, texts, *size)
    finally:
        server.terminate()
        errors = server.stderr.read()
        server.wait(60)
    record["log"] = errors[-2000:]
    record = {"op": "serve_load", **describe_environment(), "target": "tiny", **record}
    print(json.dumps(record, indent=2))
    if options.out is not None:
        with options.out.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(record) + "\n")
    return int(record["num_failures"] > 0 or bool(errors))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
