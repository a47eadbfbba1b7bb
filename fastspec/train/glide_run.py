"""A run of `fastspec train glide`, from text to a folder with a draft and its report."""

import json
import math
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from fastspec.config import EngineConfig, SamplingParams, SpecConfig
from fastspec.config.checks import require
from fastspec.drafters.glide import GlideLlamaForCausalLM
from fastspec.engine.engine import Engine
from fastspec.train.glide import Advance, GlideTrainer, TrainOptions, make_glide, make_plain
from fastspec.train.glide_data import Rows, frozen_target
from fastspec.train.processes import OneProcess

_REPORT_PROMPTS = 16
_REPORT_TOKENS = 64


def make_draft(
    target: PreTrainedModel,
    layers: int = 1,
    hidden_size: int | None = None,
    intermediate_size: int | None = None,
    plain: bool = False,
) -> PreTrainedModel:
    """A fresh draft for a target; its heads are of the target's size.

    Args:
        layers: 1 or 2 is what pays, up to the target's.
        hidden_size, intermediate_size: None = the target's.
        plain: a Llama as large, without cross-attention, to compare with.
    Raises:
        ValueError: a shape that does not fit together.
    """
    sizes = {"hidden_size": hidden_size, "intermediate_size": intermediate_size}
    shape = {name: size for name, size in sizes.items() if size is not None}
    for name, size in shape.items():
        require(name, size, size >= 1, "an int >= 1")
    large = target.config.get_text_config(decoder=True)
    if hidden_size not in (None, large.hidden_size):
        head_dim = getattr(large, "head_dim", None)
        head_dim = head_dim or large.hidden_size // large.num_attention_heads
        heads, rest = divmod(hidden_size, head_dim)
        require("hidden_size", hidden_size, rest == 0, f"a multiple of the head size {head_dim}")
        shape |= {"num_attention_heads": heads, "num_key_value_heads": heads}
    glide = make_glide(target, layers, start=None, **shape)
    return make_plain(glide, target) if plain else glide


def split_rows(rows: Rows, held_out: float, seed: int) -> tuple[Rows, Rows]:
    """Rows to train on, and at least one, chosen at random, to judge the draft by.

    Raises:
        ValueError: a part out of range, or fewer than two rows.
    """
    require("held_out", held_out, 0 < held_out < 1, "a number between 0 and 1")
    if len(rows) < 2:
        raise ValueError("data: too little text; there is one row, which cannot be held out too")
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    count = min(max(1, round(held_out * len(rows))), len(rows) - 1)
    return rows.take(order[count:]), rows.take(order[:count])


def train_draft(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    rows: Rows,
    options: TrainOptions,
    out: Path,
    processes: OneProcess,
    resume: bool,
    advance: Advance,
) -> dict[str, float]:
    """Train a draft into the folder `out`: checkpoints, weights, record.

    Raises:
        ValueError: a checkpoint that is missing, or there without being asked for.
    """
    if (out / "checkpoint.pt").exists() and not resume:
        raise ValueError(f"out: {out} holds a checkpoint: resume it, or choose another folder")
    target.to(processes.device)  # pyright: ignore[reportArgumentType]
    teacher = frozen_target(target, rows, draft.config.num_hidden_layers)
    trainer = GlideTrainer(draft, teacher, len(rows), options, out, processes)
    if resume:
        trainer.resume()
    trainer.run(advance)
    trained = processes.unwrap_model(trainer.draft, keep_fp32_wrapper=False).eval()
    if processes.is_main_process:
        trained.save_pretrained(out)
    return trainer.record


def one_epoch(num_rows: int, batch_size: int, processes: OneProcess) -> int:
    """Steps that show every row once."""
    return math.ceil(num_rows / (batch_size * processes.num_processes))


def report_acceptance(
    target: PreTrainedModel, draft: PreTrainedModel, held_out: Rows, spec: SpecConfig, out: Path
) -> dict[str, float]:
    """Decode held-out prompts greedily with the draft; what was accepted, also into the record.

    A prompt is the first half of a row; 16 at most, 64 new tokens each at most.
    """
    method = "glide" if isinstance(draft, GlideLlamaForCausalLM) else "draft_model"
    engine = Engine(target, draft, spec=replace(spec, method=method), config=EngineConfig())
    shown = held_out.take(torch.arange(len(held_out))[:_REPORT_PROMPTS])
    lengths = (shown.lengths // 2).clamp(min=1).tolist()
    prompts = [ids[:n].tolist() for ids, n in zip(shown.token_ids, lengths, strict=True)]
    max_tokens = min(_REPORT_TOKENS, engine.max_model_len - max(lengths))
    engine.generate(prompts, SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True))
    report = {
        "held_out_prompts": len(prompts),
        "num_speculative_tokens": spec.num_draft_tokens(),
        "acceptance_rate": engine.stats.acceptance_rate,
        "mean_acceptance_length": engine.stats.mean_acceptance_length,
    }
    path = out / "record.json"
    record = json.loads(path.read_text()) | report
    path.write_text(json.dumps(record, indent=1) + "\n")
    return report
