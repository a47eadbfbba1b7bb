"""The kit judges any verifier, so it must not lean on the kernels that it judges."""

import ast
import sys
from pathlib import Path

import pytest

import fastspec_kernels.testing

FOLDER = Path(fastspec_kernels.testing.__file__).parent
ALLOWED = {"torch", "numpy", *sys.stdlib_module_names}


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_imports(path):
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            names.add(node.module)
    for name in names:
        own = name == "fastspec_kernels.testing" or name.startswith("fastspec_kernels.testing.")
        assert own or name.split(".")[0] in ALLOWED, name


def test_everything_exported_is_there():
    for name in fastspec_kernels.testing.__all__:
        assert getattr(fastspec_kernels.testing, name).__doc__, name
