"""Fills Triton's cache by many processes, so that the steps after it wait for no compiler."""

import subprocess
import sys

from benchmarks.gpu import options
from benchmarks.gpu.steps import UNFINISHED, WORKERS


def main() -> int:
    """Run the checks of the small shapes, a part of them in each process."""
    arguments = options.parser(__doc__).parse_args()
    command = [sys.executable, "-m", "benchmarks.gpu.small_shapes", *sys.argv[1:]]
    num = 1 if arguments.dry_run else WORKERS
    backend = [] if arguments.dry_run else ["--backend", "triton"]
    parts = [
        subprocess.Popen([*command, *backend, "--part", str(part), str(num)]) for part in range(num)
    ]
    statuses = [part.wait() for part in parts]
    print(f"{statuses.count(0)} of {num} parts", flush=True)
    if any(status not in (0, UNFINISHED) for status in statuses):
        return 1
    return UNFINISHED if any(statuses) else 0


if __name__ == "__main__":
    sys.exit(main())
