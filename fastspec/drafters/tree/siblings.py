"""The children of a token tree's node: the most probable tokens, or a sample."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from fastspec.drafters.base import SamplingTensors
from fastspec.models.transfer import device_tensor
from fastspec_kernels import row_stats, sample, sample_coupled

_GROUP = 64  # logits

ConfidenceBins = tuple[tuple[float, int], ...]  # (upper bound of probability, siblings added)


class SiblingCut:
    """Masks a node's surplus children, by the probability of the most probable one."""

    def __init__(self, bins: ConfidenceBins, num_children: int, device: torch.device):
        self._bounds = device_tensor([bound for bound, _ in bins[:-1]], torch.float32, device)
        self._extra = device_tensor([extra for _, extra in bins], torch.int64, device)
        self._ranks = torch.arange(num_children, device=device)

    def of(self, confidence: Tensor) -> Tensor:
        """Return the mask, bool [..., num_children], from probabilities [..., 1]."""
        return self._ranks > self._extra[torch.bucketize(confidence, self._bounds)]


def top_tokens(
    logits: Tensor, num: int, temperature: Tensor | None, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Return the `num` most probable tokens of each row, best first, and their log-probabilities.

    Args:
        logits: [R, V].
        temperature: [R], all above 0, or None = 1.
        backend: backend of the kernel.
    Returns:
        token_ids [R, num] int32, logprobs [R, num] float32; -1 and -inf where there is none.
    """
    best, token_ids = _largest(logits, min(num, logits.shape[1]))
    if temperature is not None:
        best = best / temperature[:, None]
    logsumexp, _ = row_stats(logits, temperature=temperature, backend=backend)
    logprobs = (best - logsumexp[:, None]).clamp(max=0.0)
    logprobs = logprobs.nan_to_num(nan=-torch.inf, neginf=-torch.inf)
    token_ids = token_ids.int().masked_fill(logprobs == -torch.inf, -1)
    if missing := num - best.shape[1]:
        token_ids = pad(token_ids, (0, missing), value=-1)
        logprobs = pad(logprobs, (0, missing), value=-torch.inf)
    return token_ids, logprobs


def _largest(logits: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """Return the `num` largest logits of each row [R, V] in float32, descending, and their places.

    They are in the `num` groups with the largest maxima, so only those are sorted.
    """
    size = logits.shape[1]
    if size % _GROUP or size < 4 * num * _GROUP:
        return logits.float().topk(num)
    chosen = logits.unflatten(1, (-1, _GROUP)).amax(dim=2).topk(num, sorted=False).indices
    places = (chosen[:, :, None] * _GROUP + torch.arange(_GROUP, device=logits.device)).flatten(1)
    best, within = logits.gather(1, places).float().topk(num)
    return best, places.gather(1, within)


def draw_siblings(
    logits: Tensor,
    uniforms: Tensor,
    sampling: SamplingTensors,
    backend: str = "auto",
    coupled_keys: Tensor | None = None,
) -> Tensor:
    """Draw tokens from each row one after the other, without replacement.

    Args:
        logits: [R, V].
        uniforms: [R, num] float32, one for each token.
        sampling: temperature and filters of each row; rows with temperature 0 give their most
            probable tokens, best first.
        backend: backend of the kernels.
        coupled_keys: [2, R] int64, seed and position of each row's tokens, to draw them by coupled
            noise instead; the first is then the one that `fastspec_kernels.sample_coupled` draws.
    Returns:
        [R, num] int32, -1 where nothing is left to draw.
    """
    temperature = sampling["temperature"]
    _, threshold = row_stats(logits, **sampling, backend=backend)
    if temperature is not None:
        threshold = threshold.masked_fill(temperature == 0, -torch.inf)
    left = logits.masked_fill(logits < threshold[:, None], -torch.inf)
    picked = []
    for draw in uniforms.unbind(1):
        if coupled_keys is None:
            token_ids, _ = sample(left, draw, temperature=temperature, backend=backend)
        else:
            token_ids, _ = sample_coupled(
                left, *coupled_keys, temperature=temperature, backend=backend
            )
        picked.append(token_ids)
        left.scatter_(1, token_ids.clamp(min=0).long()[:, None], -torch.inf)
    return torch.stack(picked, dim=1)
