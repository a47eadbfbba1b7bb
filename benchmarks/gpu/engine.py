"""Times the engine on models of random weights: plain, with drafts, and beside `generate`."""

import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from benchmarks import cuda_timing, harness
from benchmarks.gpu import options
from benchmarks.gpu.bench import Progress
from benchmarks.gpu.steps import UNFINISHED
from benchmarks.harness import Timing
from fastspec import Engine, EngineConfig, SamplingParams, SpecConfig
from fastspec.models.side_by_side import groups_of, join
from fastspec.train.eagle3 import Text, make_eagle3
from fastspec.train.options import DraftShape

SLOWEST_CASE = 45.0  # seconds
NUM_TOKENS = 64
NUM_DRAFT, RATE = 4, 0.75  # of the draft tokens, accepted by a coin: weights are random
WARM_UPS = 8  # the first compiles; later ones still meet new sizes and capture graphs
ROUNDS = 5
# Llama 3.1 8B and, as its draft, Llama 3.2 1B.
TARGET = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
DRAFT = {
    **TARGET,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "tie_word_embeddings": True,
}
TINY = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 6, "vocab_size": 1000}
SHAPES = ({"B": 1, "context": 512}, {"B": 16, "context": 512}, {"B": 1, "context": 4096})
TINY_SHAPES = ({"B": 2, "context": 16},)


def random_model(fields: dict, device: str) -> PreTrainedModel:
    """A random model whose weights lie in memory as the engine would load them."""
    config = LlamaConfig(**fields, bos_token_id=0, eos_token_id=0)
    with torch.device(device):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    return placed(model)


def placed(model: PreTrainedModel) -> PreTrainedModel:
    for group in groups_of(model):
        join(group, model.device)
    return model.eval()


def eagle_of(target: PreTrainedModel) -> PreTrainedModel:
    """An EAGLE-3 draft for a quarter of the vocabulary, whose layer is the target's last."""
    num = target.config.vocab_size // 4
    text = Text(torch.arange(num + 1))
    draft: Any = make_eagle3(target, [text], DraftShape(reduced_vocab_size=num))
    return placed(draft.to(target.device, target.dtype))


def engine_run(
    models: dict[str, PreTrainedModel], shape: dict, num_tokens: int, method: str, cuda_graphs: str
) -> Callable[[int], float]:
    """A function of a number of new tokens that returns the tokens of each target pass."""
    target, drafter = models["none"], models[method]
    drafts = drafter is not target
    rules = {"num_speculative_tokens": NUM_DRAFT, "synthetic_acceptance_rate": RATE}
    spec = SpecConfig(method, **rules) if drafts else SpecConfig("none")
    blocks = shape["B"] * (-(-(shape["context"] + num_tokens + NUM_DRAFT) // 16) + 1)
    config = EngineConfig(
        cuda_graphs=cuda_graphs, max_batch_size=shape["B"], num_blocks=blocks, dtype="bfloat16"
    )
    engine = Engine(target, drafter if drafts else None, spec=spec, config=config)
    prompts = prompts_of(shape, target)

    def run(count: int) -> float:
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        outputs = engine.generate(prompts, params)
        assert all(len(output.token_ids) == count for output in outputs), "an output is too short"
        passes = max(output.stats.num_steps for output in outputs)
        return count / max(1, passes)

    return run


def generate_run(models: dict[str, PreTrainedModel], shape: dict) -> Callable[[int], float]:
    """Hugging Face's generate, as it is by default."""
    target = models["none"]
    input_ids = torch.tensor(prompts_of(shape, target), device=target.device)

    def run(count: int) -> float:
        lengths = {"min_new_tokens": count, "max_new_tokens": count}
        mask = torch.ones_like(input_ids)
        target.generate(input_ids, attention_mask=mask, do_sample=False, pad_token_id=0, **lengths)
        return 1.0

    return run


def prompts_of(shape: dict, target: PreTrainedModel) -> list[list[int]]:
    size = (shape["B"], shape["context"])
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1, target.config.vocab_size, size, generator=generator).tolist()


def runs(
    models: dict[str, PreTrainedModel], shapes: tuple, num_tokens: int
) -> Iterator[tuple[str, dict, Callable]]:
    """Name, shape and maker of each way to generate; without graphs last, as that takes long."""
    for shape in shapes:
        for method in models:
            yield method, shape, partial(engine_run, models, shape, num_tokens, method, "auto")
        yield "hf generate", shape, partial(generate_run, models, shape)
    last = models, shapes[0], num_tokens, "none", "off"
    yield "none, no graphs", shapes[0], partial(engine_run, *last)


def time_one(run: Callable[[int], float], num_tokens: int, device: str) -> tuple[Timing, float]:
    """Time per token of one sequence, and tokens per pass.

    It is the difference between long and short texts, so that reading the prompt is not in it.
    """

    def seconds(count: int) -> float:
        start = time.perf_counter()
        run(count)
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    for _ in range(WARM_UPS):
        run(num_tokens)
    samples, num_short = [], num_tokens // 4
    for _ in range(ROUNDS):
        short = seconds(num_short)
        samples.append((seconds(num_tokens) - short) / (num_tokens - num_short) * 1e6)
    return harness.quantiles(samples), run(num_tokens)


def main() -> int:
    arguments = options.parser(__doc__).parse_args()
    device = "cpu" if arguments.dry_run else "cuda"
    sizes = [{**fields, **TINY} if arguments.dry_run else fields for fields in (TARGET, DRAFT)]
    target, draft = (random_model(fields, device) for fields in sizes)
    models = {"none": target, "draft_model": draft, "eagle3": eagle_of(target)}
    read = target.lm_head, *target.model.layers  # of the embeddings a row a token
    num_bytes = sum(parameter.nbytes for part in read for parameter in part.parameters())
    bandwidth = 1e9 if arguments.dry_run else cuda_timing.copy_bandwidth()
    floor = round(num_bytes / bandwidth * 1e6, 1)
    num_tokens = 4 if arguments.dry_run else NUM_TOKENS
    shapes = TINY_SHAPES if arguments.dry_run else SHAPES
    progress = Progress(arguments.out / "engine.progress")
    named = {
        f"{method}-B{shape['B']}-{shape['context']}": (method, shape, make)
        for method, shape, make in runs(models, shapes, num_tokens)
    }

    def has_time() -> bool:
        return arguments.dry_run or options.seconds_left(arguments) >= SLOWEST_CASE

    for name in progress.in_turn(named, has_time):
        method, shape, make = named[name]
        timing, tokens_per_pass = time_one(make(), num_tokens, device)
        fields = {"op": "engine", "backend": method, "shape": shape, "logits": "-"}
        fields |= {"dtype": "bfloat16", "tokens_per_pass": round(tokens_per_pass, 3)}
        timings = {"ours": timing, "floor": Timing(floor, floor, floor)}
        harness.append("engine", harness.record_of(fields, timings, device), arguments.out)
        progress.note(name, "done")
        print(f"{name}: {timing.median_us:.0f} µs a token, floor {floor}", flush=True)
    print(f"{len(progress.status)} of {len(named)} cases", flush=True)
    return UNFINISHED if len(progress.status) < len(named) else 0


if __name__ == "__main__":
    sys.exit(main())
