"""Where a measurement was made: machine, versions and commit."""

import datetime
import platform
import subprocess
from pathlib import Path

import torch
import transformers

import fastspec
from fastspec_kernels import cpu_instruction_set

ROOT = Path(fastspec.__file__).resolve().parents[1]


def describe_environment() -> dict:
    """Machine, versions and commit as plain JSON values; what cannot be found out is None."""
    status = _git("status", "--porcelain", "--untracked-files=no")
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "--short=12", "HEAD"),
        "dirty": None if status is None else bool(status),
        "cpu": cpu_model(),
        "cpu_instruction_set": cpu_instruction_set(),
        "threads": torch.get_num_threads(),
        "fastspec": fastspec.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def cpu_model() -> str | None:
    """The processor's name as the system gives it."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine() or None


def _git(*arguments: str) -> str | None:
    """Output of git in the checkout that this package runs from, if it is one."""
    if not (ROOT / ".git").exists():
        return None
    try:
        result = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return result.stdout.strip()
