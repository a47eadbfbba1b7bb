"""GLIDE's passes over pages against a dense form of the published architecture."""

import pytest
import torch

from fastspec import EngineConfig
from fastspec.drafters.glide.paged import GlideRunner
from fastspec.models.layout import Span
from fastspec.models.paged_model import PagedModel
from fastspec.models.runner import ModelRunner

from ..models import random_model
from .glide_models import random_glide


def rms_norm(x, weight, eps):
    return weight * x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def rotated(x, positions, theta):
    """x [T, H, D] by the angles position * theta ** (-2 i / D), first half with second half."""
    half = x.shape[-1] // 2
    angle = positions[:, None, None] * theta ** (-torch.arange(half).double() / half)
    cos, sin = angle.cos(), angle.sin()
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def attended(query, key, value, visible):
    """[T, H, D] over [S, G, D], visible [T, S]."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = torch.einsum("thd,shd->hts", query, key) * query.shape[-1] ** -0.5
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1).nan_to_num()
    return torch.einsum("hts,shd->thd", weights, value).flatten(1)


@torch.no_grad()
def dense_glide(model, token_ids, target_layers, visible):
    """The architecture of the paper in float64, from the published weight names alone.

    target_layers: keys and values [S, G, D] for each draft layer; visible [T, S].
    """
    weights = {name: tensor.double() for name, tensor in model.state_dict().items()}
    config = model.config
    theta, eps = config.rope_parameters["rope_theta"], config.rms_norm_eps
    positions = torch.arange(len(token_ids)).double()
    causal = positions[:, None] >= positions
    x = weights["model.embed_tokens.weight"][token_ids]
    for index, (large_key, large_value) in enumerate(target_layers):

        def linear(name, states, index=index):
            return states @ weights[f"model.layers.{index}.{name}.weight"].T

        def norm(name, states, index=index):
            return rms_norm(states, weights[f"model.layers.{index}.{name}.weight"], eps)

        h = norm("input_layernorm", x)
        q, k, v = (
            linear(f"self_attn.{n}_proj", h).unflatten(-1, (-1, config.head_dim)) for n in "qkv"
        )
        q, k = rotated(q, positions, theta), rotated(k, positions, theta)
        x = x + linear("self_attn.o_proj", attended(q, k, v, causal))
        q = linear("cross_attn.q_proj", x).unflatten(-1, (-1, config.large_head_dim))
        out = attended(
            rotated(q, positions, theta), large_key.double(), large_value.double(), visible
        )
        x = x + linear("cross_attn.o_proj", out)
        h = norm("post_attention_layernorm", x)
        gated = torch.nn.functional.silu(linear("mlp.gate_proj", h)) * linear("mlp.up_proj", h)
        x = x + linear("mlp.down_proj", gated)
    x = rms_norm(x, weights["model.norm.weight"], eps)
    return x @ weights["lm_head.weight"].T


def runners_of(target, draft, block_size=4):
    kept = 90, EngineConfig(block_size=block_size, prefill_chunk_size=16)
    runner = ModelRunner(PagedModel(target, "auto"), *kept)
    num_layers = draft.config.num_hidden_layers
    caches = [runner.caches[layer] for layer in sorted(runner.caches)[-num_layers:]]
    for pair in runner.caches.values():
        for part in pair:
            part.fill_(float("nan"))  # a slot that is read before it is written shows
    return runner, GlideRunner(PagedModel(draft, "auto"), caches, *kept)


def target_pages(runner, layer, table, length):
    """Keys and values [S, G, D] of one sequence as they lie in the pages."""
    return tuple(part[table].flatten(0, 1)[:length] for part in runner.caches[layer])


@pytest.mark.parametrize("is_flat", [True, False])
@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("heads", [{}, {"num_key_value_heads": 4}], ids=["gqa", "mha"])
@torch.inference_mode()
def test_paged_passes_equal_the_dense_architecture(num_layers, heads, is_flat):
    """Ragged; a prompt longer than 128 tokens; one and two tokens before the drafts."""
    target = random_model("llama", **heads)
    draft = random_glide(target, num_layers, num_key_value_heads=1)
    runner, glide_runner = runners_of(target, draft)
    assert glide_runner.paged_model.flat is not None
    if not is_flat:
        glide_runner.paged_model.flat = None
    generator = torch.Generator().manual_seed(8)
    order = torch.randperm(90, generator=generator).tolist()
    texts = [torch.randint(255, (n,), generator=generator).tolist() for n in (151, 9)]
    tables = [order[:45], order[45:50]]
    lengths = [146, 5]  # of which the target has cached all but the last
    target_lens = [length - 1 for length in lengths]
    runner.prefill(
        [text[:n] for text, n in zip(texts, target_lens, strict=True)],
        [Span(table, 0, n) for table, n in zip(tables, target_lens, strict=True)],
    )
    starts = [length - 1 - extra for length, extra in zip(lengths, (0, 1), strict=True)]

    def spans(firsts, counts):
        rows = zip(tables, firsts, counts, target_lens, strict=True)
        return [Span(t, first, count, target_len=n) for t, first, count, n in rows]

    glide_runner.prefill(
        [text[:start] for text, start in zip(texts, starts, strict=True)], spans([0, 0], starts)
    )
    counts = [length - start for length, start in zip(lengths, starts, strict=True)]
    assert counts == [1, 2]
    firsts, rows = starts, [[], []]
    for _ in range(5):
        ids = [
            token
            for text, first, count in zip(texts, firsts, counts, strict=True)
            for token in text[first : first + count]
        ]
        logits = glide_runner.forward(torch.tensor(ids), spans(firsts, counts))
        for kept, part in zip(rows, logits.split(counts), strict=True):
            kept.append(part)
        firsts = [first + count for first, count in zip(firsts, counts, strict=True)]
        counts = [1, 1]
    for text, table, start, n, kept in zip(texts, tables, starts, target_lens, rows, strict=True):
        layers = [
            target_pages(runner, layer, table, n)
            for layer in range(len(runner.caches) - num_layers, len(runner.caches))
        ]
        place, key = torch.arange(len(text))[:, None], torch.arange(n)
        visible = (key <= place) | (place >= start)
        expected = dense_glide(draft, text, layers, visible)[start : start + 5 + (n < 9)]
        actual = torch.cat(kept).double()
        assert (actual - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)], ids=["f32", "bf16"]
)
@torch.inference_mode()
def test_flat_passes_equal_those_through_the_modules(dtype, tolerance):
    """Over a chain and a token tree, of the same tokens; heads are unlike the target's."""
    target = random_model("llama").to(dtype)
    runner, glide_runner = runners_of(target, random_glide(target, 2).to(dtype))
    table = [*range(8)]
    runner.prefill([[*range(19)]], [Span(table, 0, 19)])
    glide_runner.prefill([[*range(19)]], [Span(table, 0, 19, target_len=19)])
    span, ids = Span(table, 19, 5, target_len=19), torch.tensor([60, 61, 62, 63, 64])
    tree = torch.tensor([[-1, 0, 0, 1, 2]], dtype=torch.int32)

    def run():
        return [glide_runner.forward(ids, [span], parents=parents) for parents in (None, tree)]

    flat = run()
    glide_runner.paged_model.flat = None
    for ours, theirs in zip(flat, run(), strict=True):
        assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max()
    chain, branches = flat
    assert torch.equal(chain[:2], branches[:2])
    assert (chain[2:] - branches[2:]).abs().max() > 0.1


def test_cross_attention_matters():
    target = random_model("llama")
    draft = random_glide(target)
    runner, glide_runner = runners_of(target, draft)
    runner.prefill([[1, 2, 3]], [Span([0], 0, 3)])
    ids = torch.tensor([1, 2, 3, 4])
    with torch.inference_mode():
        blind, seeing = (glide_runner.forward(ids, [Span([0], 0, 4, target_len=n)]) for n in (0, 3))
    assert blind.isfinite().all()
    assert seeing.isfinite().all()
    assert (blind - seeing).abs().max() > 0.1
