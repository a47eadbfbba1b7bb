"""The options that every step's own program takes."""

import argparse
import time
from pathlib import Path


class Deadline:
    """How long a step may still work."""

    def __init__(self, seconds: float):
        self.end = time.monotonic() + seconds

    def remaining(self) -> float:
        return self.end - time.monotonic()


def parser(description: str | None) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--out", type=Path, required=True, help="folder of the results")
    made.add_argument("--seconds", type=float, default=600.0, help="stop in time for this")
    made.add_argument("--dry-run", action="store_true", help="on the CPU, tiny shapes")
    return made
