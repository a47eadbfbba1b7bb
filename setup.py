"""Build the extensions of fastspec_kernels; everything else is in pyproject.toml.

`_cpu` and `_cuda` use libtorch's stable ABI: one build serves every torch from 2.11 on, and `_cuda`
builds beside a CPU torch. torch is never imported here, only its headers and version file are read.
FASTSPEC_BUILD_CUDA = auto (build when nvcc and a CUDA torch are there) | 1 (must) | 0 (never).
"""

import os
import platform
import re
import shutil
import site
import subprocess
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.modified import newer_group

BUILD_CUDA = os.environ.get("FASTSPEC_BUILD_CUDA", "auto")
CUDA_ARCHS = os.environ.get("TORCH_CUDA_ARCH_LIST") or "8.0;9.0+PTX;10.0;12.0"
TORCH_2_11 = "-DTORCH_TARGET_VERSION=0x020b000000000000"
NVCC_FLAGS = ["-O3", "-std=c++17", "-lineinfo", "-Icsrc", "-Xcompiler=-fPIC,-fvisibility=hidden"]
ISA_FLAGS = {
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "avx512": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c"],
}


def find_torch() -> tuple[Path, str] | None:
    """Folder and version.py of this interpreter's torch >= 2.11, else (pip's isolated build) of the
    environment that is installed into."""
    spec = find_spec("torch")
    here = [Path(spec.origin).parent] if spec and spec.origin else []
    roots = [*site.getsitepackages([sys.prefix, sys.base_prefix]), site.getusersitepackages()]
    for folder in here or [Path(root, "torch") for root in roots]:
        text = (folder / "version.py").read_text() if (folder / "version.py").exists() else ""
        version = re.search(r"__version__ = '(\d+)\.(\d+)", text)
        if version and (int(version[1]), int(version[2])) >= (2, 11):
            return folder, text
    return None


def find_cuda() -> Path | None:
    """The CUDA toolkit: CUDA_HOME, else the root that nvcc on PATH, perhaps a wrapper, reports."""
    if home := os.environ.get("CUDA_HOME"):
        return Path(home) if Path(home, "bin", "nvcc").exists() else None
    dry_run = [shutil.which("nvcc") or "true", "--dryrun", "-E", "-x", "cu", os.devnull]
    root = re.search("TOP=(.*)", subprocess.run(dry_run, capture_output=True, text=True).stderr)
    return Path(root[1]).resolve() if root else None


def arch_flags() -> list[str]:
    flags = []
    for arch in re.split("[; ]+", CUDA_ARCHS.replace(".", "")):
        name = arch.removesuffix("+PTX")
        code = f"sm_{name}" if name == arch else f"[sm_{name},compute_{name}]"
        flags.append(f"-gencode=arch=compute_{name},code={code}")
    return flags


class BuildPy(build_py):
    def run(self):
        if not self.editable_mode:  # a file deleted since the last build must not reach the wheel
            shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


class BuildExt(build_ext):
    """Compiles in parallel and only what changed: .cu by nvcc, *_avx2.cpp with vector flags."""

    def finalize_options(self):
        super().finalize_options()
        self.build_temp = f"{BUILD}/objects"  # an editable build would take a new folder

    def build_extensions(self):
        self.compiler.src_extensions.append(".cu")
        self.compile_cpp, self.compiler.compile = self.compiler.compile, self.compile_all
        super().build_extensions()

    def compile_all(self, sources, **options) -> list[str]:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return list(pool.map(lambda source: self.compile_one(source, **options), sources))

    def compile_one(self, source, output_dir, depends, extra_postargs, **options) -> str:
        [obj] = self.compiler.object_filenames([source], output_dir=output_dir)
        if not (self.force or newer_group([source, *depends], obj)):
            return obj
        if source.endswith(".cu"):
            Path(obj).parent.mkdir(parents=True, exist_ok=True)
            nvcc = str(find_cuda() / "bin" / "nvcc")
            self.spawn([nvcc, *NVCC_FLAGS, *arch_flags(), "-c", source, "-o", obj])
        else:
            isa = Path(source).stem.rpartition("_")[2] if platform.machine() == "x86_64" else ""
            flags = [*extra_postargs, *ISA_FLAGS.get(isa, [])]
            self.compile_cpp([source], output_dir, depends=depends, extra_postargs=flags, **options)
        return obj


def extension(device: str, roots: list[Path], **options) -> Extension:
    own = [*Path("csrc").glob(f"bindings_{device}*.cpp"), *Path("csrc", device).iterdir()]
    headers = [path for path in Path("csrc").rglob("*") if path.suffix in {".h", ".inl", ".cuh"}]
    return Extension(
        f"fastspec_kernels._{device}",
        sources=sorted(str(path) for path in own if path.suffix in {".cpp", ".cu"}),
        depends=["setup.py", *map(str, headers)],
        include_dirs=["csrc", *(f"{root}/include" for root in roots)],
        library_dirs=[f"{root}/{lib}" for root in roots for lib in ("lib", "lib64")],
        extra_compile_args=["-O3", "-g0", "-std=c++17", "-fvisibility=hidden", TORCH_2_11],
        py_limited_api=True,
        **options,
    )


def extensions() -> list[Extension]:
    if BUILD_CUDA not in {"auto", "0", "1"}:
        raise SystemExit(f"FASTSPEC_BUILD_CUDA: expected auto, 1 or 0, got {BUILD_CUDA!r}")
    must, found = BUILD_CUDA == "1", find_torch()
    if sys.platform == "win32" or not found:
        reason = "they need Linux or macOS, and torch >= 2.11 in this environment before fastspec"
        if must:
            raise SystemExit(f"FASTSPEC_BUILD_CUDA=1: no compiled kernels: {reason}")
        print(f"fastspec: pure Python, NO COMPILED KERNELS: {reason}", file=sys.stderr)
        return []
    torch, version = found
    built = [extension("cpu", [torch], libraries=["torch_cpu", "c10"])]
    if must or (BUILD_CUDA == "auto" and re.search(r"\ncuda\b.*= *'", version)):
        if toolkit := find_cuda():
            libraries = ["torch_cpu", "c10", "cudart_static", "dl", "rt", "pthread"]
            cuda = extension("cuda", [torch, toolkit], libraries=libraries)
            cuda.define_macros = [("USE_CUDA", None), ("FASTSPEC_CUDA_ARCHS", f'"{CUDA_ARCHS}"')]
            # libtorch.so has no symbols of its own, but brings libtorch_cuda.so in when loaded.
            cuda.extra_link_args = ["-Wl,--no-as-needed", "-ltorch"]
            built.append(cuda)
        elif must:
            raise SystemExit("FASTSPEC_BUILD_CUDA=1: no nvcc in CUDA_HOME or on PATH")
    return built


if sys.platform == "darwin":  # a universal Python would compile AVX code for arm64 as well
    os.environ.setdefault("ARCHFLAGS", f"-arch {platform.machine()}")
SETTINGS = repr((platform.machine(), sys.platform, find_torch(), CUDA_ARCHS, os.environ.get("CXX")))
BUILD = f"build/{zlib.crc32(SETTINGS.encode()):08x}"  # other settings never reuse these objects

setup(
    package_dir={"fastspec_kernels": "kernels/fastspec_kernels"},
    packages=[*find_packages(include=["fastspec*"]), *find_packages("kernels")],
    ext_modules=extensions(),
    cmdclass={"build_ext": BuildExt, "build_py": BuildPy},
    options={"bdist_wheel": {"py_limited_api": "cp310"}, "build": {"build_lib": f"{BUILD}/lib"}},
)
