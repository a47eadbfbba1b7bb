"""Build the two extensions of fastspec_kernels; everything else is in pyproject.toml.

`_cpu` needs a C++17 compiler and `_cuda` needs nvcc (CUDA_HOME). Both use libtorch's stable ABI, so one
build serves every torch from 2.11 on, and `_cuda` can be built beside a CPU-only torch.
FASTSPEC_BUILD_CUDA = auto (build when a toolkit and a CUDA torch are there) | 1 (must) | 0 (never).
"""

import os
import platform
import shutil
import subprocess
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

TORCH_TARGET_VERSION = "-DTORCH_TARGET_VERSION=0x020b000000000000"  # torch 2.11
ISA_FLAGS = {
    "isa_avx2": ["-mavx2", "-mfma", "-mf16c"],
    "isa_avx512": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c"],
}
CUDA_ARCHS = ("80", "90a", "100")


class BuildExt(build_ext):
    """Adds vector flags by file name, and the rule for .cu files that torch hides on CPU builds."""

    def build_extensions(self):
        compiler = self.compiler
        compiler.src_extensions.append(".cu")
        compile_cpp = compiler._compile

        def compile_one(obj, src, ext, cc_args, extra_postargs, pp_opts):
            if ext == ".cu":
                command = [nvcc(), "-c", src, "-o", obj, *pp_opts, *nvcc_flags()]
                compiler.spawn(command)
                return
            is_x86 = platform.machine().lower() in {"x86_64", "amd64"}
            isa_flags = ISA_FLAGS.get(Path(src).stem, []) if is_x86 else []
            compile_cpp(obj, src, ext, cc_args, [*extra_postargs, *isa_flags], pp_opts)

        compiler._compile = compile_one
        super().build_extensions()


def nvcc() -> str:
    home = os.environ.get("CUDA_HOME")
    return str(Path(home) / "bin" / "nvcc") if home else (shutil.which("nvcc") or "")


def nvcc_flags() -> list[str]:
    archs = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in CUDA_ARCHS]
    return ["-O3", "-std=c++17", "-lineinfo", "-Xcompiler=-fPIC", *archs]


def extension(name: str, sources: list[Path], **arguments) -> Extension:
    import torch
    from torch.utils.cpp_extension import include_paths

    lib_dir = str(Path(torch.__file__).parent / "lib")
    return Extension(
        f"fastspec_kernels.{name}",
        sources=[str(source) for source in sorted(sources)],
        depends=[str(header) for suffix in ("h", "inl", "cuh") for header in Path("csrc").rglob(f"*.{suffix}")],
        include_dirs=["csrc", *include_paths(), *arguments.pop("include_dirs", [])],
        library_dirs=[lib_dir, *arguments.pop("library_dirs", [])],
        libraries=["torch", "torch_cpu", "c10", *arguments.pop("libraries", [])],
        extra_compile_args=["-O3", "-std=c++17", "-fvisibility=hidden", TORCH_TARGET_VERSION],
        extra_link_args=["-Wl,--as-needed"] if platform.system() == "Linux" else [],
        py_limited_api=True,
        **arguments,
    )


def cpu_extension() -> Extension:
    return extension("_cpu", [Path("csrc/bindings_cpu.cpp"), *Path("csrc/cpu").glob("*.cpp")])


setup(
    package_dir={"fastspec_kernels": "kernels/fastspec_kernels"},
    packages=[*find_packages(include=["fastspec*"]), *find_packages("kernels")],
    ext_modules=[cpu_extension()],
    cmdclass={"build_ext": BuildExt},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
