"""What the engine's tests share: a small pair of models, and one thread.

The models are so small that waking a second thread costs more than it brings.
"""

import pytest

from ..models import perturbed, random_model


@pytest.fixture(autouse=True, scope="module")
def _one_thread(one_thread: None) -> None:
    """For all modules of this folder."""


@pytest.fixture(scope="module")
def model():
    return random_model("llama")


@pytest.fixture(scope="module")
def drafter(model):
    return perturbed(model, 0.03)
