"""Random Gemma 4 assistants."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ..architectures import config_of


def random_assistant(target: PreTrainedModel, **options) -> Any:
    """An assistant of two layers, which read layers of both types of a target."""
    config: Any = target.config.get_text_config(decoder=True)
    text_config = config_of(
        "gemma4_text",
        hidden_size=24,
        num_hidden_layers=2,
        num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"],
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=0,
        vocab_size=config.vocab_size,
    )
    kind: Any = CONFIG_MAPPING["gemma4_assistant"]
    options |= {"text_config": text_config, "backbone_hidden_size": config.hidden_size}
    torch.manual_seed(1)
    model: Any = AutoModelForCausalLM.from_config(kind(**options), dtype=target.dtype).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(std=weight.shape[-1] ** -0.5)
        if model.masked_embedding is not None:
            model.masked_embedding.token_ordering.copy_(torch.randperm(config.vocab_size))
    return model
