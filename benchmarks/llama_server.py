"""Speculation on SmolLM2 beside llama.cpp's: `python -m benchmarks.llama_server`.

The 20 prompts of `fastspec bench --chat`, greedy, one after the other, 128 tokens each, with the
same weights in bfloat16. Every method runs in a process of its own, in turns: ours in an engine,
llama.cpp's in `llama-server`, plain and with each kind of n-gram speculation that it has. Counted
are tokens after the prompt's pass by the time since then: ours after the first step, llama.cpp's
after the first token, by its own report.
"""

import argparse
import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.error import URLError
from urllib.request import Request, urlopen

import torch

from benchmarks import harness
from benchmarks.llama_cpp import PACKAGE, converted, install, run
from fastspec import Engine, EngineConfig, SamplingParams
from fastspec.cli.prompts import bundled_prompts
from fastspec.models.chat import prompt_ids
from fastspec.models.loading import load_tokenizer
from fastspec.tools.bench import describe_environment
from fastspec.tools.fetch import SOURCES, download

RESULTS = harness.RESULTS / "llama_server.jsonl"
OURS = {
    "plain": {"method": "none"},
    "suffix": {"method": "suffix", "num_speculative_tokens": 6},
    "eagle3": {"method": "eagle3", "num_speculative_tokens": 3, "confidence_threshold": 0.3},
}
OURS["eagle3_suffix"] = {**OURS["eagle3"], "suffix_tokens": 8}
# llama-server's own kinds that need no draft, with their default sizes.
LLAMA_CPP = ("none", "ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")


def token_ids(num_prompts: int) -> list[list[int]]:
    tokenizer = load_tokenizer("target", "smollm2")
    return [prompt_ids(tokenizer, text, chat=True) for text in bundled_prompts(num_prompts, True)]


def fastspec(method: str, prompts: list[list[int]], tokens: int) -> float:
    """Tokens per second over all prompts."""
    engine = Engine("smollm2", spec=OURS[method], config=EngineConfig(dtype="bfloat16"))
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    list(engine.stream(prompts[0][:8], params))  # warms up
    written, seconds = 0, 0.0
    for prompt in prompts:
        events = [(time.perf_counter(), e) for e in engine.stream(prompt, params) if e.token_ids]
        # The first step's tokens fall to the prompt's pass; it ends with the target's own token.
        first = next(place for place, (_, e) in enumerate(events) if e.source != "draft")
        written += len(events) - 1 - first
        seconds += events[-1][0] - events[first][0]
    return written / seconds


def llama_cpp(programs: Path, model: Path, kind: str, prompts: list, options) -> float:
    """Tokens per second over all prompts, by the server's own clock."""
    command = [programs / "llama-server", "-m", model, "-t", options.threads, "-np", 1]
    command += ["-c", 2048, "--spec-type", kind]
    with served(command) as address:
        complete(address, prompts[0][:8], options.tokens)  # warms up
        timings = [complete(address, prompt, options.tokens) for prompt in prompts]
    # The first token of an answer falls to the prompt's pass.
    written = sum(each["predicted_n"] - 1 for each in timings)
    return written / sum(each["predicted_ms"] for each in timings) * 1e3


@contextmanager
def served(command: list) -> Iterator[str]:
    """The address of a server, which is ended afterwards."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    words = [str(part) for part in [*command, "--port", port]]
    server = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while True:
            if server.poll() is not None:
                raise RuntimeError(f"{words[0]} ended with exit status {server.returncode}")
            try:
                urlopen(f"{address}/health").close()  # an error while the model is being loaded
                break
            except URLError:
                time.sleep(0.2)
        yield address
    finally:
        server.terminate()
        server.wait()


def complete(address: str, prompt: list[int], tokens: int) -> dict:
    """The timings of one answer."""
    fields = {"prompt": prompt, "n_predict": tokens, "temperature": 0, "top_k": 1}
    fields |= {"ignore_eos": True, "cache_prompt": False}
    request = Request(f"{address}/completion", json.dumps(fields).encode())
    request.add_header("Content-Type", "application/json")
    with urlopen(request) as answer:
        return json.load(answer)["timings"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bin", type=Path, help="folder of llama-server and llama-quantize")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--num-prompts", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--ours", choices=OURS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    prompts = token_ids(options.num_prompts)
    if options.ours:
        sys.stdout.write(json.dumps(fastspec(options.ours, prompts, options.tokens)))
        return
    ours = [sys.executable, "-m", "benchmarks.llama_server", "--tokens", options.tokens]
    ours += ["--num-prompts", options.num_prompts, "--threads", options.threads, "--ours"]
    rounds: dict[str, list[float]] = {}
    with TemporaryDirectory() as place:
        programs = options.bin or install(Path(place))
        model = converted(programs, download(SOURCES["smollm2"], Path(place)), "bfloat16")
        for number in range(options.rounds):
            sys.stderr.write(f"round {number + 1} of {options.rounds}\n")
            for method in OURS:
                speed = json.loads(run([*ours, method]))
                rounds.setdefault(f"fastspec {method}", []).append(speed)
            for kind in LLAMA_CPP:
                speed = llama_cpp(programs, model, kind, prompts, options)
                rounds.setdefault(f"llama.cpp {kind}", []).append(speed)
    medians = {name: statistics.median(values) for name, values in rounds.items()}
    best = {
        engine: max((name for name in medians if name.startswith(engine)), key=medians.__getitem__)
        for engine in ("fastspec", "llama.cpp")
    }
    record = {
        "op": "llama_server",
        **describe_environment(),
        "llama_cpp": PACKAGE,
        "model": "smollm2",
        "dtype": "bfloat16",
        "num_prompts": options.num_prompts,
        "tokens": options.tokens,
        "tokens_per_s": {name: [round(v, 1) for v in values] for name, values in rounds.items()},
        "best": best,
        "ratio_of_the_best": medians[best["fastspec"]] / medians[best["llama.cpp"]],
    }
    sys.stdout.write(json.dumps(record) + "\n")
    harness.append_to(options.out, record)


if __name__ == "__main__":
    main()
