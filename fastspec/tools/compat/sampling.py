"""LLMSpeculativeSampling's functions (github.com/feifeibear/LLMSpeculativeSampling).

Each call creates an engine for its models; for many prompts create one `Engine` and batch them.
"""

import logging

import torch
from torch import Tensor

from fastspec.config import EngineConfig, SamplingParams, SpecConfig
from fastspec.config.checks import is_int, require, require_int
from fastspec.drafters.context import DrafterSource, ModelSource
from fastspec.engine.engine import Engine
from fastspec.engine.outputs import RequestOutput

logger = logging.getLogger(__name__)


def autoregressive_sampling(
    x: Tensor,
    model: ModelSource,
    N: int,
    temperature: float = 1,
    top_k: int = 0,
    top_p: float = 0,
) -> Tensor:
    """Sample from one model, without speculation.

    Args:
        x: [1, n] ids of the prompt.
        model: a loaded model, a path or a hub id.
        N: maximum number of new tokens, >= 1.
        temperature, top_k, top_p: as in `SamplingParams`, in this order; a top_p of 0 is off, a
            temperature of 0 greedy.
    Returns:
        [1, n + new] int64 ids: x and the new tokens, up to an end-of-sequence token.
    Raises:
        ValueError: an argument that cannot be used; the message names it.
    """
    require_int("N", N, 1)
    return _sampled("x", x, model, None, SpecConfig("none"), N, (temperature, top_k, top_p), None)


def speculative_sampling(
    prefix: Tensor,
    approx_model: ModelSource,
    target_model: ModelSource,
    max_len: int,
    gamma: int = 4,
    temperature: float = 1,
    top_k: int = 0,
    top_p: float = 0,
    verbose: bool = False,
    random_seed: int | None = None,
) -> Tensor:
    """Sample exactly from the target's distribution, with drafts of a smaller model.

    Args:
        prefix: [1, n] ids of the prompt.
        approx_model, target_model: loaded models, paths or hub ids.
        max_len: maximum number of new tokens, >= 1; the published code writes up to gamma more.
        gamma: draft tokens in each step, >= 1.
        temperature, top_k, top_p: as for `autoregressive_sampling`.
        verbose: log what was accepted, at level INFO.
        random_seed: makes the sample repeatable, including 0; None draws one from torch's
            generator, so that torch.manual_seed makes it repeatable.
    Returns:
        [1, n + new] int64 ids: prefix and the new tokens, up to an end-of-sequence token.
    Raises:
        ValueError: an argument that cannot be used; the message names it.

    Source: Leviathan et al., arXiv 2211.17192.
    """
    require_int("max_len", max_len, 1)
    require_int("gamma", gamma, 1)
    fits = random_seed is None or (is_int(random_seed) and random_seed >= 0)
    require("random_seed", random_seed, fits, "an int >= 0 or None")
    spec, sampling = SpecConfig("draft_model", gamma), (temperature, top_k, top_p)
    models = target_model, approx_model
    return _sampled("prefix", prefix, *models, spec, max_len, sampling, random_seed, verbose)


def speculative_sampling_v2(
    prefix: Tensor,
    approx_model: ModelSource,
    target_model: ModelSource,
    max_len: int,
    gamma: int = 4,
    temperature: float = 1,
    top_k: int = 0,
    top_p: float = 0,
    random_seed: int | None = None,
) -> Tensor:
    """`speculative_sampling`; the second published version differs only in having no cache.

    Source: Chen et al., arXiv 2302.01318.
    """
    sampling = temperature, top_k, top_p, False, random_seed
    return speculative_sampling(prefix, approx_model, target_model, max_len, gamma, *sampling)


def generated(
    target: ModelSource,
    drafter: DrafterSource | None,
    prompt: list[int],
    spec: SpecConfig,
    params: SamplingParams,
    is_logged: bool = False,
) -> tuple[RequestOutput, int | None]:
    """One text, and the start token if the target is an encoder-decoder.

    Raises:
        ValueError: an argument that cannot be used; the message names it.
    """
    engine = Engine(target, drafter, spec=spec, config=EngineConfig(max_batch_size=1))
    (output,) = engine.generate([prompt], params)
    if output.error is not None:
        raise ValueError(f"target: {output.error}")
    if is_logged:
        logger.info("%s: %s", output.finish_reason, output.stats)
    return output, engine.decoder_start_id


def seed_from_torch() -> int:
    """A seed that depends on torch.manual_seed, as the draws of published code do."""
    return int(torch.randint(2**63 - 1, ()))


def _sampled(
    name: str,
    ids: Tensor,
    target: ModelSource,
    drafter: ModelSource | None,
    spec: SpecConfig,
    max_tokens: int,
    sampling: tuple[float, int, float],
    seed: int | None,
    is_logged: bool = False,
) -> Tensor:
    if not isinstance(ids, Tensor) or ids.dim() != 2 or len(ids) != 1:
        got = tuple(ids.shape) if isinstance(ids, Tensor) else type(ids).__name__
        raise ValueError(f"{name}: expected a tensor of ids of shape [1, n], got {got}")
    temperature, top_k, top_p = sampling
    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=1.0 if top_p == 0 else top_p,
        seed=seed_from_torch() if seed is None else seed,
        max_tokens=max_tokens,
    )
    output, _ = generated(target, drafter, ids[0].tolist(), spec, params, is_logged)
    return torch.cat([ids, torch.tensor([output.token_ids], device=ids.device)], dim=1)
