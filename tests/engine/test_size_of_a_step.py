"""How much code one steady step of the engine goes through, so that a reader can hold it."""

import sys
from dataclasses import is_dataclass
from pathlib import Path

import pytest

import fastspec
from fastspec import Engine, SamplingParams

PACKAGE = str(Path(fastspec.__file__).parent)
PARAMS = SamplingParams(temperature=0, max_tokens=60)


def step_of(method: str) -> tuple[list[str], list[str]]:
    """Functions of fastspec/ entered in one step, comprehensions left out, and records made."""
    engine = Engine("tiny", spec=method)
    engine.add_request("def main(", PARAMS)
    for _ in range(4):
        engine.step()
    functions, records = set(), set()

    def note(frame, event, _):
        code = frame.f_code
        if event != "call":
            return
        if code.co_filename.startswith(PACKAGE) and not code.co_name.startswith("<"):
            place = Path(code.co_filename).relative_to(PACKAGE)
            functions.add(f"{place}:{code.co_firstlineno} {code.co_name}")
        elif code.co_name in ("__init__", "__new__"):  # generated, of a dataclass or NamedTuple
            first = frame.f_locals.get("self", frame.f_locals.get("_cls"))
            kind = first if isinstance(first, type) else type(first)
            is_record = is_dataclass(kind) or hasattr(kind, "_fields")
            if is_record and kind.__module__.startswith("fastspec."):
                records.add(kind.__name__)

    sys.setprofile(note)
    try:
        engine.step()
    finally:
        sys.setprofile(None)
    return sorted(functions), sorted({*records, "EngineRequest"})


@pytest.mark.parametrize(
    ("method", "most"), [("none", 40), ("draft_model", 50), ("tree", 70)], ids=str
)
def test_a_step_enters_few_functions(method, most):
    functions, records = step_of(method)
    print(f"{method}: {len(functions)} functions, {len(records)} records: {records}", *functions)
    assert len(functions) <= most, functions
    assert len(records) <= 7, records
