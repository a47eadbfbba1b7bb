"""Inputs of the sampling benchmarks: logits of three kinds, sampling parameters, drafts, trees."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from fastspec_kernels import available_backends

BACKENDS = [name for name in available_backends() if name == "cpu"]
CHUNK = 1 << 25  # elements made at a time
NOISE = 0.5  # how far a draft's logits are from the target's


def make_logits(
    kind: str, num_rows: int, vocab: int, dtype: torch.dtype, generator: torch.Generator
) -> Tensor:
    """[num_rows, vocab] logits: "zipf" (exponent 1.1), "peaked" (best token 0.9) or "flat"."""
    make = {"zipf": _zipf, "peaked": _peaked, "flat": _normal}[kind]
    logits = torch.empty(num_rows, vocab, dtype=dtype, device=generator.device)
    for rows in logits.split(max(1, CHUNK // vocab)):
        rows.copy_(make(len(rows), vocab, generator))
    return logits


def _normal(num_rows: int, vocab: int, generator: torch.Generator) -> Tensor:
    return torch.randn(num_rows, vocab, generator=generator, device=generator.device)


def _peaked(num_rows: int, vocab: int, generator: torch.Generator) -> Tensor:
    logits = _normal(num_rows, vocab, generator)
    best = _integers(0, vocab, num_rows, generator)
    return logits.scatter_(1, best, (logits.logsumexp(-1) + math.log(9))[:, None])


def _zipf(num_rows: int, vocab: int, generator: torch.Generator) -> Tensor:
    """Token i has rank (a * i + b) modulo vocab, with an a prime to vocab for each row."""
    candidates = torch.arange(vocab // 2, vocab // 2 + 64)
    factors = candidates[torch.gcd(candidates, torch.tensor(vocab)) == 1].to(generator.device)
    a = factors[_integers(0, len(factors), num_rows, generator)]  # [rows, 1]
    ids = torch.arange(vocab, device=generator.device)
    rank = (a * ids + _integers(0, vocab, num_rows, generator)) % vocab
    jitter = 0.02 * _normal(num_rows, vocab, generator)
    return jitter - 1.1 * (rank + 1).float().log()


def _integers(low: int, high: int, num: int, generator: torch.Generator) -> Tensor:
    return torch.randint(low, high, (num, 1), generator=generator, device=generator.device)


def noisy(logits: Tensor, generator: torch.Generator) -> Tensor:
    """The logits of a draft that imitates those of a target."""
    draft = torch.empty_like(logits)
    for ours, theirs in zip(draft.split(64), logits.split(64), strict=True):
        noise = torch.randn(theirs.shape, generator=generator, device=generator.device)
        ours.copy_(theirs.float() + NOISE * noise)
    return draft


def parameters(values: dict, num: int, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """Sampling parameters as the ops take them."""
    return {
        name: torch.full(
            (num,),
            value,
            dtype=torch.int32 if name == "top_k" else torch.float32,
            device=device,
        )
        for name, value in values.items()
    }


def randomness(
    op: str, num: int, generator: torch.Generator, device: torch.device | str = "cpu"
) -> tuple[Tensor, ...]:
    """What a row op takes beside `num` rows of logits."""
    if op == "sample":
        return (torch.rand(num, generator=generator, device=device),)
    if op == "sample_coupled":
        return tuple(torch.randint(2**62, (2, num), generator=generator, device=device))
    return ()


def draw_tokens(
    logits: Tensor, values: dict, num: int, replacement: bool, generator: torch.Generator
) -> Tensor:
    """[rows, num] int32 tokens of the filtered distribution of each row, made with torch."""
    chunks = logits.split(max(1, CHUNK // logits.shape[-1]))
    return torch.cat([_draw(rows, values, num, replacement, generator) for rows in chunks])


def _draw(rows, values, num, replacement, generator):
    best = rows.float() / values.get("temperature", 1.0)
    kept, ids = best.topk(values["top_k"]) if "top_k" in values else best.sort(descending=True)
    probs = kept.softmax(-1)
    if "top_p" in values:
        probs = probs * (probs.cumsum(-1) - probs < values["top_p"])
    # The floor lets siblings be drawn without replacement where fewer tokens are left.
    places = probs.clamp_min(1e-20).multinomial(num, replacement, generator=generator)
    return ids.gather(1, places).int()


def layer_weights(
    sizes: tuple[int, int, int, int, int], random: Callable[..., Tensor]
) -> dict[str, Tensor]:
    """The `LayerWeights` of a plain layer with random matrices.

    sizes: of the hidden state, of the feed-forward block, query heads, KV heads, head size.
    """
    size, hidden, heads, kv_heads, head_size = sizes
    queries, keys = heads * head_size, kv_heads * head_size
    shapes = {"query_weight": (queries, size), "key_weight": (keys, size)}
    shapes |= {"value_weight": (keys, size), "output_weight": (size, queries)}
    shapes |= {"gate_weight": (hidden, size), "up_weight": (hidden, size)}
    shapes |= {"down_weight": (size, hidden)}
    matrices = {name: random(*shape) for name, shape in shapes.items()}
    down = matrices["down_weight"]
    norm = torch.ones(size, dtype=down.dtype, device=down.device)
    return matrices | {"attention_norm": norm, "mlp_norm": norm}


def binary_tree(num_nodes: int) -> Tensor:
    """[num_nodes] parents of a tree with two children per node."""
    parents = (torch.arange(num_nodes, dtype=torch.int32) - 1) // 2
    parents[0] = -1
    return parents
