"""Schemas and fakes of the torch.library ops, and the loading of the compiled extensions."""

import os
from functools import cache
from importlib import import_module
from importlib.util import find_spec

import torch

_SAMPLING = "Tensor? temperature, Tensor? top_k, Tensor? top_p, Tensor? min_p"
_PAGED = (
    "Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table, Tensor context_lens,"
    " Tensor cu_rows"
)
CPU_INSTRUCTION_SETS = ("portable", "avx2", "avx512", "avx512_bf16", "amx")
SCHEMAS = (
    "cpu_instruction_set() -> str",
    "cpu_instruction_sets() -> str[]",
    "use_cpu_instruction_set(str name) -> ()",
    "cuda_architectures() -> str",
    "has_cuda_image(int device) -> bool",
    "uniform(Tensor seed, Tensor position, int num, int stream) -> Tensor",
    "linear(Tensor input, Tensor weight, Tensor? bias) -> Tensor",
    "quantized_linear(Tensor input, Tensor weight, int num_outputs, Tensor? bias) -> Tensor",
    "rms_norm(Tensor input, Tensor weight, float eps) -> Tensor",
    "gated_mlp(Tensor input, Tensor gate_weight, Tensor up_weight, Tensor down_weight) -> Tensor",
    "decoder_layers(Tensor hidden, Tensor?[] layers, Tensor(a!)[] key_caches,"
    " Tensor(b!)[] value_caches, float eps, float norm_shift, str activation, Tensor? cos,"
    " Tensor? sin, Tensor? embeddings, int[] kept_layers, Tensor(c!)[] kept_caches,"
    " Tensor slot_mapping, Tensor block_table, Tensor context_lens, Tensor cu_rows, float scale,"
    " int sliding_window, float softcap, Tensor? ancestor_mask) -> Tensor",
    "draft_chain(Tensor token_ids, Tensor embedding, Tensor? embedding_norm, Tensor?[] layers,"
    " Tensor norm, Tensor head, Tensor? head_bias, Tensor? head_tokens, int num_columns,"
    " Tensor(a!)[] key_caches, Tensor(b!)[] value_caches, Tensor? hidden, Tensor(c!)? hidden_cache,"
    " float eps, float norm_shift, str activation, Tensor? cos, Tensor? sin, Tensor block_table,"
    " Tensor context_lens, Tensor cu_rows, float scale, int sliding_window, float softcap,"
    f" Tensor num_tokens, Tensor uniform_samples, {_SAMPLING}, float confidence_threshold,"
    " bool keeps_logits) -> (Tensor, Tensor, Tensor)",
    f"row_stats(Tensor logits, {_SAMPLING}, Tensor? token_bitmask) -> (Tensor, Tensor)",
    f"logits_to_probs(Tensor logits, {_SAMPLING}, Tensor? token_bitmask) -> Tensor",
    f"sample(Tensor logits, Tensor uniform_samples, {_SAMPLING}, Tensor? token_bitmask)"
    " -> (Tensor, Tensor)",
    f"sample_coupled(Tensor logits, Tensor seed, Tensor position, {_SAMPLING},"
    " Tensor? token_bitmask) -> (Tensor, Tensor)",
    "penalize(Tensor(a!) logits, Tensor row_sequence, Tensor row_node, Tensor tree_token_ids,"
    " Tensor cu_history, Tensor history_ids, Tensor history_counts, Tensor cu_bias,"
    " Tensor bias_ids, Tensor bias, Tensor bias_until, Tensor? parents,"
    " Tensor? repetition_penalty, Tensor? presence_penalty, Tensor? frequency_penalty) -> ()",
    "verify_chain(Tensor target_logits, Tensor cu_rows, Tensor draft_token_ids,"
    f" Tensor uniform_samples, Tensor? draft_logits, {_SAMPLING}, float lenience, str method,"
    " Tensor? draft_logsumexp, Tensor? draft_token_map, Tensor? token_bitmask)"
    " -> (Tensor, Tensor, Tensor)",
    "verify_tree(Tensor target_logits, Tensor cu_rows, Tensor tree_token_ids, Tensor parents,"
    f" Tensor uniform_samples, str sibling_rule, Tensor? draft_logits, {_SAMPLING},"
    " Tensor? draft_token_map, Tensor? token_bitmask) -> (Tensor, Tensor, Tensor, Tensor)",
    "build_tree(Tensor parents) -> (Tensor, Tensor)",
    "match_suffix(Tensor token_ids, Tensor lengths, int min_match, int max_match, int num_tokens,"
    " str rule) -> Tensor",
    "store_kv(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache,"
    " Tensor slot_mapping, Tensor? cos, Tensor? sin, float key_scale, float value_scale) -> ()",
    "compact_kv(Tensor(a!) key_caches, Tensor(b!) value_caches, Tensor block_table,"
    " Tensor prefix_lens, Tensor path, Tensor accepted_len) -> ()",
    f"tree_attention({_PAGED}, float scale, int sliding_window, float softcap, Tensor? sinks,"
    " Tensor? ancestor_mask, bool return_logsumexp, float value_scale) -> (Tensor, Tensor)",
    f"cross_attention({_PAGED}, float scale, float value_scale) -> Tensor",
)

OPS = tuple(schema.partition("(")[0] for schema in SCHEMAS)

_library = torch.library.Library("fastspec", "DEF")
for _op, _schema in zip(OPS, SCHEMAS, strict=True):
    _library.define(_schema)
    # No op has a derivative; without this, results would claim to have one, and backward would lose
    # it with a warning.
    _library.impl(_op, torch.library.fallthrough_kernel, "Autograd")


def _refuse(*_):
    raise ValueError("the arguments do not fit together")


# torch resolves lazily negated and zero tensors before it calls a kernel, but not in these lists.
for _op in ("decoder_layers", "draft_chain"):
    for _key in ("Negative", "ZeroTensor"):
        _library.impl(_op, _refuse, _key)

OVERLOADS = {op: getattr(torch.ops.fastspec, op).default for op in OPS}
# The places of the arguments that an op writes, tensors or lists of them.
WRITTEN = {
    op: tuple(
        place
        for place, argument in enumerate(overload._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    for op, overload in OVERLOADS.items()
}


def use_instruction_set(name: str) -> None:
    """Make the CPU kernels use this path instead of the widest; for debugging."""
    if name not in CPU_INSTRUCTION_SETS:
        expected = ", ".join(CPU_INSTRUCTION_SETS)
        raise ValueError(f"FASTSPEC_CPU_ISA: expected one of {expected}, got {name!r}")
    if not HAS_CPU_EXTENSION:
        raise ValueError(
            f"FASTSPEC_CPU_ISA: {name!r} needs the extension fastspec_kernels._cpu,"
            " which is not built"
        )
    available = torch.ops.fastspec.cpu_instruction_sets()
    if name not in available:
        raise ValueError(
            f"FASTSPEC_CPU_ISA: this processor or build does not support {name!r};"
            f" available: {', '.join(available)}"
        )
    torch.ops.fastspec.use_cpu_instruction_set(name)


# A missing extension is normal; one that exists but does not load raises.
HAS_CPU_EXTENSION = find_spec("fastspec_kernels._cpu") is not None
HAS_CUDA_EXTENSION = find_spec("fastspec_kernels._cuda") is not None
if HAS_CPU_EXTENSION:
    import_module("fastspec_kernels._cpu")
if "FASTSPEC_CPU_ISA" in os.environ:
    use_instruction_set(os.environ["FASTSPEC_CPU_ISA"])
if HAS_CUDA_EXTENSION and torch.cuda.is_available():
    import_module("fastspec_kernels._cuda")


_KERNELS = frozenset(
    (op, device_type)
    for op in OPS
    for device_type in ("cpu", "cuda")
    if torch._C._dispatch_has_kernel_for_dispatch_key(f"fastspec::{op}", device_type.upper())
)


def has_kernel(op: str, device_type: str) -> bool:
    """Whether a compiled kernel of this op is loaded for the device type."""
    return (op, device_type) in _KERNELS


@torch.compiler.assume_constant_result
def has_image(device_index: int) -> bool:
    """Whether the CUDA extension has code for a GPU: native, or PTX that the driver compiles."""
    return _has_image(device_index)


@cache
def _has_image(device_index: int) -> bool:
    return torch.ops.fastspec.has_cuda_image(device_index)


@torch.library.register_fake("fastspec::uniform")
def _(seed, position, num, stream):
    _require_one_device(seed, position)
    return seed.new_empty((seed.shape[0], num), dtype=torch.float32)


@torch.library.register_fake("fastspec::linear")
def _(input, weight, bias):
    _require_one_device(input, weight, bias)
    return input.new_empty((*input.shape[:-1], weight.shape[0]))


@torch.library.register_fake("fastspec::quantized_linear")
def _(input, weight, num_outputs, bias):
    _require_one_device(input, weight, bias)
    return input.new_empty((*input.shape[:-1], num_outputs))


@torch.library.register_fake("fastspec::rms_norm")
def _(input, weight, eps):
    _require_one_device(input, weight)
    return input.new_empty(input.shape)


@torch.library.register_fake("fastspec::gated_mlp")
def _(input, gate_weight, up_weight, down_weight):
    _require_one_device(input, gate_weight, up_weight, down_weight)
    return input.new_empty(input.shape)


@torch.library.register_fake("fastspec::decoder_layers")
def _(hidden, layers, key_caches, value_caches, *arguments):
    _require_one_device(hidden, layers, key_caches, value_caches, *arguments)
    return hidden.new_empty(hidden.shape)


@torch.library.register_fake("fastspec::draft_chain")
def _(*arguments):
    _require_one_device(*arguments)
    names = [argument.name for argument in OVERLOADS["draft_chain"]._schema.arguments]
    given = dict(zip(names, arguments, strict=True))
    token_ids = given["token_ids"]
    batch, num_steps = given["uniform_samples"].shape
    kept = num_steps if given["keeps_logits"] else 0
    return (
        token_ids.new_empty((batch, num_steps), dtype=torch.int32),
        token_ids.new_empty((batch,), dtype=torch.int32),
        given["key_caches"][0].new_empty((batch, kept, given["num_columns"])),
    )


@torch.library.register_fake("fastspec::row_stats")
def _(logits, *params):
    _require_one_device(logits, *params)
    rows = logits.shape[:1]
    return logits.new_empty(rows, dtype=torch.float32), logits.new_empty(rows, dtype=torch.float32)


@torch.library.register_fake("fastspec::logits_to_probs")
def _(logits, *params):
    _require_one_device(logits, *params)
    return logits.new_empty(logits.shape, dtype=torch.float32)


@torch.library.register_fake("fastspec::sample")
def _(logits, uniform_samples, *params):
    _require_one_device(logits, uniform_samples, *params)
    rows = logits.shape[:1]
    return logits.new_empty(rows, dtype=torch.int32), logits.new_empty(rows, dtype=torch.float32)


@torch.library.register_fake("fastspec::sample_coupled")
def _(logits, seed, position, *params):
    _require_one_device(logits, seed, position, *params)
    rows = logits.shape[:1]
    return logits.new_empty(rows, dtype=torch.int32), logits.new_empty(rows, dtype=torch.float32)


@torch.library.register_fake("fastspec::penalize")
def _(*tensors):
    _require_one_device(*tensors)


@torch.library.register_fake("fastspec::verify_chain")
def _(target_logits, cu_rows, draft_token_ids, *others):
    _require_one_device(target_logits, cu_rows, draft_token_ids, *others)
    batch, num_draft = draft_token_ids.shape
    return (
        draft_token_ids.new_empty((batch, num_draft + 1)),
        draft_token_ids.new_empty((batch,)),
        draft_token_ids.new_empty((batch, num_draft + 1), dtype=torch.float32),
    )


@torch.library.register_fake("fastspec::verify_tree")
def _(target_logits, cu_rows, tree_token_ids, *others):
    _require_one_device(target_logits, cu_rows, tree_token_ids, *others)
    ids = tree_token_ids
    return (
        ids.new_empty(ids.shape),
        ids.new_empty(ids.shape),
        ids.new_empty(ids.shape[:1]),
        ids.new_empty(ids.shape, dtype=torch.float32),
    )


@torch.library.register_fake("fastspec::build_tree")
def _(parents):
    words = (parents.shape[1] + 63) // 64
    return (
        parents.new_empty(parents.shape),
        parents.new_empty((*parents.shape, words), dtype=torch.int64),
    )


@torch.library.register_fake("fastspec::match_suffix")
def _(token_ids, lengths, min_match, max_match, num_tokens, rule):
    _require_one_device(token_ids, lengths)
    return token_ids.new_empty((token_ids.shape[0], num_tokens))


@torch.library.register_fake("fastspec::store_kv")
def _(key, value, key_cache, value_cache, slot_mapping, cos, sin, key_scale, value_scale):
    _require_one_device(key, value, key_cache, value_cache, slot_mapping, cos, sin)


@torch.library.register_fake("fastspec::compact_kv")
def _(*tensors):
    _require_one_device(*tensors)


@torch.library.register_fake("fastspec::tree_attention")
def _(query, *args):
    *others, _, _, _, sinks, ancestor_mask, return_logsumexp, _ = args
    _require_one_device(query, *others, sinks, ancestor_mask)
    rows = query.shape[:2] if return_logsumexp else (0,)
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    return out, query.new_empty(rows, dtype=torch.float32)


@torch.library.register_fake("fastspec::cross_attention")
def _(query, *args):
    _require_one_device(query, *args)
    return torch.empty_like(query, memory_format=torch.contiguous_format)


def _require_one_device(*arguments):
    """Refuse meta tensors among real ones, which reach the fakes; the public op says which."""
    lists = (value if isinstance(value, list) else [value] for value in arguments)
    values = (value for each in lists for value in each)
    if len({value.device for value in values if isinstance(value, torch.Tensor)}) > 1:
        raise ValueError("the arguments are on different devices")
