"""The specification of the random numbers: Philox4x32-10 in plain PyTorch."""

import torch
from torch import Tensor

# Streams of `gumbel`, far from the numbers that callers of `uniform` use.
LEAST_STREAM, OTHERS_STREAM = 0x67756D62, 0x67756D63


def uniform(seed: Tensor, position: Tensor, num: int, stream: int) -> Tensor:
    """Take the top 24 bits of the words."""
    return (_philox(seed, position, num, stream) >> 8).to(torch.float32) * 2.0**-24


def gumbel(seed: Tensor, position: Tensor, num: int) -> Tensor:
    """Return [B, num] float64 Gumbel noise: -log of exponential numbers, in groups of sixteen."""
    token = torch.arange(num, device=seed.device)
    words = _philox(seed, position, -(-num // 256) * 16, LEAST_STREAM)
    words = words[:, token // 256 * 16 + token % 16]
    least = -(((words >> 4).double() + 0.5) * 2.0**-28).log() / 16
    others = _philox(seed, position, num, OTHERS_STREAM).double()
    others = -((others + 0.5) * 2.0**-32).log()
    has_least = words % 16 == token // 16 % 16
    return -torch.where(has_least, least, least + others).log()


def _philox(seed: Tensor, position: Tensor, num: int, stream: int) -> Tensor:
    """Compute [B, num] words of Philox4x32-10 in int64 arithmetic."""
    low = 0xFFFFFFFF
    index = torch.arange(num, device=seed.device)
    counter = [
        (position & low)[:, None].expand(-1, num),
        ((position >> 32) & low)[:, None].expand(-1, num),
        (index // 4).expand(seed.shape[0], -1),
        torch.full((seed.shape[0], num), stream, device=seed.device),
    ]
    key = [(seed & low)[:, None], ((seed >> 32) & low)[:, None]]
    for _ in range(10):
        high0, low0 = _multiply_32(counter[0], 0xD2511F53)
        high2, low2 = _multiply_32(counter[2], 0xCD9E8D57)
        counter = [high2 ^ counter[1] ^ key[0], low2, high0 ^ counter[3] ^ key[1], low0]
        key = [(key[0] + 0x9E3779B9) & low, (key[1] + 0xBB67AE85) & low]
    words = torch.stack(counter, dim=-1)  # [B, num, 4]
    return words.gather(-1, (index % 4).expand(seed.shape[0], -1)[..., None])[..., 0]


def _multiply_32(value: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """Return high and low 32 bits of a 32 x 32 bit product, within the positive int64 range."""
    low_product = value * (factor & 0xFFFF)  # < 2**48
    high_product = value * (factor >> 16)  # < 2**48, to be shifted left by 16
    total = low_product + ((high_product & 0xFFFF) << 16)
    return (high_product >> 16) + (total >> 32), total & 0xFFFFFFFF
