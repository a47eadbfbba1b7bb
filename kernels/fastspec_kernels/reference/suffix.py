"""The specification of the suffix match."""

import torch
from torch import Tensor


def match_suffix(
    token_ids: Tensor,
    lengths: Tensor,
    min_match: int,
    max_match: int,
    num_tokens: int,
    rule: str,
) -> Tensor:
    """Compare all positions with the end of the text, one token further back at a time."""
    batch, width = token_ids.shape
    if width == 0:
        return token_ids.new_full((batch, num_tokens), -1)
    ends = torch.arange(width, device=token_ids.device)
    length = lengths.clamp(0, width).long()[:, None]
    alive = ends < length
    matched = torch.zeros_like(alive, dtype=torch.int64)
    for step in range(min(max_match, width - 1)):
        last = token_ids.gather(1, (length - 1 - step).clamp(min=0))
        before = token_ids[:, (ends - 1 - step).clamp(min=0)]
        alive = alive & (ends > step) & (before == last)
        matched += alive
    order = ends if rule == "latest" else width - ends
    best = (matched * (width + 1) + order).argmax(dim=1, keepdim=True)
    found = matched.gather(1, best) >= min_match
    places = best + torch.arange(num_tokens, device=token_ids.device)
    tokens = token_ids.gather(1, places.clamp(max=width - 1))
    return torch.where(found & (places < length), tokens, -1)
