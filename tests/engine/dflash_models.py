"""Random DFlash drafts, in folders of the published layouts."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from fastspec.drafters.dflash import DFlashConfig, DFlashDraft

MASK = 262


def random_dflash(target: PreTrainedModel, **fields: Any) -> DFlashDraft:
    """A draft of two layers for a target, without embeddings and head."""
    large: Any = target.config.get_text_config(decoder=True)
    usual = {
        "vocab_size": large.vocab_size,
        "hidden_size": large.hidden_size,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "target_layers": [1, large.num_hidden_layers - 1],
        "block_size": 6,
        "mask_token_id": MASK,
        "use_sliding_window": True,
        "layer_types": ["full_attention"] * 2,
    }
    torch.manual_seed(2)
    draft = DFlashDraft(DFlashConfig(**usual | fields)).eval()
    with torch.no_grad():
        for weight in draft.parameters():
            std = weight.shape[-1] ** -0.5 if weight.dim() > 1 else 0.2
            weight.normal_(std=std)
            if weight.dim() == 1:
                weight += 1
    return draft


def stored(draft: DFlashDraft, folder: Path, **others: Any) -> Path:
    """Write a draft in the layout of its authors."""
    config = draft.config.to_dict() | {"model_type": "qwen3", "architectures": ["DFlashDraftModel"]}
    layers = config.pop("target_layers")
    config["is_causal"] = None if config.pop("windows_are_causal") else False
    mask = config.pop("mask_token_id")
    nested = {"mask_token_id": mask, "target_layer_ids": [layer - 1 for layer in layers]}
    return _write(draft, folder, config | {"dflash_config": nested} | others)


def stored_as_speculators(draft: DFlashDraft, folder: Path, **others: Any) -> Path:
    """Write a draft in the layout of vLLM's `speculators`."""
    layer = draft.config.to_dict() | {"model_type": "qwen3"}
    config = {
        "speculators_model_type": "dflash",
        "architectures": ["DFlashSpeculator"],
        "aux_hidden_state_layer_ids": layer.pop("target_layers"),
        "mask_token_id": layer.pop("mask_token_id"),
        "block_size": layer.pop("block_size"),
        "sliding_window_non_causal": not layer.pop("windows_are_causal"),
        "transformer_layer_config": layer,
    }
    return _write(draft, folder, config | others)


def _write(draft: DFlashDraft, folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: weight.contiguous() for name, weight in draft.named_parameters()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def of_transformers(draft: DFlashDraft) -> Any:
    """The same draft as transformers' model."""
    from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

    own = draft.config
    names = (
        *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "head_dim", "rms_norm_eps", "rope_parameters", "layer_types"),
        *("max_position_embeddings", "sliding_window", "block_size", "mask_token_id"),
    )
    fields = {name: getattr(own, name) for name in names}
    layers = [layer - 1 for layer in own.target_layers or ()]
    config = MuseGlimmerAssistantConfig(**fields, target_layer_ids=layers)
    model = MuseGlimmerAssistantModel(config).eval()
    ours = {"fc.": "encoder.fc.", "hidden_norm.": "encoder.output_norm_enc."}
    weights = {}
    for name, weight in draft.named_parameters():
        for old, new in ours.items():
            name = name.replace(old, new)
        weights[name] = weight
    model.load_state_dict(weights)
    return model


@torch.no_grad()
def expected_logits(draft: DFlashDraft, target: Any, text: list[int], size: int = 0) -> Any:
    """Logits [S - 1, R] of a block of `size` or the draft's own size after a text, one layer after
    the other, with a mask over the whole text."""
    config = draft.config
    size = size or config.block_size
    length, total = len(text) - 1, len(text) - 1 + size
    context = torch.zeros(1, 0, config.hidden_size)
    if length:
        states = target(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
        read = torch.cat([states[layer] for layer in config.target_layers or ()], dim=-1)
        context = draft.hidden_norm(draft.fc(read.to(draft.fc.weight.dtype)))
    block = torch.tensor([[text[-1]] + [config.mask_token_id] * (size - 1)])
    hidden = target.get_input_embeddings().weight[block] * config.input_embedding_scale
    cos, sin = draft.rotary_emb(hidden, torch.arange(total)[None])
    query_at, key_at = torch.arange(length, total)[:, None], torch.arange(total)

    def rotated(states, cos, sin):
        first, second = states.chunk(2, dim=-1)
        turned = torch.cat([-second, first], dim=-1)
        return states * cos[:, :, None] + turned * sin[:, :, None]

    layers: Any = draft.layers
    for kind, layer in zip(config.layer_types, layers, strict=True):
        part, normed = layer.self_attn, layer.input_layernorm(hidden)
        both = torch.cat([context, normed], dim=1)
        heads = (-1, config.head_dim)
        query = part.q_norm(part.q_proj(normed).unflatten(-1, heads))
        key = part.k_norm(part.k_proj(both).unflatten(-1, heads))
        value = part.v_proj(both).unflatten(-1, heads)
        query, key = rotated(query, cos[:, length:], sin[:, length:]), rotated(key, cos, sin)
        groups = query.shape[2] // key.shape[2]
        key, value = (part.repeat_interleave(groups, dim=2) for part in (key, value))
        scores = torch.einsum("bqhd,bkhd->bhqk", query, key) * config.head_dim**-0.5
        if kind == "sliding_attention":
            # Without causality the window ends where the block begins, for all of its rows.
            is_seen = (key_at >= length - config.sliding_window).expand(size, -1)
            if config.windows_are_causal:
                is_seen = (key_at <= query_at) & (key_at > query_at - config.sliding_window)
            scores = scores.masked_fill(~is_seen, -torch.inf)
        attended = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), value)
        hidden = hidden + part.o_proj(attended.flatten(2))
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    logits = target.get_output_embeddings()(draft.norm(hidden))[0, 1:] * config.output_multiplier
    if cap := config.final_logit_softcapping:
        logits = cap * torch.tanh(logits / cap)
    return logits
