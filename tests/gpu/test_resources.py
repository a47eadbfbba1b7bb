"""benchmarks/gpu/resources.json is what the compilers say now."""

import pytest

pytest.importorskip("triton.backends.nvidia", reason="Triton's NVIDIA backend is not installed")

from benchmarks.gpu.resource_model import load
from tests.cuda.test_compile import find_nvcc, find_nvdisasm
from tests.gpu import resources
from tests.triton import test_compile, test_compile_attention

pytestmark = pytest.mark.check
KERNELS = load()["kernels"]


def require_the_same(compiler: str) -> None:
    here, known = resources.compilers()[compiler], load()[compiler]
    if here != known:
        pytest.skip(f"the numbers are of {compiler} {known}, here is {here}")


@pytest.mark.skipif(not (find_nvcc() and find_nvdisasm()), reason="no nvcc or no nvdisasm")
def test_of_cuda():
    require_the_same("nvcc")
    found = resources.of_cuda()
    assert found == {name: KERNELS[name] for name in found}


def test_of_triton():
    require_the_same("triton")
    found = resources.of_attention(test_compile_attention.compile_all(90))
    others = resources.of_others(test_compile.compile_all(90))
    found["match_suffix"] = others.pop("match_suffix_kernel")
    assert others == load()["others"]
    assert found == {name: KERNELS[name] for name in found}
    assert set(KERNELS) == {*found, *resources.CUDA}
