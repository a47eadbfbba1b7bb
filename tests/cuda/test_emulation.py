"""The emulation finds the faults that it is there to find."""

import ctypes

import pytest

from . import emulated
from .emulated import Limits, chosen_plan, has_clusters

pytestmark = pytest.mark.skipif(emulated.COMPILER is None, reason="no C++ compiler found")

FAULTS = [
    "deadlock: block 0 thread 0 waits in __syncthreads",
    "deadlock: block 0 thread 0 waits in the barrier of the cluster",
    "while others are in",
    "a part of a warp",
    "a write past the end of shared memory",
    "shared memory of a block that is ending",
]
H200 = Limits(132, 227 * 1024, True)
A100 = Limits(108, 163 * 1024, False)
RTX_PRO_6000 = Limits(188, 99 * 1024, True)


def fault(number: int, order: int = 0) -> tuple[int, str]:
    message = ctypes.create_string_buffer(4096)
    function = emulated.library().emulated_fault
    function.argtypes = [ctypes.c_int, ctypes.c_uint64, ctypes.c_char_p, ctypes.c_int]
    return function(number, order, message, len(message)), message.value.decode()


@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.parametrize("number", range(len(FAULTS)))
def test_misuse_is_reported(number, order):
    if number == 5 and order == 1:
        pytest.skip("the block that ends early runs last: nothing to find in this order")
    assert FAULTS[number].split(" block")[0] in fault(number, order)[1]


def test_races_show_as_results_that_depend_on_the_order():
    assert len({fault(6, order)[0] for order in range(4)}) > 1


def test_shared_memory_starts_poisoned():
    assert fault(7)[0] == 0xFF


@pytest.mark.parametrize(
    ("size", "element_bytes", "num_rows", "limits", "cluster", "threads", "staged"),
    [
        (128256, 2, 1, H200, 8, 512, 1),
        (128256, 2, 16, H200, 8, 512, 1),
        (128256, 2, 40, H200, 4, 256, 1),
        (128256, 2, 64, H200, 4, 256, 1),
        (128256, 2, 66, H200, 2, 512, 1),
        (128256, 2, 256, H200, 4, 256, 1),
        (128256, 4, 64, H200, 8, 256, 1),
        (32000, 2, 256, H200, 1, 256, 1),
        (262144, 4, 256, H200, 8, 512, 1),
        (2000000, 4, 256, H200, 8, 512, 0),
        (128256, 2, 1, A100, 1, 512, 0),
        (32000, 4, 1, A100, 1, 512, 1),
        (128256, 2, 1, RTX_PRO_6000, 8, 512, 1),
        (128256, 2, 256, RTX_PRO_6000, 8, 256, 1),
        (128256, 4, 256, RTX_PRO_6000, 8, 512, 1),
        (262144, 2, 256, RTX_PRO_6000, 8, 512, 1),
        (262144, 4, 256, RTX_PRO_6000, 8, 512, 0),
    ],
)
def test_plan(size, element_bytes, num_rows, limits, cluster, threads, staged):
    plan = chosen_plan(size, element_bytes, num_rows, limits)
    assert (plan.cluster, plan.threads, plan.staged) == (cluster, threads, staged)


@pytest.mark.parametrize(
    ("ptx_version", "binary_version", "device_major", "expected"),
    [
        (80, 80, 8, False),
        (80, 90, 9, False),  # compiled by the driver, of code without a barrier between blocks
        (80, 120, 12, False),
        (90, 90, 9, True),
        (90, 100, 10, True),  # compiled by the driver
        (100, 100, 10, True),
        (120, 120, 12, True),
        (90, 90, 8, False),
    ],
)
def test_blocks_share_rows_only_where_device_and_code_can(
    ptx_version, binary_version, device_major, expected
):
    assert has_clusters(ptx_version, binary_version, device_major) is expected
