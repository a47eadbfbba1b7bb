"""EAGLE-1 and EAGLE-2 drafts of random weights in the published layout, and their forward.

It is written from the papers (arXiv 2401.15077, 2406.16858) and the layout: dense, one text.
"""

import torch
from torch.nn.functional import linear

from .eagle3_models import HEADS, KV_HEADS, finished, write_layer


def write_folder(folder, target, has_bias=False, seed=3, **config):
    """A draft with embeddings of its own and its target's head; its config is a Llama's."""
    torch.manual_seed(seed)
    large = target.config.get_text_config(decoder=True)
    size, vocab_size, width = large.hidden_size, large.vocab_size, 40

    def matrix(rows, columns):
        # No norm stands between the rows of a chain: larger weights would multiply their rounding.
        return torch.randn(rows, columns) * 0.7 * columns**-0.5

    weights = {
        "embed_tokens": torch.randn(vocab_size, size),
        "fc": matrix(size, 2 * size),
        "layers.0.self_attn.q_proj": matrix(size, size),
        "layers.0.self_attn.k_proj": matrix(KV_HEADS * size // HEADS, size),
        "layers.0.self_attn.v_proj": matrix(KV_HEADS * size // HEADS, size),
        "layers.0.self_attn.o_proj": matrix(size, size),
        "layers.0.mlp.gate_proj": matrix(width, size),
        "layers.0.mlp.up_proj": matrix(width, size),
        "layers.0.mlp.down_proj": matrix(size, width),
        "layers.0.post_attention_layernorm": torch.rand(size) + 0.5,
    }
    weights = {f"{name}.weight": part for name, part in weights.items()}
    if has_bias:
        weights["fc.bias"] = torch.randn(size)
    write_layer(folder, weights, size, width, vocab_size, config)
    return weights


@torch.no_grad()
def published_logits(weights, target, text, drafts):
    """Logits [len(drafts) + 1, V] after a text and after each token of a path drafted behind it."""
    read = target(torch.tensor([text]), output_hidden_states=True).hidden_states[-1]
    hidden = read[0, :-1]  # [n - 1, E], after the final norm: row i goes with token i + 1
    layer = {
        name.removeprefix("layers.0.").removesuffix(".weight"): part
        for name, part in weights.items()
    }
    rows = []
    for count in range(len(drafts) + 1):
        embeddings = weights["embed_tokens.weight"][text[1:] + drafts[:count]]
        given = torch.cat([embeddings, hidden], dim=-1)
        joined = linear(given, weights["fc.weight"], weights.get("fc.bias"))
        out = finished(layer, joined, joined)
        rows.append(target.get_output_embeddings()(out[-1]))
        hidden = torch.cat([hidden, out[-1:]])  # what it made is what the next row reads
    return torch.stack(rows)
