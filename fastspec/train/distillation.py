"""The loss that teaches a draft its target's distribution."""

from typing import Any

import torch


class DistillationLoss(torch.autograd.Function):
    """Mean cross-entropy of the draft to the target's distribution, float logits [T, V].

    Its minimum is reached only at the target's distribution (Hinton et al. 2015, temperature 1).
    The gradient, draft_probs - target_probs, is computed in the forward pass, because at this size
    passes over [T, V] cost more than the models do.
    """

    @staticmethod
    def forward(ctx: Any, draft_logits: torch.Tensor, target_logits: torch.Tensor) -> torch.Tensor:
        target_probs = target_logits.softmax(dim=-1, dtype=torch.float32)
        logprobs = draft_logits.log_softmax(dim=-1, dtype=torch.float32)
        loss = -torch.linalg.vecdot(target_probs, logprobs).mean()
        gradient = logprobs.exp_().sub_(target_probs).div_(len(draft_logits))
        ctx.save_for_backward(gradient.to(draft_logits.dtype))
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * gradients[0], None


class FrozenHeadLoss(torch.autograd.Function):
    """Distillation loss of rows [N, E] before a frozen head [R, E], optionally mixed with an
    acceptance loss.

    The acceptance loss is -log of the acceptance rate at temperature 1, the sum over tokens of
    min(draft_probs, target_probs): a small draft then spends no capacity on tokens that it proposes
    too rarely or too often anyway. Both distributions are over the tokens that the head knows.

    target_probs [N, R]; all three have the same dtype, in which logits are computed and dropped
    again: only the gradient of the rows is kept.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        head: torch.Tensor,
        target_probs: torch.Tensor,
        acceptance_weight: float = 0.0,
    ) -> torch.Tensor:
        logits = rows @ head.T
        probs = logits.softmax(dim=-1)
        logsumexp = logits.amax(dim=-1).float() - probs.amax(dim=-1).float().log()
        loss = logsumexp.mean() - torch.linalg.vecdot(target_probs, logits).float().mean()
        if not acceptance_weight:
            gradient = probs.sub_(target_probs)
        else:
            loss = loss * (1 - acceptance_weight)
            gradient = (probs - target_probs).mul_(1 - acceptance_weight)
            # d/dlogits of sum min(q, p) is q * (m - sum m q), where m is 1 if q < p, else 0.
            smaller = (probs < target_probs).to(probs.dtype)
            own = torch.linalg.vecdot(smaller, probs)[:, None]
            accepted = torch.minimum(probs, target_probs).sum(-1, dtype=torch.float32)
            accepted = accepted.clamp(min=torch.finfo(torch.float32).tiny)
            loss -= acceptance_weight * accepted.log().mean()
            # A quotient of small numbers, too small for 16 bits.
            slope = smaller.sub_(own).mul_(probs).float().div_(accepted[:, None])
            gradient -= slope.mul_(acceptance_weight).to(probs.dtype)
        ctx.save_for_backward((gradient @ head).div_(len(rows)))
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * gradients[0], None, None, None
