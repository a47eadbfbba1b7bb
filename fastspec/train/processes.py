"""The processes of a training run: this one alone, or those that accelerate starts."""

from typing import Any

import torch
from torch import Tensor

from fastspec.config.checks import require

_SPLIT_MODELS = ("DEEPSPEED", "FSDP", "MEGATRON_LM")


class OneProcess:
    """What the trainer uses of an accelerate.Accelerator, for one process on one device."""

    process_index = 0
    num_processes = 1
    is_main_process = True

    def __init__(self, device: torch.device):
        self.device = device

    def prepare(self, *parts: Any) -> Any:
        return parts

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def clip_grad_norm_(self, parameters: Any, max_norm: float) -> Any:
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)

    def reduce(self, tensor: Tensor) -> Tensor:
        """The sum over all processes."""
        return tensor

    def unwrap_model(self, model: Any, keep_fp32_wrapper: bool = True) -> Any:
        return model

    def wait_for_everyone(self) -> None:
        """Nobody else is there."""

    def end_training(self) -> None:
        """No group of processes to leave."""


def many_processes() -> Any:
    """The Accelerator of what `accelerate launch` started: processes that hold the whole model.

    Raises:
        ValueError: accelerate is not installed, or set up to split the model or to put off steps.
    """
    try:
        from accelerate import Accelerator
    except ImportError as error:
        raise ValueError("accelerate: not installed; install fastspec-kernels[train]") from error
    accelerator = Accelerator()
    kind = accelerator.distributed_type.value
    require("accelerate", kind, kind not in _SPLIT_MODELS, "processes that hold the whole draft")
    num = accelerator.gradient_accumulation_steps
    require("gradient_accumulation_steps", num, num == 1, "1; take a larger batch_size")
    return accelerator
