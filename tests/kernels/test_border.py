"""Every public op refuses what it cannot serve: a ValueError that begins with the argument's name.

One table: ops, their arguments, bad values by kind of argument.
"""

import inspect
import math
import re

import pytest
import torch
from torch import Tensor

import fastspec_kernels
from fastspec_kernels import DraftWeights, LayerWeights

from .border_cases import CALLS, PARAMETERS, layers, packed_layer
from .cases import backends_of, is_slow

OPTIONAL = {
    name: {key for key, value in inspect.signature(op).parameters.items() if value.default is None}
    for name in CALLS
    for op in [getattr(fastspec_kernels, name)]
}
BAD_INTS = ["x", None, True, 2.0, math.nan, -1, 2**70, [1], torch.tensor(1)]
BAD_INTS_OF = {
    "stream": [2**32, 2**40],
    "num": [10**12],
    "num_outputs": [0],
    "num_tokens": [10**12],
    "num_columns": [0, 31],
    "min_match": [0],
    "max_match": [0],
}
BAD_FLOATS = ["x", None, True, math.nan, math.inf, -math.inf, 1j, [1.0], torch.tensor(1.0), 10**400]
BAD_FLOATS_OF = {
    "softcap": [-1.0],
    "eps": [0.0, -1.0],
    "key_scale": [0.0, -1.0, 2.0, 1e-45],
    "value_scale": [0.0, -1.0, 2.0, 1e-45],
    "lenience": [0.5],
    "confidence_threshold": [-0.1, 1.1],
}
BAD_STRINGS = ["typo", "", None, 1, [], torch.tensor(1)]
BAD_BOOLS = [None, 1, 0.0, "yes", [], torch.tensor(True)]


def bad_tensors(tensor: Tensor) -> list:
    """What no argument of this dtype and layout may be."""
    other = torch.float64 if tensor.is_floating_point() else torch.int16
    layouts = [torch.strided, torch.jagged]
    nested = [torch.nested.nested_tensor([tensor, tensor], layout=each) for each in layouts]
    dtypes = tensor.to(other), tensor.bool(), tensor.to(torch.complex64)
    return ["x", 1, True, tensor.tolist(), tensor.numpy(), *dtypes, tensor.to_sparse(), *nested]


def lazy_tensors(tensor: Tensor) -> list:
    """Whose values are not in memory; torch writes them there before most ops."""
    if not tensor.is_floating_point():
        return []
    return [torch._neg_view(tensor), torch._efficientzerotensor(tensor.shape, dtype=tensor.dtype)]


def bad_lists(values: list) -> list:
    """Lists that have a bad value in one place, and what is none."""
    found = ["x", 1, None, [], values[0], [*values[:-1], None]]
    if isinstance(values[0], int):
        return found + [[*values[:-1], bad] for bad in [*BAD_INTS, -2, 2] if bad != -1]
    if isinstance(values[0], Tensor):
        found += [values[:1], [*values, values[0]]]
        return found + [[values[0], bad] for bad in bad_tensors(values[1])]
    for name, value in values[1]._asdict().items():
        wrong = [*bad_tensors(value), *lazy_tensors(value), value[:-1]]
        if name not in LayerWeights._field_defaults:
            wrong.append(None)
        found += [[values[0], values[1]._replace(**{name: bad})] for bad in wrong]
    return found


def bad_weights(weights: DraftWeights) -> list:
    """Weights of a draft model with one bad part, and what is none."""
    found = ["x", 1, None, tuple(weights), weights.layers]
    for name, value in weights._asdict().items():
        wrong = bad_lists(value) if name == "layers" else bad_tensors(value)
        if name not in ("layers", "embedding", "head"):  # whose lengths others must fit
            wrong.append(value[:-1])
        if name in ("embedding", "norm", "head"):
            wrong.append(None)
        found += [weights._replace(**{name: bad}) for bad in wrong]
    return found


def bad_values(op: str, name: str, value) -> list:
    if name == "backend":
        return ["gpu", "", None, 1, ["cpu"], "cuda"]
    if isinstance(value, bool):
        found = BAD_BOOLS
    elif isinstance(value, int):
        found = BAD_INTS + BAD_INTS_OF.get(name, [])
    elif isinstance(value, float):
        found = BAD_FLOATS + BAD_FLOATS_OF.get(name, [])
    elif isinstance(value, str):
        found = BAD_STRINGS
    elif isinstance(value, DraftWeights):
        found = bad_weights(value)
    elif isinstance(value, list):
        found = bad_lists(value)
    else:
        found = [None, *bad_tensors(value)]
    return [x for x in found if not (x is None and name in OPTIONAL[op])]


@pytest.mark.parametrize("op", CALLS)
def test_the_table_has_every_argument(op):
    function = getattr(fastspec_kernels, op)
    assert {*CALLS[op](), "backend"} == set(inspect.signature(function).parameters)
    function(**CALLS[op]())


def test_the_table_has_every_op():
    functions = {*fastspec_kernels.__all__} - {"PACKED_TILE", "PAD_TOKEN_ID"}
    functions -= {"DraftWeights", "LayerWeights"}
    answers = {"available_backends", "backend_of", "cpu_instruction_set", "unavailable_backends"}
    prepares = {"quantize_weight"}  # which has no backends; test_quantized_linear.py has its errors
    assert set(CALLS) == functions - answers - prepares


def answer_to(op: str, arguments: dict) -> str:
    """What a call ends in."""
    try:
        getattr(fastspec_kernels, op)(**arguments)
    except ValueError as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize("op", CALLS)
def test_bad_values_are_refused_by_name(op):
    good = CALLS[op]()
    wrong = []
    for name, value in {**good, "backend": "auto"}.items():
        for bad in bad_values(op, name, value):
            for backend in backends_of(op):
                answer = answer_to(op, {**good, "backend": backend, name: bad})
                if not re.match(rf"{name}\b.*(:| got )", answer):
                    wrong.append(f"{backend} {name}={bad!r:.40}: {answer:.80}")
    assert wrong == []


@pytest.mark.parametrize("bits", [4, 8])
def test_bad_packed_weights_are_refused_by_name(bits):
    """Of too few blocks or bytes, or of another kind than the layer's other weights."""
    good = layers()
    good["layers"] = [packed_layer(weights, bits) for weights in good["layers"]]
    other = [packed_layer(weights, 12 - bits) for weights in layers()["layers"]]
    wrong = []
    for name, value in good["layers"][1]._asdict().items():
        found = bad_values("decoder_layers", name, value)
        if name.endswith("_weight"):
            found = [*bad_tensors(value), None, value[:0], value[..., :-1].contiguous()]
            found += [value[:, :0], value[0], value.flatten(), value[..., :64].contiguous()]
            found += [value.view(torch.int8), getattr(layers()["layers"][1], name)]
            found += [value[:, :, None], torch.cat([value, value], 1), torch.cat([value] * 5)]
            found += [getattr(other[1], name)]
        for bad in found:
            if bad is None and name in LayerWeights._field_defaults:
                continue
            changed = [good["layers"][0], good["layers"][1]._replace(**{name: bad})]
            for backend in filter(lambda name: name != "triton", backends_of("decoder_layers")):
                answer = answer_to(
                    "decoder_layers", {**good, "backend": backend, "layers": changed}
                )
                if not re.match(r"layers\[1\]\.\w+: ", answer):
                    wrong.append(f"{backend} {name}={bad!r:.40}: {answer:.80}")
    assert wrong == []


@pytest.mark.parametrize("op", CALLS)
def test_tensors_on_another_device_are_refused(op):
    """By the name of the first tensor that is not where the others are."""
    good = CALLS[op]()
    elsewhere = {
        name: value.to("meta") if isinstance(value, Tensor) else [*value[:-1], value[-1].to("meta")]
        for name, value in good.items()
        if isinstance(value, Tensor) or (isinstance(value, list) and isinstance(value[-1], Tensor))
    }
    for name, value in elsewhere.items() if len(elsewhere) > 1 else []:
        for backend in backends_of(op):
            answer = answer_to(op, {**good, "backend": backend, name: value})
            expected = rf"({'|'.join(elsewhere)})(\[\d\])?: .*(meta|cpu)"
            assert re.match(expected, answer), answer


class Labelled(Tensor):
    """A subclass that adds nothing."""


VARIETIES = {
    "requires_grad": lambda tensor: tensor.requires_grad_(tensor.is_floating_point()),
    "parameter": lambda tensor: torch.nn.Parameter(tensor, tensor.is_floating_point()),
    "subclass": lambda tensor: tensor.as_subclass(Labelled),
    "with gaps": lambda tensor: torch.cat([tensor, tensor])[: len(tensor)],
}


def results_of(op: str, backend: str, variety=None) -> list[Tensor]:
    """Outputs, and what an op writes to: caches, or logits that it only edits."""
    torch.manual_seed(1)
    arguments = CALLS[op]()
    if variety:
        for name, value in arguments.items():
            if isinstance(value, Tensor):
                given = variety(value)
                # Edited in place, which would falsify a gradient.
                is_edited = (op, name) == ("penalize", "logits")
                arguments[name] = given.detach() if is_edited else given
    out = getattr(fastspec_kernels, op)(**arguments, backend=backend)
    outputs = out if isinstance(out, tuple) else () if out is None else (out,)
    caches = [value for name, value in arguments.items() if "_cache" in name]
    edited = [
        cache for value in caches for cache in (value if isinstance(value, list) else [value])
    ]
    edited += [arguments["logits"]] if op == "penalize" else []
    return [tensor.detach().as_subclass(Tensor) for tensor in (*outputs, *edited)]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for left, right in zip(found, expected, strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("op", CALLS)
def test_whatever_kind_of_dense_tensor_is_served(op):
    """Gradients are not recorded, and change nothing."""
    for backend in filter(lambda name: not is_slow(name), backends_of(op)):
        expected = results_of(op, backend)
        for variety in VARIETIES.values():
            assert_same(results_of(op, backend, variety), expected)
        with torch.inference_mode():
            assert_same(results_of(op, backend), expected)


def cut(*names: str, rows: int = 0) -> dict:
    """Changes that leave `rows` of the first dimension of these arguments."""
    return {name: lambda value: value[:rows] for name in names}


NO_BOUNDS = {"cu_rows": lambda value: value[:1]}
TREE = ("tree_token_ids", "parents", "uniform_samples", "draft_logits", *PARAMETERS)
CHAIN = ("draft_token_ids", "uniform_samples", "draft_logits", "draft_logsumexp", *PARAMETERS)
NO_ROWS = {"cu_rows": lambda value: value * 0}
NO_QUERIES = {**cut("query"), **NO_ROWS}
EMPTY = [
    ("uniform", cut("seed", "position")),
    ("uniform", {"num": lambda value: 0}),
    ("linear", cut("input")),
    ("linear", cut("weight", "bias")),
    ("quantized_linear", cut("input")),
    ("rms_norm", cut("input")),
    ("gated_mlp", cut("input")),
    ("row_stats", cut("logits", "token_bitmask", *PARAMETERS)),
    ("logits_to_probs", cut("logits", "token_bitmask", *PARAMETERS)),
    ("sample", cut("logits", "token_bitmask", "uniform_samples", *PARAMETERS)),
    ("sample_coupled", cut("logits", "token_bitmask", "seed", "position", *PARAMETERS)),
    ("penalize", cut("logits", "row_sequence", "row_node")),
    (
        "penalize",
        {
            **cut("history_ids", "history_counts", "bias_ids", "bias", "bias_until"),
            **dict.fromkeys(("cu_history", "cu_bias"), lambda value: value * 0),
        },
    ),
    ("verify_chain", {**cut(*CHAIN), **NO_BOUNDS}),
    (
        "verify_chain",
        {
            **dict.fromkeys(("draft_token_ids", "draft_logits"), lambda value: value[:, :0]),
            "draft_logsumexp": lambda value: value[:, :0],
            "uniform_samples": lambda value: value[:, :1],
        },
    ),
    ("verify_tree", {**cut(*TREE), **NO_BOUNDS}),
    ("build_tree", cut("parents")),
    ("build_tree", {"parents": lambda value: value[:, :0]}),
    ("match_suffix", cut("token_ids", "lengths")),
    ("match_suffix", {"num_tokens": lambda value: 0}),
    (
        "match_suffix",
        {"token_ids": lambda value: value[:, :0], "lengths": lambda value: value * 0},
    ),
    ("store_kv", cut("key", "value", "slot_mapping", "cos", "sin")),
    ("compact_kv", cut("block_table", "prefix_lens", "path", "accepted_len")),
    ("compact_kv", {"path": lambda value: value[:, :0], "accepted_len": lambda value: value * 0}),
    ("compact_kv", cut("key_caches", "value_caches")),
    ("tree_attention", NO_QUERIES),
    (
        "tree_attention",
        {**NO_QUERIES, **NO_BOUNDS, **cut("block_table", "context_lens", "ancestor_mask")},
    ),
    ("decoder_layers", {**cut("hidden", "embeddings", "slot_mapping", "cos", "sin"), **NO_ROWS}),
    (
        "draft_chain",
        {
            **cut("token_ids", "hidden", "block_table", "context_lens", "num_tokens"),
            **cut("uniform_samples", *PARAMETERS),
            **NO_BOUNDS,
        },
    ),
    ("cross_attention", NO_QUERIES),
    ("cross_attention", {**NO_QUERIES, **NO_BOUNDS, **cut("block_table", "context_lens")}),
]


@pytest.mark.parametrize(("op", "changes"), EMPTY)
def test_nothing_to_do_is_no_error(op, changes):
    found = {}
    for backend in backends_of(op):
        torch.manual_seed(1)
        arguments = CALLS[op]()
        for name, change in changes.items():
            arguments[name] = change(arguments[name])
        out = getattr(fastspec_kernels, op)(**arguments, backend=backend)
        outputs = out if isinstance(out, tuple) else () if out is None else (out,)
        found[backend] = [(tensor.shape, tensor.dtype) for tensor in outputs]
    assert all(shapes == found["reference"] for shapes in found.values()), found
