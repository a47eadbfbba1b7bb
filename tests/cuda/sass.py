"""Loops and straight pieces of machine code, as nvdisasm prints it, and how long they are."""

import re
from collections.abc import Callable

CONVERSIONS = re.compile(r"\b(?:MUFU|F2I|I2F|F2F)\b")
_WORTH = 10**6  # of one wanted instruction; no piece has as many


def is_instruction(line: str) -> bool:
    return line.startswith("/*") and "NOP" not in line


def branch_target(line: str) -> str:
    """The label, or nothing."""
    match = re.search(r"\bBRA\b.*`\((\.L_x_\d+)\)", line)
    return f"{match[1]}:" if match else ""


def straight_pieces(lines: list[str]) -> list[list[str]]:
    """From label to label."""
    pieces = re.split(r"\n\.L_x_\d+:\n", "\n".join(lines))
    return [piece.splitlines() for piece in pieces]


def inner_loops(lines: list[str]) -> list[list[str]]:
    """From the label that a loop begins with to the branch back there."""
    places = {line: i for i, line in enumerate(lines) if line.endswith(":")}
    ends = [(places.get(branch_target(line), len(lines)), i) for i, line in enumerate(lines)]
    loops = [(begin, end) for begin, end in ends if begin <= end]
    return [
        lines[begin : end + 1]
        for begin, end in loops
        if not any(begin <= b and e <= end and (b, e) != (begin, end) for b, e in loops)
    ]


def longest_round(loop: list[str]) -> int:
    """The instructions of a round of a loop, whichever way it takes from branch to branch."""
    return _best_round(loop, is_instruction)


def _best_round(loop: list[str], worth: Callable[[str], int]) -> int:
    """The worth of the lines on the best way through a round."""
    places = {line: i for i, line in enumerate(loop) if line.endswith(":")}
    nothing = -_WORTH * len(loop)
    best = [nothing] * len(loop)
    best[-1] = worth(loop[-1])
    for i in reversed(range(len(loop) - 1)):
        ways = [i + 1]
        if target := branch_target(loop[i]):
            conditional = "@" in loop[i] or re.search(r"BRA\s+!?U?P\d", loop[i])
            ways = ways if conditional else []
            ways += [place for place in [places.get(target, 0)] if place > i]
        best[i] = worth(loop[i]) + max((best[j] for j in ways), default=nothing)
    return best[0]


def region(lines: list[str], wanted: str) -> dict[str, int]:
    """The loop or piece with most instructions of a kind: its cost, on the way through most of
    them that has the fewest others.

    `loads`: of 16 bytes, `conversions`: all that the converters do; both of all ways together.
    """
    pattern = re.compile(wanted)

    def is_wanted(line: str) -> bool:
        return pattern.search(line) is not None

    found = []
    for loop in inner_loops(lines):
        worth = _best_round(loop, lambda line: _WORTH * is_wanted(line) - is_instruction(line))
        if worth > 0:
            found.append((sum(map(is_wanted, loop)), -(-worth % _WORTH), loop))
    for piece in straight_pieces(lines):
        found.append((sum(map(is_wanted, piece)), -sum(map(is_instruction, piece)), piece))
    _, cost, body = max(found, key=lambda item: item[:2])
    return {
        "instructions": -cost,
        "conversions": sum(CONVERSIONS.search(line) is not None for line in body),
        "loads": sum("LDG.E.128" in line for line in body),
    }
