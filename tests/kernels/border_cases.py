"""A call of each public op, for the tests of borders, of PyTorch and of errors."""

import math

import torch

import fastspec_kernels
from fastspec_kernels import DraftWeights, LayerWeights

from .cases import ints

INT32 = torch.int32
PARAMETERS = ("temperature", "top_k", "top_p", "min_p")


def paged() -> dict:
    """Two sequences of 5 and 3 tokens, blocks of 4 slots, 2 KV heads of 8."""
    return {
        "query": torch.randn(3, 4, 8),
        "key_cache": torch.randn(6, 4, 2, 8),
        "value_cache": torch.randn(6, 4, 2, 8),
        "block_table": ints([4, 1], [2, 0]),
        "context_lens": ints(5, 3),
        "cu_rows": ints(0, 2, 3),
    }


def layers() -> dict:
    """3 rows of 12 values, 5 of embeddings, over the same pages, an MLP of 20; two layers."""
    shapes = {"query_weight": (32, 17), "key_weight": (16, 17), "value_weight": (16, 17)}
    shapes |= {"output_weight": (12, 32), "gate_weight": (20, 12), "up_weight": (20, 12)}
    shapes |= {"query_bias": (32,), "key_bias": (16,), "value_bias": (16,), "output_bias": (12,)}
    shapes |= {"query_norm": (8,), "key_norm": (8,), "down_weight": (12, 20), "sinks": (4,)}
    norms = "attention_norm", "attention_out_norm", "mlp_norm", "mlp_out_norm"
    shapes |= dict.fromkeys(norms, (12,))
    pages = paged()
    return {
        **{name: pages[name] for name in ("block_table", "context_lens", "cu_rows")},
        "layers": [
            LayerWeights(**{name: torch.randn(*shape) for name, shape in shapes.items()})
            for _ in range(2)
        ],
        "key_caches": [pages["key_cache"], paged()["key_cache"]],
        "value_caches": [pages["value_cache"], paged()["value_cache"]],
        "hidden": torch.randn(3, 12),
        "embeddings": torch.randn(3, 5),
        "slot_mapping": torch.tensor([7, 4, 10]),
        "cos": torch.rand(3, 8),
        "sin": torch.rand(3, 8),
        "kept_layers": [1, -1],
        "kept_caches": [torch.zeros(6, 4, 2, 6), torch.zeros(6, 4, 2, 6)],
        "eps": 1e-6,
        "norm_shift": 1.0,
        "activation": "silu",
        "ancestor_mask": torch.tensor([[[1], [3]], [[1], [3]]]),
        "scale": 0.5,
        "sliding_window": 2,
        "softcap": 3.0,
    }


def chain() -> dict:
    """Drafts of 2 and 1 tokens, of 30 of 40 tokens, after the same texts, as of an EAGLE model."""
    pages = layers()
    shapes = {"query_weight": (32, 24), "key_weight": (16, 24), "value_weight": (16, 24)}
    wider = {name: torch.randn(*shape) for name, shape in shapes.items()}
    names = "key_caches", "value_caches", "block_table", "context_lens", "cu_rows"
    names += "eps", "norm_shift", "activation", "scale", "sliding_window", "softcap"
    return {
        **{name: pages[name] for name in names},
        **{name: value[:2] for name, value in row_op().items() if name in PARAMETERS},
        "token_ids": torch.tensor([5, 39, 0]),
        "weights": DraftWeights(
            embedding=torch.randn(40, 12),
            layers=[layer._replace(**wider) for layer in pages["layers"]],
            norm=torch.randn(12),
            head=torch.randn(30, 12),
            head_bias=torch.randn(30),
            head_tokens=torch.arange(30, dtype=INT32),
            embedding_norm=torch.randn(12),
        ),
        "num_tokens": ints(2, 1),
        "uniform_samples": torch.rand(2, 3),
        "num_columns": 30,
        "cos": torch.rand(9, 8),
        "sin": torch.rand(9, 8),
        "hidden": torch.randn(3, 12),
        "hidden_cache": torch.randn(24, 12),
        "confidence_threshold": 0.1,
        "keeps_logits": True,
    }


def packed_layer(weights: LayerWeights, bits: int) -> LayerWeights:
    named = [(name, x) for name, x in weights._asdict().items() if name.endswith("_weight")]
    return weights._replace(
        **{name: fastspec_kernels.quantize_weight(x, bits) for name, x in named}
    )


def row_op() -> dict:
    parameters = {"temperature": torch.ones(3), "top_k": ints(0, 2, 5)}
    filters = {"top_p": torch.full((3,), 0.9), "min_p": torch.zeros(3)}
    bitmask = {"token_bitmask": torch.full((3, 2), -1, dtype=INT32)}
    return {"logits": torch.randn(3, 40), **parameters, **filters, **bitmask}


def verified() -> dict:
    parameters = {name: value[:2] for name, value in row_op().items() if name != "logits"}
    return {
        **parameters,
        "target_logits": torch.randn(6, 40),
        "cu_rows": ints(0, 3, 6),
        "token_bitmask": torch.full((6, 2), -1, dtype=INT32),
        "draft_token_map": torch.arange(40, dtype=INT32),
    }


def penalized() -> dict:
    """Three rows of two trees, two histories, and three entries of bias."""
    return {
        "logits": torch.randn(3, 40),
        "row_sequence": ints(0, 0, 1),
        "row_node": ints(0, 2, 1),
        "tree_token_ids": ints([0, 1, 2], [0, 3, 4]),
        "cu_history": ints(0, 2, 5),
        "history_ids": ints(1, 7, 0, 3, 9),
        "history_counts": ints(0, 2, 1, 1, 0),
        "cu_bias": ints(0, 1, 3),
        "bias_ids": ints(2, 3, 30),
        "bias": torch.tensor([1.0, -math.inf, 2.0]),
        "bias_until": ints(1, 2, 0),
        "parents": ints([-1, 0, 1], [-1, 0, 0]),
        "repetition_penalty": torch.tensor([1.2, 1.0]),
        "presence_penalty": torch.tensor([0.0, 0.5]),
        "frequency_penalty": torch.tensor([0.1, 0.0]),
    }


# A call of each op that gives every argument but `backend`.
CALLS = {
    "uniform": lambda: {
        "seed": torch.tensor([7, 8]),
        "position": torch.tensor([3, 4]),
        "num": 3,
        "stream": 1,
    },
    "linear": lambda: {
        "input": torch.randn(3, 8),
        "weight": torch.randn(4, 8),
        "bias": torch.randn(4),
    },
    "quantized_linear": lambda: {
        "input": torch.randn(3, 8),
        "weight": fastspec_kernels.quantize_weight(torch.randn(4, 8), 4),
        "num_outputs": 4,
        "bias": torch.randn(4),
    },
    "rms_norm": lambda: {"input": torch.randn(3, 8), "weight": torch.ones(8), "eps": 1e-6},
    "gated_mlp": lambda: {
        "input": torch.randn(3, 8),
        "gate_weight": torch.randn(16, 8),
        "up_weight": torch.randn(16, 8),
        "down_weight": torch.randn(8, 16),
    },
    "row_stats": row_op,
    "logits_to_probs": row_op,
    "sample": lambda: {**row_op(), "uniform_samples": torch.rand(3)},
    "sample_coupled": lambda: {
        **row_op(),
        "seed": torch.tensor([7, 8, 9]),
        "position": torch.tensor([3, 4, 5]),
    },
    "penalize": penalized,
    "verify_chain": lambda: {
        **verified(),
        "draft_token_ids": ints([1, 2], [3, 4]),
        "uniform_samples": torch.rand(2, 3),
        "draft_logits": torch.randn(2, 2, 40),
        "lenience": 1.0,
        "method": "standard",
        "draft_logsumexp": torch.full((2, 2), 4.0),
    },
    "verify_tree": lambda: {
        **verified(),
        "tree_token_ids": ints([0, 1, 2], [0, 3, 4]),
        "parents": ints([-1, 0, 0], [-1, 0, 1]),
        "uniform_samples": torch.rand(2, 4),
        "sibling_rule": "with_replacement",
        "draft_logits": torch.randn(2, 3, 40),
    },
    "build_tree": lambda: {"parents": ints([-1, 0, 0], [-1, 0, 1])},
    "match_suffix": lambda: {
        "token_ids": ints([1, 2, 1, 2, 0], [3, 3, 3, 0, 0]),
        "lengths": ints(4, 3),
        "min_match": 1,
        "max_match": 3,
        "num_tokens": 2,
        "rule": "latest",
    },
    "store_kv": lambda: {
        "key": torch.randn(3, 2, 8),
        "value": torch.randn(3, 2, 8),
        "key_cache": torch.zeros(6, 4, 2, 8),
        "value_cache": torch.zeros(6, 4, 2, 8),
        "slot_mapping": torch.tensor([0, -1, 23]),
        "cos": torch.rand(3, 8),
        "sin": torch.rand(3, 8),
        "key_scale": 1.0,
        "value_scale": 1.0,
    },
    "compact_kv": lambda: {
        "key_caches": torch.randn(2, 6, 4, 2, 8),
        "value_caches": torch.randn(2, 6, 4, 2, 8),
        "block_table": ints([4, 1], [2, 0]),
        "prefix_lens": ints(3, 1),
        "path": ints([2, 3], [1, -1]),
        "accepted_len": ints(2, 1),
    },
    "tree_attention": lambda: {
        **paged(),
        "ancestor_mask": torch.tensor([[[1], [3]], [[1], [3]]]),
        "scale": 0.5,
        "sliding_window": 2,
        "softcap": 3.0,
        "sinks": torch.zeros(4),
        "return_logsumexp": True,
        "key_scale": 1.0,
        "value_scale": 1.0,
    },
    "decoder_layers": layers,
    "draft_chain": chain,
    "cross_attention": lambda: {**paged(), "scale": 0.5, "key_scale": 1.0, "value_scale": 1.0},
}
