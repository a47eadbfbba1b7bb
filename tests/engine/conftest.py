"""What the engine's tests share: a small pair of models, and one thread.

The models are so small that waking a second thread costs more than it brings.
"""

import pytest
import torch

from ..models import perturbed, random_model


@pytest.fixture(autouse=True, scope="package")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model():
    return random_model("llama")


@pytest.fixture(scope="module")
def drafter(model):
    return perturbed(model, 0.03)
