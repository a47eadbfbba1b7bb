"""Makes untrained drafts of a target's shape, with weights of the target to start from."""

import math
import re
from collections.abc import Iterator
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedConfig, PreTrainedModel

from fastspec.config import EngineConfig
from fastspec.config.checks import one_line, require
from fastspec.drafters.glide.dense import read_target
from fastspec.drafters.glide.loading import shape_of_target
from fastspec.drafters.glide.model import GlideLlamaConfig, GlideLlamaForCausalLM
from fastspec.models.layer_fields import last_layer_field
from fastspec.models.model_kinds import paged_model_of
from fastspec.models.reduced_vocabulary import reduce_vocabulary
from fastspec.train.data import Rows, most_frequent
from fastspec.train.options import DraftShape

_USUAL_HEAD_DIM = 64  # of a draft whose target has no attention heads
_SHARED_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


def make_draft(
    target: PreTrainedModel, rows: Rows, shape: DraftShape, kind: str
) -> PreTrainedModel:
    """Make an untrained draft for a target, with the target's head size.

    Args:
        rows: training data, from which the tokens of a reduced vocabulary are chosen.
        kind: "glide", "plain", or "matched" for a plain one as large as a GLIDE draft.
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
    if kind == "plain":
        draft = make_plain(target, shape.layers, **sizes)
    else:
        draft = make_glide(target, shape.layers, **sizes)
        _check_glimpse(target, shape.layers, running.recurrent is not None)
        draft = make_matched(draft, target) if kind == "matched" else draft
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


def make_glide(
    target: PreTrainedModel,
    num_layers: int = 1,
    start: PreTrainedModel | None = None,
    **shape: Any,
) -> GlideLlamaForCausalLM:
    """Make a GLIDE draft for a target, initialised from the weights of `start` that match by name.

    Args:
        start: a trained plain draft with the same number of layers; None = the target itself.
        shape: configuration fields that differ from the target's.
    Raises:
        ValueError: the fields do not fit together, or there are more layers than the target has.
    """
    fields = llama_shape(target, num_layers, shape) | shape_of_target(target)
    config = llama_config(fields, GlideLlamaConfig)
    return _started(GlideLlamaForCausalLM(config), target, start or target)


def make_plain(target: PreTrainedModel, num_layers: int = 1, **shape: Any) -> LlamaForCausalLM:
    """Make a plain Llama for a target, initialised from the target's first layer and last layers.

    Raises:
        ValueError: the fields do not fit together, or there are more layers than the target has.
    """
    draft = LlamaForCausalLM(llama_config(llama_shape(target, num_layers, shape)))
    return _started(draft, target, target)


def make_matched(
    glide: GlideLlamaForCausalLM, target: PreTrainedModel, start: PreTrainedModel | None = None
) -> LlamaForCausalLM:
    """Make a Llama as large as a GLIDE draft: wider feed-forward replaces cross-attention."""
    config = glide.config
    extra = sum(p.numel() for n, p in glide.named_parameters() if ".cross_attn." in n)
    width = extra // (3 * config.hidden_size * config.num_hidden_layers)
    shape = {"intermediate_size": config.intermediate_size + width}
    plain = llama_config(llama_shape(glide, config.num_hidden_layers, shape))
    return _started(LlamaForCausalLM(plain), target, start or target)


def llama_shape(model: PreTrainedModel, num_layers: int, shape: dict[str, Any]) -> dict[str, Any]:
    """Return a Llama's config fields like this model's, with changes; absent ones are defaults."""
    config = model.config.get_text_config(decoder=True)
    require("layers", num_layers, 1 <= num_layers <= config.num_hidden_layers, "1 to the target's")
    own = {name: last_layer_field(config, name) for name in _SHARED_FIELDS}
    size = config.hidden_size
    own["intermediate_size"] = own["intermediate_size"] or 4 * size
    heads = math.gcd(size, max(1, size // _USUAL_HEAD_DIM))
    own["num_attention_heads"] = own["num_attention_heads"] or heads
    rope = getattr(config, "rope_parameters", None) or {}
    own["rope_parameters"] = rope.get("full_attention", rope) or None
    kept = {name: value for name, value in own.items() if value is not None}
    return kept | shape | {"num_hidden_layers": num_layers}


def llama_config(fields: dict[str, Any], kind: type[PreTrainedConfig] = LlamaConfig) -> Any:
    """Make a configuration; ValueError if the fields do not fit together."""
    try:
        return kind(**fields)
    except StrictDataclassError as error:
        raise ValueError(f"target: a draft cannot have its shape: {one_line(error)}") from error


@torch.no_grad()
def _started(draft: Any, target: PreTrainedModel, start: PreTrainedModel) -> Any:
    """Copy weights of `start` into the draft's of the same name, as far as they reach.

    From a deeper `start`, the first layer and the last ones are used. Queries of cross-attention
    start as those of the target's layer whose cache they read. The outputs of cross-attention and
    of a wider feed-forward layer start at 0, so the additions have no effect at first.
    """
    num_layers = draft.config.num_hidden_layers
    weights, large = _ends_of(start, num_layers), dict(weights_of(target))
    first = target.config.get_text_config(decoder=True).num_hidden_layers - num_layers
    for name, parameter in draft.named_parameters():
        source = weights.get(name)
        if name.endswith(("cross_attn.o_proj.weight", "mlp.down_proj.weight")):
            parameter.zero_()
        if name.endswith("cross_attn.q_proj.weight"):
            layer = first + int(name.split(".")[2])
            source = large.get(f"model.layers.{layer}.self_attn.q_proj.weight")
        if source is None or source.dim() != parameter.dim():
            continue
        if all(s <= p for s, p in zip(source.shape, parameter.shape, strict=True)):
            parameter[tuple(slice(size) for size in source.shape)] = source.to(parameter)
    return draft


def weights_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters by name, and weights that modules compute from theirs, as pruned ones do."""
    yield from model.named_parameters()
    for name, module in model.named_modules():
        if isinstance(weight := getattr(module, "weight", None), Tensor):
            yield f"{name}.weight", weight


def _ends_of(model: PreTrainedModel, num_layers: int) -> dict[str, Tensor]:
    """Return a model's weights with only its first and last layers, `num_layers` in all."""
    skipped = model.config.get_text_config(decoder=True).num_hidden_layers - num_layers
    kept = {}
    for name, weight in weights_of(model):
        if layer := re.search(r"(?<=\.layers\.)\d+(?=\.)", name):
            index = int(layer[0])
            if 0 < index <= skipped:
                continue
            name = f"{name[: layer.start()]}{max(0, index - skipped)}{name[layer.end() :]}"
        kept[name] = weight
    return kept
