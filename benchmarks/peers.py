"""The same work done with torch, transformers and, where it can be imported, FlashInfer."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from inspect import signature

import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.utils import _speculative_sampling

HAS_FLASHINFER = find_spec("flashinfer") is not None


@dataclass(frozen=True)
class Peer:
    """Somebody else's way; `capturable` tells that it runs within a CUDA graph."""

    run: Callable[[int], object]
    capturable: bool = True


def warpers(values: dict) -> LogitsProcessorList:
    """The parameters as Hugging Face's generate applies them."""
    made = {
        "temperature": TemperatureLogitsWarper,
        "top_k": TopKLogitsWarper,
        "top_p": TopPLogitsWarper,
    }
    return LogitsProcessorList([made[name](value) for name, value in values.items()])


def hf_logits(logits: Tensor, values: dict) -> Tensor:
    """What generate makes of a model's logits: float32, then the warpers."""
    return warpers(values)(None, logits.to(torch.float32, copy=True))


def hf_probs(logits: Tensor, values: dict) -> Tensor:
    return hf_logits(logits, values).softmax(-1)


def hf_sample(logits: Tensor, values: dict) -> Tensor:
    return hf_probs(logits, values).multinomial(1)


def torch_sample(logits: Tensor, values: dict) -> Tensor:
    """One sort for both filters, then a draw among the sorted."""
    if not values:
        return logits.float().softmax(-1).multinomial(1)
    sorted_logits, ids = (logits.float() / values.get("temperature", 1.0)).sort(descending=True)
    if "top_k" in values:
        sorted_logits[:, values["top_k"] :] = -torch.inf
    probs = sorted_logits.softmax(-1)
    probs[probs.cumsum(-1) - probs >= values["top_p"]] = 0
    return ids.gather(1, probs.multinomial(1))


def hf_chain(target: Tensor, draft: Tensor, draft_token_ids: Tensor, values: dict) -> list:
    """Hugging Face's rule takes one sequence at a time: target [B, K+1, V], draft [B, K, V]."""
    # Older releases also ask whether the candidate ends the text.
    ends_text = "is_done_candidate" in signature(_speculative_sampling).parameters
    extra = {"is_done_candidate": False} if ends_text else {}
    return [
        _speculative_sampling(
            tokens[None],
            hf_logits(draft_rows, values)[None],
            len(draft_rows),
            hf_logits(rows, values)[None],
            **extra,
        )
        for rows, draft_rows, tokens in zip(target, draft, draft_token_ids, strict=True)
    ]


def flashinfer_probs(logits: Tensor, values: dict) -> Tensor:
    from flashinfer import sampling

    temperature = values.get("temperature", 1.0)
    probs = sampling.softmax(logits.float(), temperature=temperature)
    if "top_k" in values:
        probs = sampling.top_k_renorm_probs(probs, values["top_k"])
    if "top_p" in values:
        probs = sampling.top_p_renorm_probs(probs, values["top_p"])
    return probs


def flashinfer_sample(logits: Tensor, values: dict) -> Tensor:
    from flashinfer import sampling

    scaled = logits.float() / values.get("temperature", 1.0)
    if not values:
        return sampling.sampling_from_logits(scaled, seed=0, offset=0)
    top_k = values.get("top_k", logits.shape[1])
    return sampling.top_k_top_p_sampling_from_logits(
        scaled, top_k, values["top_p"], filter_apply_order="top_k_first", seed=0, offset=0
    )


def flashinfer_chain(target: Tensor, draft: Tensor, draft_token_ids: Tensor, values: dict):
    from flashinfer import sampling

    target_probs, draft_probs = (
        flashinfer_probs(rows.flatten(0, 1), values).view(rows.shape) for rows in (target, draft)
    )
    return sampling.chain_speculative_sampling(
        draft_probs, draft_token_ids, target_probs, seed=0, offset=0
    )
