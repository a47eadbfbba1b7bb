"""CPU ops beside a program that keeps one core busy: no op should wait long for a late thread.

`python -m benchmarks.beside` times ops of several sizes with one thread and with all, idle and
beside a busy loop, and appends a record; --out names another file.
"""

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

import fastspec_kernels as kernels
from benchmarks import harness, inputs
from fastspec.tools.bench import describe_environment

RESULTS = harness.RESULTS / "beside.jsonl"


def calls() -> dict[str, Callable[[], object]]:
    """Calls by name, from some microseconds to some milliseconds."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    def products(rows: int, size: int, hidden: int) -> dict[str, Callable[[], object]]:
        row, up, down = normal(rows, size), normal(hidden, size), normal(size, hidden)
        shape = f"{rows} x {size} x {hidden}"
        return {
            f"linear, {shape}": lambda: kernels.linear(row, up),
            f"gated_mlp, {shape}": lambda: kernels.gated_mlp(row, up, up, down),
        }

    def chains(batch: int, vocab: int, num: int = 4) -> Callable[[], object]:
        target = inputs.make_logits("zipf", batch * (num + 1), vocab, torch.float32, generator)
        draft = inputs.noisy(target, generator).view(batch, num + 1, vocab)[:, :num].contiguous()
        ids = torch.randint(vocab, (batch, num), generator=generator, dtype=torch.int32)
        rows = torch.arange(0, batch * (num + 1) + 1, num + 1, dtype=torch.int32)
        uniforms = torch.rand(batch, num + 1, generator=generator)
        return lambda: kernels.verify_chain(target, rows, ids, uniforms, draft_logits=draft)

    def attention(tokens: int, context: int, heads: int = 9, kv_heads: int = 3) -> Callable:
        query, cache = normal(tokens, heads, 64), normal(2, context // 16, 16, kv_heads, 64)
        table = torch.arange(context // 16, dtype=torch.int32)[None]
        lengths = torch.tensor([context], dtype=torch.int32)
        rows = torch.tensor([0, tokens], dtype=torch.int32)
        return lambda: kernels.tree_attention(query, *cache, table, lengths, rows)

    rows = inputs.make_logits("zipf", 8, 4096, torch.float32, generator)
    uniforms = torch.rand(8, generator=generator)
    return {
        **products(1, 64, 64),
        **products(1, 256, 256),
        **products(1, 576, 1536),
        **products(5, 576, 1536),
        "sample, 8 x 4096": lambda: kernels.sample(rows, uniforms),
        "row_stats, 8 x 4096": lambda: kernels.row_stats(rows),
        "verify_chain, 8 x 4096": chains(8, 4096),
        "verify_chain, 1 x 128256": chains(1, 128256),
        "tree_attention, 5 tokens of 512": attention(5, 512),
        "tree_attention, 5 tokens of 8192": attention(5, 8192),
    }


def _spin() -> None:
    while True:
        pass


@contextmanager
def busy_core() -> Iterator[None]:
    """Another process runs all the time."""
    process = multiprocessing.get_context("spawn").Process(target=_spin, daemon=True)
    process.start()
    time.sleep(2.0)  # until it has started
    try:
        yield
    finally:
        process.terminate()
        process.join()


def mean_us(call: Callable[[], object], threads: int, seconds: float) -> float:
    """Means, as a late thread costs much now and then; the median of five."""
    torch.set_num_threads(threads)
    call()
    means = []
    for _ in range(5):
        count, start = 0, time.perf_counter()
        while (spent := time.perf_counter() - start) < seconds / 5:
            call()
            count += 1
        means.append(1e6 * spent / count)
    return round(statistics.median(means), 1)


def measured(threads: int, seconds: float) -> list[dict]:
    """One row for each call; ratios are to one thread in the same state of the machine."""
    rows = {name: {"call": name} for name in calls()}

    def measure(state: str) -> None:
        for name, call in calls().items():
            alone, together = (mean_us(call, count, seconds) for count in (1, threads))
            rows[name] |= {f"{state}_one_us": alone, f"{state}_us": together}
            rows[name] |= {f"{state}_ratio": round(together / alone, 2)}

    measure("idle")
    with busy_core():
        measure("busy")
    return list(rows.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    results = measured(options.threads, options.seconds)
    record = {"op": "beside", **describe_environment(), "threads": options.threads}
    record |= {"results": results}
    for row in results:
        print(json.dumps(row))
    harness.append_to(options.out, record)


if __name__ == "__main__":
    main()
