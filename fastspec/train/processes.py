"""One training process, with the names of an accelerate.Accelerator."""

from typing import Any, Protocol

import torch
from torch import Tensor


class Processes(Protocol):
    """What the trainer asks of the processes that share a run."""

    device: torch.device
    process_index: int
    num_processes: int
    is_main_process: bool

    def prepare(self, *parts: Any) -> Any: ...
    def backward(self, loss: Tensor) -> None: ...
    def clip_grad_norm_(self, parameters: Any, max_norm: float) -> Any: ...
    def unwrap_model(self, model: Any) -> Any: ...
    def wait_for_everyone(self) -> None: ...


class OneProcess:
    """A run of one process on one device."""

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

    def unwrap_model(self, model: Any) -> Any:
        return model

    def wait_for_everyone(self) -> None:
        """Nobody else is there."""


def many_processes() -> Processes:
    """The processes that `accelerate launch` started.

    Raises:
        ValueError: accelerate is not installed.
    """
    try:
        from accelerate import Accelerator  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ValueError("accelerate: it is not installed; it is in the extra [train]") from error
    return Accelerator()
