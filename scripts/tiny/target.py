"""Stages `corpus` and `target`: token ids of the corpus, and next-token training of the target."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from scripts.tiny.corpus import Document, is_held_out
from scripts.tiny.loop import Batch, LoopOptions, TrainingLoop
from scripts.tiny.optim import windows
from scripts.tiny.tokenizer import END_OF_TEXT_ID, encode_documents, train_tokenizer

MAX_POSITIONS = 1024
HEAD_SIZE = 64


@dataclass(frozen=True)
class Shape:
    """Size of a Llama-type model; one key-value head serves all query heads."""

    layers: int
    hidden: int
    intermediate: int


def make_tokenizer(documents: list[Document], vocab_size: int) -> PreTrainedTokenizerFast:
    """A tokenizer trained on the training files."""
    texts = (document.text for document in documents if not is_held_out(document.source))
    return train_tokenizer(texts, vocab_size, MAX_POSITIONS)


def prepare(documents: list[Document], tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Writes the tokenizer and the token ids of both splits."""
    training = [document for document in documents if not is_held_out(document.source)]
    held_out = [document for document in documents if is_held_out(document.source)]
    tokenizer.save_pretrained(out / "tokenizer")
    np.save(out / "train.npy", encode_documents(tokenizer, training))
    np.save(out / "held_out.npy", encode_documents(tokenizer, held_out))


def load_tokenizer(out: Path, name: str = "tokenizer") -> PreTrainedTokenizerFast:
    """The tokenizer written by `prepare`, or another below that folder."""
    return AutoTokenizer.from_pretrained(out / name)


def load_token_ids(out: Path, split: str) -> torch.Tensor:
    """Token ids of a split (`train` or `held_out`), uint16 as int32 [T]."""
    return torch.from_numpy(np.load(out / f"{split}.npy").astype(np.int32))


def make_model(shape: Shape, vocab_size: int) -> LlamaForCausalLM:
    """A fresh model; the layers' output projections start small, so that depth starts harmless."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.hidden // HEAD_SIZE,
        num_key_value_heads=1,
        head_dim=HEAD_SIZE,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=END_OF_TEXT_ID,
        eos_token_id=END_OF_TEXT_ID,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.mul_((2 * shape.layers) ** -0.5)
    return model


def context_at(factor: float, longest: int, shortest: int) -> int:
    """Context of a step: a quarter of the longest at first, then half, then all of it.

    Not less than `shortest`.
    """
    if factor > 0.7:
        return max(longest // 4, shortest)
    return max(longest // 2, shortest) if factor > 0.25 else longest


def train_target(
    model: LlamaForCausalLM,
    out: Path,
    options: LoopOptions,
    rows: int,
    seed: int,
    shortest: int = 0,
) -> dict[str, float]:
    """Next-token training in bf16 autocast on the training split; returns the record.

    `rows` are those of the longest context; shorter contexts get more rows: attention costs less.
    Held-out loss is measured at each checkpoint.
    """
    longest = options.context
    train_ids, held_out_ids = load_token_ids(out, "train"), load_token_ids(out, "held_out")
    judged = held_out_windows(held_out_ids, longest)
    streams: dict[int, Iterator[torch.Tensor]] = {}

    def draw() -> Batch:
        context = context_at(loop.anneal.factor, longest, shortest)
        if context not in streams:
            generator = torch.Generator().manual_seed(seed + int(loop.record["steps"]))
            streams[context] = windows(train_ids, rows * longest // context, context, generator)
        return (next(streams[context]),)

    loss_on = torch.compile(next_token_loss, dynamic=False, disable=not options.compiled)

    def loss_of(batch: Batch) -> torch.Tensor:
        return loss_on(model, batch[0])

    @torch.inference_mode()
    def evaluate() -> dict[str, float]:
        losses = [next_token_loss(model, part) for part in judged.split(rows)]
        return {"held_out_loss": torch.stack(losses).mean().item()}

    loop = TrainingLoop(model, options, draw, loss_of, evaluate)
    return loop.run()


def held_out_windows(token_ids: torch.Tensor, context: int, count: int = 32) -> torch.Tensor:
    """Evenly spaced windows i64[<= count, context + 1]."""
    starts = torch.linspace(0, len(token_ids) - context - 1, count).long().unique()
    return torch.stack([token_ids[start : start + context + 1] for start in starts]).long()


def next_token_loss(model: LlamaForCausalLM, tokens: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy (nats) of tokens i64[B, S + 1]."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
