"""EAGLE-3 drafts of random weights in the published layout, and a statement of their forward.

It is written from the paper (arXiv 2503.01840) and the layout: dense, one text, no cache.
"""

import json

import torch
from safetensors.torch import save_file
from torch.nn.functional import linear, rms_norm, silu

HEADS, KV_HEADS = 4, 2
THETA = 500.0


def write_folder(folder, target, hidden_size=None, num_known=None, seed=3, **config):
    """A draft with embeddings of its own where it is of another width; `num_known` reduces it."""
    torch.manual_seed(seed)
    large = target.config.get_text_config(decoder=True)
    size, vocab_size = hidden_size or large.hidden_size, large.vocab_size
    width, head_dim = 40, size // HEADS

    def matrix(rows, columns):
        return torch.randn(rows, columns) * 1.5 * columns**-0.5

    layer = {
        "self_attn.q_proj": matrix(size, 2 * size),
        "self_attn.k_proj": matrix(KV_HEADS * head_dim, 2 * size),
        "self_attn.v_proj": matrix(KV_HEADS * head_dim, 2 * size),
        "self_attn.o_proj": matrix(size, size),
        "mlp.gate_proj": matrix(width, size),
        "mlp.up_proj": matrix(width, size),
        "mlp.down_proj": matrix(size, width),
        "input_layernorm": torch.rand(size) + 0.5,
        "hidden_norm": torch.rand(size) + 0.5,
        "post_attention_layernorm": torch.rand(size) + 0.5,
    }
    weights = {f"midlayer.{name}.weight": part for name, part in layer.items()}
    weights |= {"fc.weight": matrix(size, 3 * large.hidden_size)}
    weights |= {"norm.weight": torch.rand(size) + 0.5}
    known = torch.arange(vocab_size)
    if num_known is not None:
        known = torch.randperm(vocab_size)[:num_known].sort().values
        is_known = torch.zeros(vocab_size, dtype=torch.bool)
        is_known[known] = True
        weights |= {"d2t": known - torch.arange(num_known), "t2d": is_known}
    weights["lm_head.weight"] = matrix(len(known), size)
    if size != large.hidden_size:
        weights["embed_tokens.weight"] = matrix(vocab_size, size)
    named = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": len(known)}
    write_layer(folder, weights, size, width, vocab_size, named | config)
    return weights


def write_layer(folder, weights, size, width, vocab_size, config):
    """A folder with these weights, and the configuration of a Llama of one layer."""
    stored = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": size,
        "intermediate_size": width,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": 1e-6,
        "rope_theta": THETA,
        "vocab_size": vocab_size,
        "max_position_embeddings": 64,
    }
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(stored | config))


@torch.no_grad()
def published_logits(weights, target, text, drafts, layers=None, norm_before_residual=False):
    """Logits [len(drafts) + 1, V] after a text and after each token of a path drafted behind it."""
    states = target(torch.tensor([text]), output_hidden_states=True).hidden_states
    num_layers = target.config.get_text_config(decoder=True).num_hidden_layers
    layers = layers or [2, num_layers // 2, num_layers - 3]
    features = torch.cat([states[index][0] for index in layers], dim=-1)[:-1]
    hidden = linear(features, weights["fc.weight"])  # [n - 1, E]: row i goes with token i + 1
    table = weights.get("embed_tokens.weight", target.get_input_embeddings().weight)
    size, vocab_size = len(weights["norm.weight"]), target.config.vocab_size
    known = torch.arange(vocab_size)
    if "d2t" in weights:
        known = weights["d2t"] + torch.arange(len(weights["d2t"]))
    rows = []
    for count in range(len(drafts) + 1):
        embeddings = table[text[1:] + drafts[:count]]
        out = _layer(weights, embeddings, hidden, norm_before_residual)
        last = rms_norm(out[-1], (size,), weights["norm.weight"], 1e-6)
        row = torch.full((vocab_size,), -torch.inf)
        row[known] = linear(last, weights["lm_head.weight"])
        rows.append(row)
        hidden = torch.cat([hidden, out[-1:]])  # what it made is what the next row reads
    return torch.stack(rows)


def _layer(weights, embeddings, hidden, norm_before_residual):
    """The decoder layer over all rows [n, E]."""
    weights = {
        name.removeprefix("midlayer.").removesuffix(".weight"): part
        for name, part in weights.items()
    }
    size = hidden.shape[-1]
    both = torch.cat(
        [
            rms_norm(embeddings, (size,), weights["input_layernorm"], 1e-6),
            rms_norm(hidden, (size,), weights["hidden_norm"], 1e-6),
        ],
        dim=-1,
    )
    return finished(weights, both, both[:, size:] if norm_before_residual else hidden)


def finished(weights, given, residual):
    """A decoder layer over all rows, given what its attention reads and what is added to that."""
    count, size = residual.shape
    query, key, value = (
        linear(given, weights[f"self_attn.{name}_proj"]).view(count, -1, size // HEADS)
        for name in "qkv"
    )
    query, key = _rotated(query), _rotated(key)
    key, value = (part.repeat_interleave(HEADS // KV_HEADS, dim=1) for part in (key, value))
    scores = torch.einsum("ihd,jhd->hij", query, key) * (size // HEADS) ** -0.5
    scores = scores.masked_fill(torch.ones(count, count).triu(1).bool(), -torch.inf)
    attended = torch.einsum("hij,jhd->ihd", scores.softmax(-1), value).flatten(1)
    hidden = residual + linear(attended, weights["self_attn.o_proj"])
    normed = rms_norm(hidden, (size,), weights["post_attention_layernorm"], 1e-6)
    gated = silu(linear(normed, weights["mlp.gate_proj"])) * linear(normed, weights["mlp.up_proj"])
    return hidden + linear(gated, weights["mlp.down_proj"])


def _rotated(part):
    half = part.shape[-1] // 2
    frequencies = THETA ** -(torch.arange(half) / half)
    angles = torch.arange(len(part))[:, None] * frequencies
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = part[..., :half], part[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
