"""GLIDE drafts of random weights."""

import torch

from fastspec.train.new_drafts import make_glide


def random_glide(target, num_layers=1, seed=3, **shape):
    """A draft of a shape unlike the target's, with weights large enough to matter."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 40, "intermediate_size": 56, "num_attention_heads": 5}
    sizes |= {"num_key_value_heads": 5, "head_dim": 8} | shape
    model = make_glide(target, num_layers, **sizes).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5)
            else:
                parameter.uniform_(0.5, 1.5)
    return model


def often_right(target, seed=3):
    """The target itself as draft, but for cross-attention, which disturbs it a little."""
    torch.manual_seed(seed)
    model = make_glide(target, target.config.num_hidden_layers).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.cross_attn.o_proj.weight.normal_(std=0.005)
    return model
