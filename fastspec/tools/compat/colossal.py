"""Colossal-Inference's two entries (github.com/hpcaitech/ColossalAI, colossalai/inference)."""

from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fastspec.config import EngineConfig
from fastspec.config.checks import require
from fastspec.drafters.context import ModelSource
from fastspec.engine.engine import Engine


def InferenceConfig(**fields: Any) -> EngineConfig:
    """`EngineConfig.from_colossal` of keyword arguments."""
    return EngineConfig.from_colossal(fields)


def InferenceEngine(
    model_or_path: ModelSource,
    tokenizer: PreTrainedTokenizerBase | None = None,
    inference_config: EngineConfig | None = None,
    verbose: bool = False,
    model_policy: None = None,
) -> Engine:
    """An `Engine`, whose `generate` returns outputs where the published one returns texts.

    Args:
        model_or_path: one that is loaded is converted to the configuration's dtype, in place.
        verbose: without effect; what there is to say is logged.
        model_policy: only None, every architecture that is supported needs none.
    Raises:
        ValueError: a model or option that cannot be used.
    """
    require("model_policy", model_policy, model_policy is None, "None")
    config = EngineConfig() if inference_config is None else inference_config
    if isinstance(model_or_path, PreTrainedModel) and config.dtype != "auto":
        model_or_path.to(getattr(torch, config.dtype))
    return Engine(model_or_path, tokenizer=tokenizer, config=config)
