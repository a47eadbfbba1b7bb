"""The options that every step's own program takes."""

import argparse
import math
import time
from pathlib import Path


def seconds_left(arguments: argparse.Namespace) -> float:
    return arguments.until - time.time()


def parser(description: str | None) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--out", type=Path, required=True, help="folder of the results")
    made.add_argument(
        "--until", type=float, default=math.inf, help="stop by then, in seconds since the epoch"
    )
    made.add_argument("--dry-run", action="store_true", help="on the CPU, tiny shapes")
    return made
