"""Argument checks; each raises a ValueError that names the argument and the value."""

from numbers import Real
from reprlib import repr as shortened

import torch
from torch import Tensor

# Sums of up to 2**44 per token stay within 64 bits.
MAX_GPU_VOCAB = 2**20 - 1
INT32_MAX, INT64_MAX = 2**31 - 1, 2**63 - 1
LOGITS_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FLOAT8 = torch.float8_e4m3fn
CACHE_DTYPES = (*LOGITS_DTYPES, FLOAT8)
FLOAT32 = torch.finfo(torch.float32)


def check_tensor(
    name: str,
    tensor: Tensor,
    shape: tuple[int | None, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device | None,
) -> None:
    """Check rank, sizes (None = any), dtype and device (None = any) of one argument."""
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name}: expected a tensor, got {type(tensor).__name__}")
    if not _is_plain(tensor):
        kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        raise ValueError(f"{name}: expected a dense tensor with values in memory, got {kind}")
    actual = tensor.shape
    if actual == shape and tensor.dtype in dtypes and tensor.device == device:
        return  # fast path for known sizes: most calls end here, within half a microsecond
    if len(actual) != len(shape) or any(
        expected is not None and expected != size
        for expected, size in zip(shape, actual, strict=True)
    ):
        expected = ", ".join("*" if size is None else str(size) for size in shape)
        raise ValueError(f"{name}: expected shape [{expected}], got {list(actual)}")
    if tensor.dtype not in dtypes:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(
            f"{name}: expected {names}, got {str(tensor.dtype).removeprefix('torch.')}"
        )
    if device is not None and tensor.device != device:
        raise ValueError(f"{name}: expected a tensor on {device}, got {tensor.device}")


def check_dense(
    name: str,
    tensor: Tensor,
    shape: tuple[int | None, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device | None,
) -> None:
    """Check one argument as `check_tensor` does, and that it is dense in memory."""
    check_tensor(name, tensor, shape, dtypes, device)
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: must be contiguous, strides {tensor.stride()}")


def check_dense_rows(
    name: str,
    tensor: Tensor,
    shape: tuple[int | None, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device | None,
) -> None:
    """Check one argument as `check_tensor` does, and that its rows are dense in memory."""
    check_tensor(name, tensor, shape, dtypes, device)
    if tensor.stride()[-1] != 1 and tensor.shape[-1] > 1:
        raise ValueError(
            f"{name}: the last dimension must be contiguous, strides {tensor.stride()}"
        )


def _is_plain(tensor: Tensor) -> bool:
    """Whether the values are in memory as described by shape and strides."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return False
    if torch.compiler.is_compiling():  # torch.compile cannot ask
        return True
    return not tensor.is_neg() and not tensor._is_zerotensor()


def dense(tensor: Tensor) -> Tensor:
    """Return the values contiguous in memory; anything but a plain tensor is left to the checks."""
    is_tensor = isinstance(tensor, Tensor) and tensor.layout is torch.strided
    if not is_tensor or tensor.is_contiguous():  # most calls end here
        return tensor
    return tensor.contiguous() if _is_plain(tensor) else tensor


# A torch schema accepts a bool or a one-element tensor as a number, which kernels cannot detect.
def check_int(name: str, value: int, least: int, most: int = INT64_MAX) -> None:
    """Check an integer and its bounds."""
    if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most:
        return
    bounds = f">= {least}" if most == INT64_MAX else f"from {least} to {most}"
    raise ValueError(f"{name}: expected an int {bounds}, got {shortened(value)}")


def check_number(name: str, value: float, least: float, expected: str) -> float:
    """Check a real number from `least` to the largest float32, and return it as a float."""
    is_number = type(value) is float or (isinstance(value, Real) and not isinstance(value, bool))
    if is_number and least <= value <= FLOAT32.max:
        return float(value)
    raise ValueError(f"{name}: expected {expected}, got {shortened(value)}")


def check_positive(name: str, value: float) -> float:
    """Check that a number is positive and finite in float32, and return it as a float."""
    return check_number(name, value, FLOAT32.tiny, "a positive, finite float32 number")


def check_width(name: str, size: int) -> None:
    """Check that rows hold at least one value."""
    if size < 1:
        raise ValueError(f"{name}: expected rows of at least one value, got {size}")


def check_flag(name: str, value: bool) -> None:
    """Check a bool."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}: expected True or False, got {shortened(value)}")


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Check a string option."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name}: expected one of {choices}, got {shortened(value)}")


def check_logits(name: str, logits: Tensor, rank: int, device: torch.device | None = None) -> None:
    """Check a tensor of logits: dtype, rank, non-empty vocabulary, contiguous last dimension."""
    if not isinstance(logits, Tensor):
        raise ValueError(f"{name}: expected a tensor, got {type(logits).__name__}")
    shape = logits.shape if logits.dim() == rank else (None,) * rank
    check_dense_rows(name, logits, shape, LOGITS_DTYPES, device or logits.device)
    if logits.shape[-1] == 0:
        raise ValueError(f"{name}: the vocabulary is empty, shape {list(logits.shape)}")
    if logits.device.type == "cuda" and logits.shape[-1] > MAX_GPU_VOCAB:
        raise ValueError(
            f"{name}: expected a vocabulary of at most {MAX_GPU_VOCAB} on a GPU, got"
            f" {logits.shape[-1]}"
        )


def check_sampling(
    num: int,
    device: torch.device,
    temperature: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
) -> None:
    """Check the four optional sampling parameters, with `num` values each."""
    for name, tensor, dtype in (
        ("temperature", temperature, torch.float32),
        ("top_k", top_k, torch.int32),
        ("top_p", top_p, torch.float32),
        ("min_p", min_p, torch.float32),
    ):
        if tensor is not None:
            check_dense(name, tensor, (num,), (dtype,), device)


def check_token_bitmask(token_bitmask: Tensor | None, num_rows: int, logits: Tensor) -> None:
    """Check the bitmask of allowed tokens of `num_rows` rows of logits."""
    if token_bitmask is not None:
        words = (logits.shape[-1] + 31) // 32
        shape = (num_rows, words)
        check_dense_rows("token_bitmask", token_bitmask, shape, (torch.int32,), logits.device)


def check_cu_rows(cu_rows: Tensor, batch: int, logits: Tensor) -> None:
    """Check the prefix sums of rows; their values only if that needs no synchronisation."""
    check_sums("cu_rows", cu_rows, batch, logits.shape[0], logits.device, of=" rows")


def check_sums(
    name: str, cu: Tensor, batch: int, most: int, device: torch.device, of: str = ""
) -> None:
    """Check prefix sums; their values only if that needs no synchronisation."""
    check_tensor(name, cu, (batch + 1,), (torch.int32,), device)
    if device.type != "cpu":
        return
    sums = cu.tolist()
    if sums[0] != 0 or sums != sorted(sums) or sums[-1] > most:
        raise ValueError(f"{name}: expected prefix sums from 0 to at most {most}{of}, got {sums}")


def check_parents(parents: Tensor, shape: tuple[int, int], device: torch.device) -> None:
    """Check the shape and, if that needs no synchronisation, that parents come first."""
    check_tensor("parents", parents, shape, (torch.int32,), device)
    if device.type == "cpu":
        nodes = torch.arange(shape[1], dtype=torch.int32, device=device)
        late = (parents >= nodes) | (parents < -1)
        late[:, :1] = False
        if late.any():
            b, i = late.nonzero()[0].tolist()
            raise ValueError(
                f"parents: expected -1 or an earlier node, got {int(parents[b, i])} for node {i}"
                f" of tree {b}"
            )


def check_draft_rows(
    draft_logits: Tensor | None, shape: tuple[int, int], target_logits: Tensor
) -> None:
    """Check draft rows [*shape, draft V] against the target's vocabulary."""
    if draft_logits is None:
        return
    check_logits("draft_logits", draft_logits, 3, target_logits.device)
    if draft_logits.shape[:2] != shape:
        raise ValueError(
            f"draft_logits: expected shape [{shape[0]}, {shape[1]}, *],"
            f" got {list(draft_logits.shape)}"
        )
    if draft_logits.shape[2] > target_logits.shape[1]:
        raise ValueError(
            f"draft_logits: a vocabulary of {draft_logits.shape[2]} is larger than "
            f"the target's {target_logits.shape[1]}"
        )


def check_draft_token_map(
    draft_token_map: Tensor | None, draft_logits: Tensor | None, target_logits: Tensor
) -> None:
    """Check the map from target tokens to columns of the draft rows."""
    if draft_token_map is None:
        return
    if draft_logits is None:
        raise ValueError("draft_token_map: needs draft_logits")
    shape = (target_logits.shape[1],)
    dtypes = (torch.int32,)
    check_dense("draft_token_map", draft_token_map, shape, dtypes, target_logits.device)


def check_caches(
    key_cache: Tensor,
    value_cache: Tensor,
    names: tuple[str, str] = ("key_cache", "value_cache"),
    rank: int = 4,
) -> tuple[int, int]:
    """Check key and value cache, and return the number of heads and the head size."""
    name = names[0]
    check_tensor(name, key_cache, (None,) * rank, CACHE_DTYPES, None)
    shape = tuple(key_cache.shape)
    if 0 in shape[-3:]:
        raise ValueError(f"{name}: every block needs at least one value, shape {list(shape)}")
    check_tensor(names[1], value_cache, shape, (key_cache.dtype,), key_cache.device)
    strides, others = key_cache.stride(), value_cache.stride()
    if not _same_strides(shape[-2:], strides[-2:], (shape[-1], 1)):
        raise ValueError(f"{name}: the last two dimensions must be contiguous, strides {strides}")
    if any(size > 1 and stride == 0 for size, stride in zip(shape, strides, strict=True)):
        raise ValueError(f"{name}: overlaps itself, strides {strides}")
    if not _same_strides(shape, strides, others):
        raise ValueError(f"{names[1]}: expected the strides of {name}, {strides}, got {others}")
    return shape[-2], shape[-1]


def _same_strides(shape: tuple, strides: tuple, others: tuple) -> bool:
    """Whether strides are equal where they matter: in dimensions of more than one."""
    triples = zip(shape, strides, others, strict=True)
    return all(size <= 1 or stride == other for size, stride, other in triples)


def dtypes_beside(cache: Tensor) -> tuple[torch.dtype, ...]:
    """Return the dtypes that queries, keys and values may have with a cache."""
    return LOGITS_DTYPES if cache.dtype == FLOAT8 else (cache.dtype,)


def check_scales(key_cache: Tensor, key_scale: float, value_scale: float) -> tuple[float, float]:
    """Check the value that a stored 1 represents: 1, unless stored in 8 bits."""
    scales = check_positive("key_scale", key_scale), check_positive("value_scale", value_scale)
    is_float8 = isinstance(key_cache, Tensor) and key_cache.dtype == FLOAT8
    for name, scale in zip(("key_scale", "value_scale"), scales, strict=True):
        if scale != 1.0 and not is_float8:
            raise ValueError(
                f"{name}: expected 1.0, as key_cache is not float8_e4m3fn, got {scale}"
            )
    return scales
