"""The steps of the GPU run, in order. A new step is one more entry in STEPS."""

import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
UNFINISHED = 3  # exit status of a step that stopped at its deadline with work left
SANITIZER_ERROR = 9
# Processes that compile and test, each with a context of its own on the GPU.
WORKERS = max(2, min(10, (os.cpu_count() or 2) - 2))


@dataclass(frozen=True)
class Context:
    """What a step may ask about the run; `until`, in seconds since the epoch, is its deadline."""

    out: Path
    dry_run: bool
    until: float = 0.0
    capability: str = ""


@dataclass(frozen=True)
class Command:
    """A subprocess, or the reason why there is none."""

    arguments: list[str]
    environment: dict[str, str]
    skipped: str = ""


@dataclass(frozen=True)
class Step:
    """`share`: the part of all minutes that the step may take at most.

    A step keeps its own progress in the output folder where it can be continued. `again` tells how
    to forget it: the names of files in that folder.
    """

    name: str
    share: float
    command: Callable[[Context], Command]
    progress: tuple[str, ...] = ()


def module(name: str, *arguments: str) -> Callable[[Context], Command]:
    """`python -m benchmarks.gpu.NAME` with the options that all such modules take."""

    def command(context: Context) -> Command:
        dry = ["--dry-run"] if context.dry_run else []
        options = ["--out", str(context.out), "--until", f"{context.until:.0f}", *dry]
        return python("-m", f"benchmarks.gpu.{name}", *options, *arguments)

    return command


def python(*arguments: str, **environment: str) -> Command:
    return Command([sys.executable, *arguments], environment)


def build(context: Context) -> Command:
    """Compile for this GPU only, which takes a fraction of the time; a dry run compiles nothing."""
    if context.dry_run:
        return python("setup.py", "--quiet", "--version", FASTSPEC_BUILD_CUDA="0")
    archs = os.environ.get("TORCH_CUDA_ARCH_LIST") or context.capability
    return python(
        "setup.py",
        "build_ext",
        "--inplace",
        FASTSPEC_BUILD_CUDA="1",
        TORCH_CUDA_ARCH_LIST=archs,
    )


def pytest(*arguments: str) -> Callable[[Context], Command]:
    """In parallel where pytest-xdist is installed: most of the time is Triton's compiler's."""
    parallel = ["--numprocesses", str(WORKERS), "--dist", "worksteal"] if find_spec("xdist") else []

    def command(context: Context) -> Command:
        return python("-m", "pytest", "-q", "-p", "no:cacheprovider", *parallel, *arguments)

    return command


def gpu_tests(context: Context) -> Command:
    """The tests that need a GPU, of the folders that need no further packages; in a dry run one
    folder, to see them skipped."""
    more = [] if context.dry_run else ["tests/kernels", "tests/triton/test_products.py"]
    folders = ["tests/gpu", *more]
    return pytest("-m", "gpu", *folders)(context)


def kernel_tests(context: Context) -> Command:
    """The tests of all backends choose those of the GPU by the backend's name in the test's id."""
    if context.dry_run:
        return Command([], {}, skipped="a dry run has no GPU backends")
    return pytest("tests/kernels", "-k", "cuda or triton")(context)


def sanitizer(tool: str, backend: str) -> Callable[[Context], Command]:
    """The small shapes under one tool; allocations go to the driver, so that it sees each of them.

    A dry run calls the small shapes once, without a tool.
    """

    def command(context: Context) -> Command:
        if context.dry_run:
            if (tool, backend) == ("memcheck", "cuda"):
                return module("small_shapes")(context)
            return Command([], {}, skipped="a dry run goes through the small shapes once")
        path = find_sanitizer()
        if path is None:
            return Command([], {}, skipped="no compute-sanitizer on PATH or in CUDA_HOME")
        options = ["--tool", tool, "--error-exitcode", str(SANITIZER_ERROR)]
        small = module("small_shapes", "--backend", backend)(context).arguments
        return Command([path, *options, *small], {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})

    return command


def find_sanitizer() -> str | None:
    folders = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"]
    extra = os.pathsep.join(str(Path(folder, "bin")) for folder in folders if folder)
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=extra)


# What would be worst if wrong comes first; benchmarks/gpu/README.md says what to look at.
STEPS = (
    Step("machine", 0.1, module("machine")),
    Step("build", 0.4, build),
    Step("compile", 0.25, module("compile")),
    Step("tests", 0.25, gpu_tests),
    Step("memcheck-triton", 0.12, sanitizer("memcheck", "triton")),
    Step("memcheck", 0.12, sanitizer("memcheck", "cuda")),
    Step("caches", 0.15, module("caches"), ("caches.progress",)),
    Step("headline", 0.25, module("bench", "--group", "headline"), ("headline.progress",)),
    Step("breakdown", 0.15, module("breakdown"), ("breakdown.progress",)),
    Step("engine", 0.3, module("engine"), ("engine.progress",)),
    Step("racecheck-triton", 0.1, sanitizer("racecheck", "triton")),
    Step("racecheck", 0.12, sanitizer("racecheck", "cuda")),
    Step("initcheck", 0.1, sanitizer("initcheck", "cuda")),
    Step("synccheck", 0.1, sanitizer("synccheck", "cuda")),
    Step("kernel-tests", 0.3, kernel_tests),
    Step("bench", 1.0, module("bench", "--group", "all"), ("all.progress",)),
)
REPORT = Step("report", 0.0, module("report"))  # always runs, last
