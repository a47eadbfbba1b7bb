"""Faults put into the sources one at a time: does a test see each of them?

`python -m tests.mutants` copies the tree once for each kind of source to a temporary folder,
applies one mutation of `tests/mutations.py` after the other, compiles again what that needs (one
object file), runs the tests that should catch it, and says which were killed and which survived.
The exit status is 1 if one survived or did not apply. `--only REGEX` takes some, `--list` names
them.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from .mutations import MUTATIONS, Mutation

ROOT = Path(__file__).parents[1]
COPIED = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "csrc", "kernels", "fastspec",
          "tests", "benchmarks")  # fmt: skip
SECONDS = 300  # that tests may take; a mutant that never ends is seen, too
ROWS = ("rows.inl", "simd_exp2.h", "simd_philox.h")  # in rows_*.cpp, other vector code in isa_*.cpp


def kind_of(mutation: Mutation) -> str:
    """Which copy of the tree it goes to: csrc/cuda is compiled by its own tests."""
    return "cpu" if mutation.file.startswith("csrc/cpu/") else "python"


def name_of(mutation: Mutation) -> str:
    line = " ".join(mutation.new.split()) or "(removed)"
    return f"{mutation.file}: {line[:60]}"


def object_of(mutation: Mutation) -> str:
    """The one object file that is compiled again; of vector code that of the tested path."""
    path = Path(mutation.file)
    if path.suffix == ".cpp":
        return f"csrc/cpu/{path.stem}.o"
    path_name = mutation.path if mutation.path in {"portable", "avx2"} else "avx512"
    return f"csrc/cpu/{'rows' if path.name in ROWS else 'isa'}_{path_name}.o"


class Tree:
    """A copy of the sources in which one file at a time is changed."""

    def __init__(self, folder: Path, kind: str):
        self.folder, self.kind = folder, kind
        folder.mkdir(parents=True)
        ignored = shutil.ignore_patterns("__pycache__", ".pytest_cache")
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, folder / name, ignore=ignored)
            else:
                shutil.copy2(ROOT / name, folder / name)
        if kind == "cpu":
            if (ROOT / "build").exists():  # times are kept, so what is up to date stays so
                shutil.copytree(ROOT / "build", folder / "build")
            self._build()

    def kills(self, mutation: Mutation) -> bool:
        """Whether a test fails; ValueError if the mutation does not apply."""
        source = self.folder / mutation.file
        text, times = source.read_text(), source.stat()
        source.write_text(mutated(text, mutation))
        try:
            if self.kind == "cpu":
                return self._rebuilt(mutation, source, times)
            return self._fails(mutation)
        finally:
            source.write_text(text)
            os.utime(source, ns=(times.st_atime_ns, times.st_mtime_ns))

    def _rebuilt(self, mutation: Mutation, source: Path, times: os.stat_result) -> bool:
        """With the source's old time, only the object that is missing is compiled."""
        os.utime(source, ns=(times.st_atime_ns, times.st_mtime_ns))
        of_each_torch = self.folder.glob(f"build/*/objects/{object_of(mutation)}")
        built = max(of_each_torch, key=lambda path: path.stat().st_mtime)
        libraries = self.folder.rglob("_cpu.abi3.so")  # one beside the objects, one in its package
        kept = [(path, path.with_suffix(".kept")) for path in (built, *libraries)]
        for path, copy in kept:
            path.rename(copy)
        try:
            self._build()
            if not built.exists():
                raise ValueError(f"{built.name} was not compiled")
            return self._fails(mutation)
        finally:
            for path, copy in kept:
                copy.replace(path)

    def _build(self) -> None:
        command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
        self._run(command, {"FASTSPEC_BUILD_CUDA": "0"}, check=True)

    def _fails(self, mutation: Mutation) -> bool:
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider"]
        command += ["-m", "check or not check"]
        settings = {"FASTSPEC_CPU_ISA": mutation.path} if mutation.path else {}
        try:
            done = self._run([*command, *mutation.tests.split()], settings)
        except subprocess.TimeoutExpired:
            return True
        if done.returncode in {2, 3, 4, 5} and "error" not in done.stdout.lower():
            raise ValueError(f"no test ran: {done.stdout[-300:]}")
        return done.returncode != 0

    def _run(self, command: list[str], settings: dict[str, str], check: bool = False):
        paths = os.pathsep.join([str(self.folder), str(self.folder / "kernels")])
        env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **settings}
        env["PYTHONDONTWRITEBYTECODE"] = "1"  # a source of the same size and second is not reread
        return subprocess.run(
            command, cwd=self.folder, env=env, text=True, check=check, timeout=SECONDS,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip


def mutated(text: str, mutation: Mutation) -> str:
    """The text with the fault; ValueError unless the old text is there exactly once."""
    if text.count(mutation.old) != 1:
        raise ValueError(f"{mutation.file}: {text.count(mutation.old)} times {mutation.old!r}")
    return text.replace(mutation.old, mutation.new)


def paths_here() -> list[str]:
    """The instruction sets that can be tested."""
    code = "import torch, fastspec_kernels; print(*torch.ops.fastspec.cpu_instruction_sets())"
    env = {**os.environ, "PYTHONPATH": str(ROOT / "kernels")}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    return done.stdout.split()


def outcome_of(mutation: Mutation, tree: Tree, paths: list[str]) -> str:
    if mutation.path and mutation.path not in paths:
        return "not on this processor"
    try:
        return "killed" if tree.kills(mutation) else "SURVIVED"
    except subprocess.CalledProcessError as error:
        return f"DID NOT COMPILE {error.stdout[-300:]}"
    except ValueError as error:
        return f"DID NOT APPLY {error}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", metavar="REGEX", help="mutations that match")
    parser.add_argument("--list", action="store_true", help="name them and end")
    options = parser.parse_args()
    chosen = [m for m in MUTATIONS if re.search(options.only, f"{name_of(m)} {m.tests}")]
    if options.list:
        print("\n".join(map(name_of, chosen)))
        return 0
    paths, outcomes = paths_here(), Counter()
    with tempfile.TemporaryDirectory() as folder:
        trees = {}
        for number, mutation in enumerate(chosen, start=1):
            kind, start = kind_of(mutation), time.monotonic()
            if kind not in trees:
                trees[kind] = Tree(Path(folder, kind), kind)
            outcome = outcome_of(mutation, trees[kind], paths)
            outcomes[outcome.split(" ")[0]] += 1
            seconds = time.monotonic() - start
            line = f"{number}/{len(chosen)} {outcome} {name_of(mutation)} {seconds:.0f} s"
            print(line, flush=True)
    print(*(f"{count} {outcome}" for outcome, count in outcomes.items()), sep=", ")
    return 1 if outcomes["SURVIVED"] or outcomes["DID"] else 0


if __name__ == "__main__":
    sys.exit(main())
