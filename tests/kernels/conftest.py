"""Every instruction set of the CPU kernels, and fewer cases for interpreted kernels."""

import os
from collections import defaultdict
from collections.abc import Iterator

import pytest
import torch

from fastspec_kernels import library

# Too long, or too many draws, for an interpreter that takes a millisecond per operation.
LEFT_OUT = (
    "large_vocabularies",
    "test_distribution",
    "test_is_uniform",
    "test_two_models",
    "test_long_periodic_texts",
)
CASES_PER_TEST = 2
# Of each test on an instruction set other than the widest, which runs all cases: enough to meet
# every branch of the vector code several times.
CASES_PER_PATH = 6
CASES_OF_REFERENCE = 12  # which is plain; its tables of edges are run whole
WHOLE_TABLES = ("test_edges", "test_wrong_arguments")

INSTRUCTION_SETS = ["none"]
if library.HAS_CPU_EXTENSION:
    INSTRUCTION_SETS = torch.ops.fastspec.cpu_instruction_sets()
    if "FASTSPEC_CPU_ISA" in os.environ:
        INSTRUCTION_SETS = [os.environ["FASTSPEC_CPU_ISA"]]
# Tests that end before any vector code.
ONE_PATH = ("error", "wrong", "opcheck", "registration")


@pytest.fixture(params=INSTRUCTION_SETS)
def instruction_set(request: pytest.FixtureRequest) -> Iterator[None]:
    """Runs the test on the CPU with every instruction set that the processor has.

    The widest runs all cases, the others some of them, or all where FASTSPEC_CPU_ISA names one.
    """
    if request.param == "none":
        yield
        return
    before = torch.ops.fastspec.cpu_instruction_set()
    torch.ops.fastspec.use_cpu_instruction_set(request.param)
    yield
    torch.ops.fastspec.use_cpu_instruction_set(before)


@pytest.fixture
def restore_threads() -> Iterator[None]:
    """For tests that set the number of threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def pytest_collection_modifyitems(config, items):
    """Leave out what says nothing more, and most of what is interpreted.

    Without a GPU Triton takes a few cases of each test, evenly spread, and all edge tables.
    """
    dropped = {item for item in items if not _runs_other_code(item)}
    tests = defaultdict(list)
    for item in items:
        if item not in dropped and hasattr(item, "callspec") and "triton" in item.callspec.id:
            tests[item.nodeid.split("[")[0]].append(item)
    for name, cases in tests.items():
        if torch.cuda.is_available() or any(part in name for part in WHOLE_TABLES):
            continue
        limit = 0 if any(part in name for part in LEFT_OUT) else CASES_PER_TEST
        limit = min(limit, 1) if "test_bit_identity" in name else limit
        kept = {len(cases) * i // limit for i in range(min(limit, len(cases)))}
        dropped |= {item for i, item in enumerate(cases) if i not in kept}
    paths = defaultdict(list)
    for item in items:
        name = _instruction_set_of(item)
        if hasattr(item, "callspec") and item.callspec.params.get("backend") == "reference":
            name = "reference"
        if name == "reference" and any(part in item.name for part in WHOLE_TABLES):
            continue
        if item not in dropped and name != INSTRUCTION_SETS[-1]:
            paths[item.nodeid.split("[")[0], name].append(item)
    for (_, name), cases in paths.items():
        most = CASES_OF_REFERENCE if name == "reference" else CASES_PER_PATH
        limit = min(most, len(cases))
        kept = {len(cases) * i // limit for i in range(limit)}
        dropped |= {item for i, item in enumerate(cases) if i not in kept}
    config.hook.pytest_deselected(items=list(dropped))
    items[:] = [item for item in items if item not in dropped]


def _runs_other_code(item: pytest.Item) -> bool:
    """Whether the test runs other code than the same test with the widest instruction set."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    name = _instruction_set_of(item)
    if name == INSTRUCTION_SETS[-1]:
        return True
    if params.get("backend", "cpu") != "cpu" or any(part in item.name for part in ONE_PATH):
        return False
    # Attention multiplies bfloat16, and products with packed weights multiply bytes.
    return name != "avx512" or "attention" in item.nodeid or "quantized" in item.nodeid


def _instruction_set_of(item: pytest.Item) -> str:
    params = item.callspec.params if hasattr(item, "callspec") else {}
    return params.get("instruction_set", INSTRUCTION_SETS[-1])
