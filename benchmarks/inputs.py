"""Inputs of the sampling benchmarks, and the same work done with Hugging Face's functions."""

from types import SimpleNamespace

import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from fastspec_kernels import available_backends

BACKENDS = [name for name in available_backends() if name != "reference"]
FILTERS = {"temperature": 0.8, "top_k": 50, "top_p": 0.9}
SAMPLING = {"unfiltered": {}, "filtered": FILTERS}


def logits_like_a_model(num_rows: int, vocab: int, generator: torch.Generator) -> Tensor:
    """Rows with a few likely tokens above a wide floor."""
    logits = torch.randn(num_rows, vocab, generator=generator) * 2
    logits[:, :64] += torch.linspace(14, 4, 64)
    return logits


def parameters(values: dict, num: int) -> dict[str, Tensor]:
    """Sampling parameters as the ops take them."""
    return {
        name: torch.full((num,), value, dtype=torch.int32 if name == "top_k" else torch.float32)
        for name, value in values.items()
    }


def warpers(values: dict) -> LogitsProcessorList:
    """The same parameters as Hugging Face's generate applies them."""
    made = {
        "temperature": TemperatureLogitsWarper,
        "top_k": TopKLogitsWarper,
        "top_p": TopPLogitsWarper,
    }
    return LogitsProcessorList([made[name](value) for name, value in values.items()])


def chain_case(num_draft: int, vocab: int, num_uniforms: int = 16) -> SimpleNamespace:
    """One sequence whose draft is a noisy copy of the target, with several sets of uniforms."""
    generator = torch.Generator().manual_seed(0)
    target_logits = logits_like_a_model(num_draft + 1, vocab, generator)
    noise = torch.randn(num_draft, vocab, generator=generator) * 0.5
    draft_logits = (target_logits[:num_draft] + noise)[None]
    tokens = torch.multinomial(draft_logits[0].softmax(-1), 1, generator=generator).T
    shape = (num_uniforms, 1, num_draft + 1)
    return SimpleNamespace(
        target_logits=target_logits,
        cu_rows=torch.tensor([0, num_draft + 1], dtype=torch.int32),
        draft_token_ids=tokens.int(),
        draft_logits=draft_logits,
        uniform_samples=list(torch.rand(shape, generator=generator)),
    )
