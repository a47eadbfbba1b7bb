"""The ops that write to a paged cache, emulated; arguments as the reference's."""

from ctypes import c_int32, c_int64

from torch import Tensor

from .emulated import ELEMENTS, Emulation, address, pointers, struct

StoreSide = struct(
    "StoreSide", **pointers("source", "cache"), token_stride=c_int64, head_stride=c_int64
)
Rotation = struct(
    "Rotation",
    **pointers("cos", "sin"),
    **dict.fromkeys(("cos_stride", "sin_stride", "size"), c_int64),
    element=c_int32,
)
StoreKvCall = struct(
    "StoreKvCall",
    key=StoreSide,
    value=StoreSide,
    rotation=Rotation,
    **pointers("slot_mapping"),
    **dict.fromkeys(("num_tokens", "num_heads", "head_size", "num_slots", "block_size"), c_int64),
    **dict.fromkeys(("block_stride", "slot_stride"), c_int64),
    element=c_int32,
)
CompactKvCall = struct(
    "CompactKvCall",
    **pointers("key_caches", "value_caches"),
    **pointers("block_table", "prefix_lens", "path", "accepted_len"),
    **dict.fromkeys(("layer_stride", "block_stride", "slot_stride", "slot_bytes"), c_int64),
    **dict.fromkeys(("table_stride", "path_stride"), c_int64),
    **dict.fromkeys(("num_layers", "num_blocks", "block_size", "batch"), c_int64),
    **dict.fromkeys(("max_blocks", "num_nodes"), c_int64),
)


def strides_in_bytes(tensor: Tensor) -> list[int]:
    return [stride * tensor.element_size() for stride in tensor.stride()]


def side_struct(tokens: Tensor, cache: Tensor):
    return StoreSide(address(tokens), address(cache), *strides_in_bytes(tokens)[:2])


def rotation_struct(cos: Tensor | None, sin: Tensor | None):
    if cos is None or sin is None:
        return Rotation()
    strides = strides_in_bytes(cos)[0], strides_in_bytes(sin)[0]
    return Rotation(address(cos), address(sin), *strides, cos.shape[1], ELEMENTS[cos.dtype])


def store_kv(emulation: Emulation, key, value, key_cache, value_cache, slots, cos, sin) -> None:
    num_blocks, block_size, num_heads, head_size = key_cache.shape
    call = StoreKvCall(
        side_struct(key, key_cache),
        side_struct(value, value_cache),
        rotation_struct(cos, sin),
        address(slots),
        *(len(slots), num_heads, head_size, num_blocks * block_size, block_size),
        *strides_in_bytes(key_cache)[:2],
        ELEMENTS[key_cache.dtype],
    )
    emulation.launch("store_kv", call)


def compact_kv(
    emulation: Emulation, key_caches, value_caches, block_table, prefix_lens, path, accepted_len
) -> None:
    num_layers, num_blocks, block_size, num_heads, head_size = key_caches.shape
    tensors = key_caches, value_caches, block_table, prefix_lens, path, accepted_len
    slot_bytes = num_heads * head_size * key_caches.element_size()
    call = CompactKvCall(
        *map(address, tensors),
        *(*strides_in_bytes(key_caches)[:3], slot_bytes),
        *(block_table.stride(0), path.stride(0)),
        *(num_layers, num_blocks, block_size, len(block_table)),
        *(block_table.shape[1], path.shape[1]),
    )
    emulation.launch("compact_kv", call)
