"""Stage `draft`: distils the shallow draft from the target's distributions."""

import torch
from transformers import LlamaForCausalLM

from fastspec.train.distillation import DistillationLoss
from scripts.tiny.evaluate import Text, measure_acceptance
from scripts.tiny.generate import Distillation
from scripts.tiny.loop import Batch, LoopOptions, TrainingLoop
from scripts.tiny.target import Shape, make_model


def make_draft(target: LlamaForCausalLM, layers: int) -> LlamaForCausalLM:
    """A draft of the target's width that starts from its embedding, first and last layers."""
    config = target.config
    draft = make_model(
        Shape(layers, config.hidden_size, config.intermediate_size), config.vocab_size
    )
    draft.model.embed_tokens.load_state_dict(target.model.embed_tokens.state_dict())
    draft.model.norm.load_state_dict(target.model.norm.state_dict())
    first, *rest = target.model.layers
    chosen = [first, *rest[len(rest) - (layers - 1) :]]
    for mine, theirs in zip(draft.model.layers, chosen, strict=True):
        mine.load_state_dict(theirs.state_dict())
    return draft


def train_draft(
    draft: LlamaForCausalLM,
    target: LlamaForCausalLM,
    data: Distillation,
    judged: list[Text],
    options: LoopOptions,
    rows: int,
    seed: int,
) -> dict[str, float]:
    """Distils on shuffled rows; the record gets the greedy acceptance on `judged` (held-out)."""
    embedding = target.lm_head.weight.detach().bfloat16()
    generator = torch.Generator().manual_seed(seed)
    order = torch.empty(0, dtype=torch.long)

    def draw() -> Batch:
        nonlocal order
        if len(order) < rows:
            order = torch.randperm(len(data.token_ids), generator=generator)
        chosen, order = order[:rows], order[rows:]
        return data.token_ids[chosen].long(), data.hidden[chosen]

    def loss_of(batch: Batch) -> torch.Tensor:
        token_ids, hidden = batch
        with torch.autocast("cpu", torch.bfloat16):
            draft_logits = draft(input_ids=token_ids[:, :-1], use_cache=False).logits
        target_logits = hidden.flatten(0, 1) @ embedding.T
        return DistillationLoss.apply(draft_logits.flatten(0, 1), target_logits)

    def evaluate() -> dict[str, float]:
        return {
            "greedy_acceptance": measure_acceptance(target, draft, judged, 0.0)["acceptance_rate"]
        }

    return TrainingLoop(draft, options, draw, loss_of, evaluate).run()
