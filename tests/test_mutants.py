"""The table of mutations fits the sources."""

import pytest

from .mutants import ROOT, mutated, name_of
from .mutations import MUTATIONS


@pytest.mark.parametrize("mutation", MUTATIONS, ids=name_of)
def test_a_mutation_applies(mutation):
    text = (ROOT / mutation.file).read_text()
    assert mutated(text, mutation) != text
    names = [name for name in mutation.tests.split() if name.startswith("tests/")]
    assert names
    assert all((ROOT / name).exists() for name in names)


def test_there_are_enough():
    assert len(MUTATIONS) == len(set(MUTATIONS)) >= 40
