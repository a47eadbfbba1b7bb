"""GLIDE draft models, which attend to the target's cached keys and values."""

from fastspec.drafters.glide.drafter import build
from fastspec.drafters.glide.loading import is_glide, load_glide, shape_of_target
from fastspec.drafters.glide.model import GlideLlamaConfig, GlideLlamaForCausalLM, Glimpse

__all__ = [
    "GlideLlamaConfig",
    "GlideLlamaForCausalLM",
    "Glimpse",
    "build",
    "is_glide",
    "load_glide",
    "shape_of_target",
]
