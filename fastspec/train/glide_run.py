"""Runs of `fastspec train draft` and `glide`, from text to a folder with a draft and its record."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from fastspec.config import EngineConfig, SamplingParams, SpecConfig
from fastspec.config.checks import require
from fastspec.drafters.glide import GlideLlamaForCausalLM
from fastspec.drafters.glide.dense import read_target
from fastspec.drafters.glide.loading import shape_of_target
from fastspec.engine.engine import Engine
from fastspec.models.layer_fields import last_layer_field
from fastspec.models.model_kinds import paged_model_of
from fastspec.models.reduced_vocabulary import ReducedHead, reduce_vocabulary, save_reduced
from fastspec.train.glide import Advance, GlideTrainer, make_glide, make_plain, make_shallow
from fastspec.train.glide_data import (
    Rows,
    frozen_target,
    most_frequent,
    states_file,
    stored_target,
)
from fastspec.train.options import DraftShape, TrainOptions
from fastspec.train.processes import OneProcess

_REPORT_PROMPTS = 16
_REPORT_TOKENS = 64


def make_draft(
    target: PreTrainedModel, rows: Rows, shape: DraftShape, kind: str
) -> PreTrainedModel:
    """Make an untrained draft for a target, with the target's head size.

    Args:
        rows: training data, from which the tokens of a reduced vocabulary are chosen.
        kind: "glide", "draft" for a plain one, or "plain" for one as large as a GLIDE draft.
    Raises:
        ValueError: the fields of the shape do not fit together, or the target is not one that such
            a draft learns from.
    """
    running = paged_model_of(target, EngineConfig())  # refuses targets that the engine does not run
    sizes = {name: getattr(shape, name) for name in ("hidden_size", "intermediate_size")}
    sizes = {name: size for name, size in sizes.items() if size is not None}
    large = target.config.get_text_config(decoder=True)
    if shape.hidden_size not in (None, large.hidden_size):
        head_dim = last_layer_field(large, "head_dim")
        head_dim = head_dim or large.hidden_size // large.num_attention_heads
        heads, rest = divmod(shape.hidden_size, head_dim)
        expected = f"a multiple of the head size {head_dim}"
        require("hidden_size", shape.hidden_size, rest == 0, expected)
        sizes |= {"num_attention_heads": heads, "num_key_value_heads": heads}
    if kind == "draft":
        draft = make_shallow(target, shape.layers, **sizes)
    else:
        draft = make_glide(target, shape.layers, **sizes)
        _check_glimpse(target, shape.layers, running.recurrent is not None)
        draft = make_plain(draft, target) if kind == "plain" else draft
    if (size := shape.reduced_vocab_size) is not None:
        vocab_size = draft.config.vocab_size
        require("reduced_vocab_size", size, size <= vocab_size, f"at most {vocab_size}")
        reduce_vocabulary(draft, target, most_frequent(rows.token_ids[rows.valid], size))
    return draft


def _check_glimpse(target: PreTrainedModel, num_layers: int, is_recurrent: bool) -> None:
    """Refuse a target whose last layers do not keep keys and values as its config says."""
    name, known = type(target).__name__, shape_of_target(target)
    if is_recurrent:
        raise ValueError(f"target: {name} has recurrent layers, which a GLIDE draft cannot learn")
    heads, size = known["large_num_key_value_heads"], known["large_head_dim"]
    ids = torch.zeros(1, 2, dtype=torch.int64, device=target.device)
    layers, _ = read_target(target, ids, ids == 0, num_layers)
    for pair in layers:
        for part, kept in zip(("keys", "values"), pair, strict=True):
            found = tuple(kept.shape[1::2])
            if found != (heads, size):
                raise ValueError(
                    f"target: {name} keeps {part} of {found[0]} heads of size {found[1]}, but a"
                    f" GLIDE draft for it reads {heads} of size {size}"
                )


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
) -> dict[str, Any]:
    """Train a draft; write checkpoints, weights and record to the folder `out`.

    advance is called after each step; on_row with the number of rows that the target has read, if
    its states are stored first.

    Raises:
        ValueError: a checkpoint to resume from is missing, or exists although resume is False; a
            reduced vocabulary without full distillation; a nonzero weight of `acceptance`, which
            only EAGLE-3 drafts are trained with.
    """
    weight = options.acceptance
    require("acceptance", weight, weight == 0, "0, as only EAGLE-3 drafts use it")
    num_layers = draft.config.num_hidden_layers if isinstance(draft, GlideLlamaForCausalLM) else 0
    file = states_file(out, resume, target, [rows.token_ids, rows.lengths], num_layers)
    target.to(processes.device)  # pyright: ignore[reportArgumentType]
    head: Any = draft.get_output_embeddings()
    token_ids = head.token_ids if isinstance(head, ReducedHead) else None
    if token_ids is not None:
        weight = options.distillation
        require("distillation", weight, weight == 1, "1, as the vocabulary is reduced")
    if options.store_target:
        teacher = stored_target(target, rows, num_layers, token_ids, file, on_row)
    else:
        teacher = frozen_target(target, rows, num_layers, token_ids)
    trainer = GlideTrainer(draft, teacher, len(rows), options, out, processes)
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

    A prompt is the first half of a row; up to 16 prompts, with up to 64 new tokens each.
    """
    config = EngineConfig(device=str(target.device))
    engine = Engine(target, out, spec=spec, config=config)
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
