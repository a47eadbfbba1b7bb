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
        else:  # what dataclasses and NamedTuples generate has no file
            kind = frame.f_locals.get("_cls") or type(frame.f_locals.get("self"))
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
    ("method", "most", "most_records"),
    [
        ("none", 41, 7),
        ("draft_model", 51, 7),
        ("tree", 71, 7),
        ("glide", 60, 9),  # a draft model, what it sees of the target, and its configuration
        ("cascade", 76, 10),  # two drafters that review each other
    ],
    ids=str,
)
def test_a_step_enters_few_functions(method, most, most_records):
    functions, records = step_of(method)
    print(f"{method}: {len(functions)} functions, {len(records)} records: {records}", *functions)
    assert len(functions) <= most, functions
    assert len(records) <= most_records, records
