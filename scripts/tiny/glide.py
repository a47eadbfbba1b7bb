"""Stage `glide`: the bundled GLIDE draft and, to compare it with, a plain one as large."""

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from fastspec.config import SamplingParams, SpecConfig
from fastspec.drafters.glide.dense import TopLayers
from fastspec.engine.engine import Engine
from fastspec.models.paged_model import cache_name
from fastspec.train.data import Lesson, Rows
from fastspec.train.new_drafts import make_glide, make_matched
from fastspec.train.options import TrainOptions
from fastspec.train.processes import OneProcess
from fastspec.train.trainer import DraftTrainer
from scripts.tiny.evaluate import MAX_NEW_TOKENS, NUM_SPECULATIVE_TOKENS

_READ_ROWS = 32
_LOG_STEPS = 20
logger = logging.getLogger(__name__)


class StoredTarget:
    """The target's answers to all rows, computed once: keys, values and final states in bfloat16.

    A tenth of the work of running the target, which is deep, at every step.
    """

    @torch.no_grad()
    def __init__(self, target: LlamaForCausalLM, rows: Rows, num_draft_layers: int):
        self._rows = rows
        self._head = target.lm_head
        hidden: list[Tensor] = []
        layers: list[list[Tensor]] = []
        for ids in rows.token_ids[:, :-1].split(_READ_ROWS):
            cache = TopLayers(target.config.num_hidden_layers, num_draft_layers)
            given = {cache_name(target.model): cache}
            states = target.model(input_ids=ids, use_cache=True, **given)
            hidden.append(states.last_hidden_state.bfloat16())
            layers.append([part.bfloat16() for pair in cache.kept for part in pair])
        self._hidden = torch.cat(hidden)
        self._layers = [torch.cat(parts) for parts in zip(*layers, strict=True)]

    @torch.no_grad()
    def lesson(self, indices: Tensor) -> Lesson:
        rows = self._rows.take(indices)
        parts = [part[indices].float() for part in self._layers]
        layers = list(zip(parts[::2], parts[1::2], strict=True))
        target_logits = self._head(self._hidden[indices].float())
        return Lesson(rows.token_ids, rows.valid, layers, target_logits)


def measure_drafts(
    target: LlamaForCausalLM, drafts: dict[str, LlamaForCausalLM], prompts: list[list[int]]
) -> list[dict[str, Any]]:
    """The engine's acceptance with each draft, greedily and at temperature 1."""
    rows = []
    for temperature in (0.0, 1.0):
        params = [
            SamplingParams(temperature=temperature, seed=seed, max_tokens=MAX_NEW_TOKENS)
            for seed in range(len(prompts))
        ]
        for kind, draft in drafts.items():
            method = "glide" if kind == "glide" else "draft_model"
            engine = Engine(target, draft, spec=SpecConfig(method, NUM_SPECULATIVE_TOKENS))
            engine.generate(prompts, params)
            measured = {
                "acceptance_rate": engine.stats.acceptance_rate,
                "mean_acceptance_length": engine.stats.mean_acceptance_length,
            }
            rows.append({"draft": kind, "temperature": temperature} | measured)
    return rows


def train_drafts(
    target: LlamaForCausalLM,
    start: LlamaForCausalLM,
    rows: Rows,
    options: TrainOptions,
    shape: dict[str, int],
    out: Path,
    resume: bool,
) -> dict[str, LlamaForCausalLM]:
    """Distils a GLIDE draft and a plain one side by side, on the same rows in the same order.

    Both begin with what they share with the draft `start`, and have equally many weights.
    Checkpoints and records go to `out/glide` and `out/plain`.
    """
    torch.set_num_threads(1)
    glide = make_glide(target, start=start, **shape)
    drafts: dict[str, Any] = {"glide": glide, "plain": make_matched(glide, target, start)}
    teacher = StoredTarget(target, rows, glide.config.num_hidden_layers).lesson

    def train(kind: str) -> LlamaForCausalLM:
        processes = OneProcess(torch.device("cpu"))
        trainer = DraftTrainer(drafts[kind], teacher, len(rows), options, out / kind, processes)
        if resume:
            trainer.resume()

        def advance(step: int, loss: float) -> None:
            if step % _LOG_STEPS == 0:
                logger.info("%s: step %d, loss %.3f", kind, step, loss)

        trainer.run(advance)
        return drafts[kind].eval()

    with ThreadPoolExecutor(len(drafts)) as pool:
        return dict(zip(drafts, pool.map(train, drafts), strict=True))
