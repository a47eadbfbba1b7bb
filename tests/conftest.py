"""Makes the tests run in a bare checkout and, Triton's too, without a GPU; seeds each test."""

import gc
import os
import secrets
import sys
from importlib.util import find_spec
from pathlib import Path
from random import Random

import pytest

# Before torch and numpy load. The tests' arrays are so small that waking a second thread costs more
# than it brings, idle threads of OpenMP spin, and there is one worker for each core already.
os.environ |= {
    name: os.environ.get(name, "1")
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
}
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ["HF_HUB_OFFLINE"] = "1"  # a model that is missing is looked for in vain for a minute

import torch

from .interpreter import quicken

ROOT = Path(__file__).resolve().parent.parent
if find_spec("fastspec_kernels") is None:
    sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]
if not torch.cuda.is_available():
    # Before any kernel is defined: it decides how triton.jit understands them.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Files that take longest; started first, so that no worker waits for the other at the end.
LONG_FILES = (
    "tests/test_packaging.py",
    "tests/test_soak.py",
    "tests/test_docs.py",
    "tests/engine/test_parameters.py",
    "tests/triton/test_compile_attention.py",
    "tests/triton/test_compile.py",
    "tests/cuda/test_compile.py",
    "tests/triton/test_attention.py",
)
SEEDS = Random()


def pytest_collection_modifyitems(items):
    """Long files first; the order is otherwise as it was."""
    items.sort(key=lambda item: not item.nodeid.startswith(LONG_FILES))


@pytest.fixture(autouse=True, scope="session")
def _seeds():
    """Seeds of requests without one: a test that passes once passes in each run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(secrets, "randbits", SEEDS.getrandbits)
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Before its fixtures, which may draw as well."""
    SEEDS.seed(item.nodeid)


def pytest_collection_finish():
    """What was imported stays: no collection of garbage walks through its million objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _quick_interpreter():
    """Once the interpreter is loaded, which takes long and is left to the tests that need it."""
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter and not hasattr(interpreter._patch_lang, "__wrapped__"):
        quicken(interpreter)


@pytest.fixture(autouse=True)
def _seed():
    """Without a GPU `torch.manual_seed` notes for later, with a traceback, to seed one."""
    seed = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed
    seed(0)


@pytest.fixture(scope="module")
def one_thread():
    """Whatever the environment says: models of tests only lose time to more threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
