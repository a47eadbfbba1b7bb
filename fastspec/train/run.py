"""Runs of `fastspec train draft` and `glide`, from text to a folder with a draft and its record."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from fastspec.config import EngineConfig, SamplingParams, SpecConfig
from fastspec.config.checks import require
from fastspec.config.files import write_whole
from fastspec.drafters.glide import GlideLlamaForCausalLM
from fastspec.engine.engine import Engine
from fastspec.models.reduced_vocabulary import ReducedHead, save_reduced
from fastspec.train.data import (
    Rows,
    digest_of,
    frozen_target,
    states_file,
    stored_target,
)
from fastspec.train.options import DraftShape, TrainOptions
from fastspec.train.processes import OneProcess
from fastspec.train.trainer import Advance, DraftTrainer, check_same_run, run_of

_REPORT_PROMPTS = 16
_REPORT_TOKENS = 64


def train_draft(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    rows: Rows,
    options: TrainOptions,
    out: Path,
    processes: OneProcess,
    resume: bool,
    advance: Advance,
    on_row: Callable[[int], None] = lambda num_rows: None,
    shape: DraftShape | None = None,
) -> dict[str, Any]:
    """Train a draft; write checkpoints, weights and record to the folder `out`.

    advance is called after each step; on_row with the number of rows that the target has read, if
    its states are stored first. shape says how the rows were cut, for the checkpoint.

    Raises:
        ValueError: a checkpoint to resume from is missing or of another run, or exists although
            resume is False; a reduced vocabulary without full distillation; a nonzero weight of
            `acceptance`, for drafts that read hidden states.
    """
    weight = options.acceptance
    require("acceptance", weight, weight == 0, "0, as only drafts that read hidden states use it")
    num_layers = draft.config.num_hidden_layers if isinstance(draft, GlideLlamaForCausalLM) else 0
    head: Any = draft.get_output_embeddings()
    token_ids = head.token_ids if isinstance(head, ReducedHead) else None
    if token_ids is not None:
        weight = options.distillation
        require("distillation", weight, weight == 1, "1, as the vocabulary is reduced")
    texts = [rows.token_ids, rows.lengths]
    kind = "glide" if isinstance(draft, GlideLlamaForCausalLM) else "plain"
    run = run_of(options, processes, kind, target, shape, digest_of(texts))
    if resume:  # before the states that the run to resume has stored are deleted
        check_same_run(out, run, draft)
    file = states_file(out, resume, target, texts, num_layers)
    target.to(processes.device)  # pyright: ignore[reportArgumentType]
    if options.store_target:
        teacher = stored_target(target, rows, num_layers, token_ids, file, on_row)
    else:
        teacher = frozen_target(target, rows, num_layers, token_ids)
    trainer = DraftTrainer(draft, teacher, len(rows), options, out, processes, run=run)
    if resume:
        trainer.resume()
    trainer.run(advance)
    trained = processes.unwrap_model(trainer.draft, keep_fp32_wrapper=False).eval()
    if processes.is_main_process:
        trained.save_pretrained(out) if token_ids is None else save_reduced(trained, out)
        file.unlink(missing_ok=True)
    return trainer.record


def report_acceptance(
    target: PreTrainedModel, held_out: Rows, spec: SpecConfig, out: Path
) -> dict[str, float]:
    """Decode held-out prompts greedily with the draft in `out`; return the acceptance, and add it
    to the record.

    A prompt is the first half of a random row; up to 16 prompts, with up to 64 new tokens each.
    """
    config = EngineConfig(device=str(target.device))
    engine = Engine(target, out, spec=spec, config=config)
    order = torch.randperm(len(held_out), generator=torch.Generator().manual_seed(0))
    shown = held_out.take(order[:_REPORT_PROMPTS])
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
    write_whole(json.dumps(record, indent=1) + "\n", path)
    return report
