"""Trains the bundled target and drafts: `python -m scripts.tiny STAGE --out DIR`.

Stages, in order: corpus, target, generate, draft, export, glide. Each reads what the ones before
it left in `--out`, and each number of the model card comes from a record that a stage wrote. With
`--start DIR`, the folder of bundled models, corpus and target go on from those.
"""

import json
import logging
import platform
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import LlamaForCausalLM

from fastspec.train.data import Rows
from fastspec.train.options import TrainOptions
from scripts.tiny import corpus as tiny_corpus
from scripts.tiny import draft as tiny_draft
from scripts.tiny import evaluate as tiny_evaluate
from scripts.tiny import export as tiny_export
from scripts.tiny import generate as tiny_generate
from scripts.tiny import glide as tiny_glide
from scripts.tiny import prompts as tiny_prompts
from scripts.tiny import target as tiny_target
from scripts.tiny import textbook
from scripts.tiny.loop import LoopOptions

app = typer.Typer(help=__doc__, no_args_is_help=True, pretty_exceptions_enable=False)

Out = Annotated[Path, typer.Option(help="Working folder: corpus, checkpoints, records.")]
Minutes = Annotated[float, typer.Option(help="Wall-clock budget; the rate reaches 0 at its end.")]
Resume = Annotated[bool, typer.Option(help="Continue from the stage's last checkpoint.")]
Seed = Annotated[int, typer.Option(help="Seed of the weights, the batches and the samples.")]
Start = Annotated[
    Path | None, typer.Option(help="Go on from the bundled target and tokenizer of this folder.")
]
OUT = Path("tiny-out")


@app.callback()
def main() -> None:
    """Trains the bundled target and draft."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")


@app.command()
def corpus(
    out: Out = OUT,
    modules: Annotated[int, typer.Option(help="Modules of the textbook.")] = 12_000,
    pages: Annotated[int, typer.Option(help="Pages about such modules.")] = 4_000,
    library: Annotated[Path | None, typer.Option(help="Standard library; default: mine.")] = None,
    vocab_size: int = 4096,
    prompts_per_kind: int = 16,
    start: Start = None,
) -> None:
    """Reads the corpus, trains the tokenizer, encodes both splits and cuts the prompts."""
    out.mkdir(parents=True, exist_ok=True)
    documents = [*tiny_corpus.read_corpus(library), *textbook.documents(modules, pages)]
    if start is None:
        tokenizer = tiny_target.make_tokenizer(documents, vocab_size)
    else:
        tokenizer = tiny_target.load_tokenizer(start, "tiny-target")
    tiny_target.prepare(documents, tokenizer, out)
    prompts = tiny_prompts.choose_prompts(documents, tokenizer, prompts_per_kind)
    tiny_prompts.write_prompts(prompts, out / "prompts.jsonl")
    held_out = sum(tiny_corpus.is_held_out(document.source) for document in documents)
    record = {
        "python": platform.python_version(),
        "library_files": sum(document.source.startswith("lib/") for document in documents),
        "modules": modules,
        "pages": pages,
        "training_files": len(documents) - held_out,
        "held_out_files": held_out,
        "train_tokens": len(tiny_target.load_token_ids(out, "train")),
        "held_out_tokens": len(tiny_target.load_token_ids(out, "held_out")),
        "vocab_size": len(tokenizer),
        "positions": tiny_target.MAX_POSITIONS,
    }
    _write_json(out / "corpus.json", record)


@app.command()
def target(
    out: Out = OUT,
    minutes: Minutes = 80.0,
    layers: int = 24,
    hidden: int = 192,
    intermediate: int = 384,
    rows: int = 8,
    context: int = 512,
    rate: float = 4e-3,
    seed: Seed = 0,
    resume: Resume = False,
    start: Start = None,
    compiled: Annotated[bool, typer.Option(help="Compile the step of training.")] = True,
) -> None:
    """Trains the target on next tokens."""
    torch.manual_seed(seed)
    vocab_size = len(tiny_target.load_tokenizer(out))
    sizes = {"workers": 1, "threads": 2}
    options = LoopOptions(
        out / "target", minutes, context, rate, compiled=compiled, resume=resume, **sizes
    )
    if start is None:
        shape = tiny_target.Shape(layers, hidden, intermediate)
        model = tiny_target.make_model(shape, vocab_size)
    else:
        model = LlamaForCausalLM.from_pretrained(start / "tiny-target", dtype=torch.float32)
        record = _read_json(start / "record.json")
        _write_json(out / "first.json", {name: record[name] for name in ("corpus", "target")})
    shortest = 0 if start is None else context // 2
    tiny_target.train_target(model, out, options, rows, seed, shortest)


@app.command()
def generate(
    out: Out = OUT,
    corpus_batches: Annotated[int, typer.Option(help="Batches of 256 corpus rows.")] = 3,
    repeated_batches: Annotated[int, typer.Option(help="Batches of 256 repetitive rows.")] = 5,
    greedy_batches: Annotated[int, typer.Option(help="Batches of 256 greedy rows.")] = 4,
    sampled_batches: Annotated[int, typer.Option(help="Batches of 256 sampled rows.")] = 2,
    context: int = 256,
    seed: Seed = 0,
) -> None:
    """Writes the rows that the draft is distilled from."""
    model = _load_target(out)
    batches = (corpus_batches, repeated_batches, greedy_batches, sampled_batches)
    sizes = dict(zip(tiny_generate.KINDS, batches, strict=True))
    token_ids = tiny_target.load_token_ids(out, "train")
    rows = tiny_generate.make_distillation(model, token_ids, sizes, context, seed)
    tiny_generate.save_distillation(rows, out / "distillation.pt")
    parts = [f"{tiny_generate.ROWS * sizes[kind]:,} {tiny_generate.KINDS[kind]}" for kind in sizes]
    mix = ", ".join(parts)
    _write_json(out / "distillation.json", {"rows": len(rows.token_ids), "mix": mix})


@app.command()
def draft(
    out: Out = OUT,
    minutes: Minutes = 25.0,
    layers: int = 2,
    rows: int = 8,
    rate: float = 5e-3,
    seed: Seed = 0,
    resume: Resume = False,
) -> None:
    """Distils the draft; the held-out acceptance is measured at each checkpoint."""
    torch.manual_seed(seed)
    teacher = _load_target(out)
    model = tiny_draft.make_draft(teacher, layers)
    data = tiny_generate.load_distillation(out / "distillation.pt")
    judged = tiny_evaluate.write_texts(teacher, _prompt_ids(out), temperature=0.0)
    options = LoopOptions(out / "draft", minutes, data.hidden.shape[1], rate, resume=resume)
    tiny_draft.train_draft(model, teacher, data, judged, options, rows, seed)


@app.command()
def export(out: Out = OUT, assets: Path = Path("fastspec/assets")) -> None:
    """Writes bf16 weights, tokenizer, prompts and card, and measures the acceptance on them."""
    tokenizer = tiny_target.load_tokenizer(out)
    record: dict[str, Any] = {
        "corpus": _read_json(out / "corpus.json"),
        "distillation": _read_json(out / "distillation.json"),
    }
    models = {}
    for name in ("target", "draft"):
        tiny_export.export_model(_load_model(out, name), tokenizer, assets / f"tiny-{name}")
        models[name] = LlamaForCausalLM.from_pretrained(
            assets / f"tiny-{name}", dtype=torch.float32
        )
        record[name] = _describe(models[name]) | _read_json(out / name / "record.json")
    if (out / "first.json").exists():
        record["first"] = _read_json(out / "first.json")
    token_ids = tiny_target.load_token_ids(out, "train")
    tiny_export.export_bigram(token_ids.numpy(), len(tokenizer), assets / "tiny-target")
    prompts = tiny_prompts.read_prompts(out / "prompts.jsonl")
    tiny_prompts.write_prompts(prompts, assets / "prompts.jsonl")
    record["num_prompts"] = len(prompts)
    record["evaluation"] = _evaluate(models["target"], models["draft"], _prompt_ids(out))
    tiny_export.write_card(record, assets)


@app.command()
def glide(
    out: Out = OUT,
    assets: Path = Path("fastspec/assets"),
    layers: int = 1,
    intermediate: int = 1024,
    steps: int = 4000,
    rows: int = 4,
    rate: float = 3e-3,
    lookup_rows: int = 192,
    checkpoint_steps: int = 100,
    seed: Seed = 0,
    resume: Resume = False,
) -> None:
    """Distils the GLIDE draft of the bundled target and a plain one as large, and bundles GLIDE."""
    torch.manual_seed(seed)
    target, start = (
        LlamaForCausalLM.from_pretrained(assets / name, dtype=torch.float32).eval()
        for name in ("tiny-target", "tiny-draft")
    )
    token_ids = torch.load(out / "distillation.pt", weights_only=True, mmap=True)["token_ids"]
    lengths = torch.full((len(token_ids),), token_ids.shape[1])
    options = TrainOptions(
        steps,
        rows,
        rate,
        distillation=1.0,
        lookup_rows=lookup_rows,
        optimizer="muon",
        checkpoint_steps=checkpoint_steps,
        seed=seed,
    )
    texts = Rows(token_ids.long(), lengths)
    shape = {"num_layers": layers, "intermediate_size": intermediate}
    drafts = tiny_glide.train_drafts(target, start, texts, options, shape, out, resume)
    export_glide(drafts, target, out, assets, steps)


def export_glide(
    drafts: dict[str, LlamaForCausalLM],
    target: LlamaForCausalLM,
    out: Path,
    assets: Path,
    planned_steps: int,
) -> None:
    """Writes the GLIDE draft, measures it beside the plain one, and adds both to the card."""
    tokenizer = tiny_target.load_tokenizer(assets, "tiny-target")
    tiny_export.export_model(drafts["glide"], tokenizer, assets / "tiny-glide")
    rounded = {name: draft.bfloat16().float() for name, draft in drafts.items()}
    prompts = tiny_prompts.read_prompts(assets / "prompts.jsonl")
    ids = [tokenizer.encode(prompt["text"]) for prompt in prompts]
    record = _read_json(assets / "record.json")
    record["glide"] = {
        **_read_json(out / "distillation.json"),
        **{
            kind: _describe(rounded[kind]) | _read_json(out / kind / "record.json")
            for kind in rounded
        },
        "planned_steps": planned_steps,
        "evaluation": tiny_glide.measure_drafts(target, rounded, ids),
    }
    tiny_export.write_card(record, assets)


def _evaluate(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, prompts: list[list[int]]
) -> list[dict[str, Any]]:
    half = len(prompts) // 2
    rows = []
    for temperature in (0.0, 1.0):
        texts = tiny_evaluate.write_texts(target, prompts, temperature)
        for name, part in (("code", texts[:half]), ("documentation", texts[half:]), ("all", texts)):
            measured = tiny_evaluate.measure_acceptance(target, draft, part, temperature)
            rows.append({"prompts": name, "temperature": temperature} | measured)
    return rows


def _describe(model: LlamaForCausalLM) -> dict[str, int]:
    return {
        "layers": model.config.num_hidden_layers,
        "hidden": model.config.hidden_size,
        "intermediate": model.config.intermediate_size,
        "heads": model.config.num_attention_heads,
        "parameters": model.num_parameters(),
    }


def _prompt_ids(out: Path) -> list[list[int]]:
    tokenizer = tiny_target.load_tokenizer(out)
    prompts = tiny_prompts.read_prompts(out / "prompts.jsonl")
    return [tokenizer.encode(prompt["text"]) for prompt in prompts]


def _load_target(out: Path) -> LlamaForCausalLM:
    return _load_model(out, "target")


def _load_model(out: Path, name: str) -> LlamaForCausalLM:
    """The model of a checkpoint, its shape read off its weights."""
    state = torch.load(out / name / "checkpoint.pt", weights_only=True)["model"]
    vocab_size, hidden = state["model.embed_tokens.weight"].shape
    intermediate = len(state["model.layers.0.mlp.up_proj.weight"])
    layers = sum(key.endswith("mlp.up_proj.weight") for key in state)
    model = tiny_target.make_model(tiny_target.Shape(layers, hidden, intermediate), vocab_size)
    model.load_state_dict(state)
    return model.eval()


def _write_json(path: Path, record: dict[str, Any]) -> None:
    path.write_text(json.dumps(record, indent=1) + "\n")


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


if __name__ == "__main__":
    app()
