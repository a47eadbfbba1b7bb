"""The processes of a training run: only this one, or those started by accelerate."""

from typing import Any

import torch
from torch import Tensor

from fastspec.config.checks import require

_SPLIT_MODELS = ("DEEPSPEED", "FSDP", "MEGATRON_LM")


class OneProcess:
    """The part of accelerate.Accelerator's interface that the trainer uses, for one process."""

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
        """Return the sum over all processes."""
        return tensor

    def unwrap_model(self, model: Any, keep_fp32_wrapper: bool = True) -> Any:
        return model

    def wait_for_everyone(self) -> None:
        """Do nothing; there are no other processes."""

    def end_training(self) -> None:
        """Do nothing; there is no process group to leave."""


def many_processes() -> Any:
    """Return the Accelerator of processes started by `accelerate launch`, each with a whole model.

    Raises:
        ValueError: accelerate is not installed, or configured to split the model or to accumulate
            gradients.
    """
    try:
        from accelerate import Accelerator
    except ImportError as error:
        raise ValueError("accelerate: not installed; install fastspec-kernels[train]") from error
    accelerator = Accelerator()
    kind = accelerator.distributed_type.value
    require("accelerate", kind, kind not in _SPLIT_MODELS, "processes that hold the whole draft")
    num = accelerator.gradient_accumulation_steps
    require("gradient_accumulation_steps", num, num == 1, "1; use a larger batch_size")
    return accelerator
