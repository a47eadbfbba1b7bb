"""The layers: who may import whom, checked on the syntax trees of the sources."""

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KERNELS = ROOT / "kernels" / "fastspec_kernels"
ENGINE = ROOT / "fastspec"
OPTIONAL = {
    "accelerate",
    "datasets",
    "fastapi",
    "matplotlib",
    "prometheus_client",
    "ray",
    "triton",
    "uvicorn",
}
COMPILED = {"fastspec_kernels._cpu", "fastspec_kernels._cuda"}


def sources(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def label(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imports(path: Path) -> set[str]:
    """Every name the module imports, dotted."""
    root = KERNELS.parent if KERNELS in path.parents else ROOT
    return set(imported_names(path.read_text(), path.relative_to(root).parent.parts))


def imported_names(text: str, package: tuple[str, ...]) -> Iterator[str]:
    """Names in import statements, relative ones resolved, and compiled modules named in strings."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *([node.module] if node.module else [])))
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and node.value in COMPILED:
            yield node.value


def top_level(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imports(path)}


def test_kernels_know_neither_engine_nor_transformers():
    for path in sources(KERNELS):
        others = {"fastspec", "transformers", "tokenizers", "tests", "benchmarks"}
        assert not top_level(path) & others, label(path)


def test_reference_imports_only_torch():
    for path in sources(KERNELS / "reference"):
        assert top_level(path) <= {"torch", "typing", "fastspec_kernels"}, label(path)
        for name in imports(path):
            if name.startswith("fastspec_kernels"):
                assert name.startswith("fastspec_kernels.reference"), (label(path), name)


def test_only_the_triton_folder_imports_triton():
    for path in sources(KERNELS):
        if KERNELS / "triton" not in path.parents:
            assert "triton" not in top_level(path), label(path)


def test_one_module_touches_the_compiled_extensions():
    touching = [path for path in sources(KERNELS) if COMPILED & imports(path)]
    assert touching == [KERNELS / "library.py"]


def test_engine_calls_public_ops_only():
    for path in sources(ENGINE):
        assert not top_level(path) & {"tests", "benchmarks", "triton"}, label(path)
        for name in imports(path):
            assert not reaches_inside_the_kernels(name), (label(path), name)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr == "fastspec":
                assert ast.unparse(node) != "torch.ops.fastspec", label(path)


def reaches_inside_the_kernels(name: str) -> bool:
    package, *inside = name.split(".")
    if package != "fastspec_kernels" or not inside:
        return False
    is_module = (KERNELS / f"{inside[0]}.py").exists()
    return len(inside) > 1 or is_module or inside[0] in ("reference", "triton")


def test_optional_packages_are_imported_in_one_module():
    imported = {path: top_level(path) for path in sources(ENGINE) + sources(KERNELS)}
    for package in OPTIONAL - {"triton"}:
        users = [label(path) for path, names in imported.items() if package in names]
        assert len(users) <= 1, (package, users)


def test_kernels_folder_is_no_package():
    """A top-level package called `kernels` would hide Hugging Face's."""
    assert not (KERNELS.parent / "__init__.py").exists()


# A module imports from its own floor and those before it; `tools`, `train` and `hf` share one.
FLOORS = [
    ["config"],
    ["models"],
    ["drafters"],
    ["engine"],
    ["tools", "train", "hf"],
    ["serve"],
    ["cli", "compat", "__init__", "__main__"],
]


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def module_graph() -> dict[str, set[str]]:
    """The modules of fastspec that each of them imports."""
    known = {module_of(path) for path in sources(ENGINE)}
    graph = {}
    for path in sources(ENGINE):
        names = imports(path)
        used = {n for n in names if n in known} | {n.rpartition(".")[0] for n in names} & known
        graph[module_of(path)] = used - {module_of(path)}
    return graph


def floor_of(module: str) -> int:
    part = module.split(".")[1] if "." in module else "__init__"
    return next(number for number, folders in enumerate(FLOORS) if part in folders)


def test_no_import_runs_upwards():
    upwards = [
        f"{module} imports {used}"
        for module, uses in module_graph().items()
        for used in uses
        if used != "fastspec" and floor_of(used) > floor_of(module)
    ]
    assert upwards == []


def test_no_folders_import_each_other_in_a_circle():
    """Folders of one floor, and those inside a folder, import in one direction alone."""
    graph: dict[str, set[str]] = {}
    for module, uses in module_graph().items():
        if module != "fastspec":
            others = {used.split(".")[1] for used in uses if used != "fastspec"}
            graph.setdefault(module.split(".")[1], set()).update(others - {module.split(".")[1]})
    TopologicalSorter(graph).prepare()  # raises CycleError


def test_imported_names():
    text = """
import a.b
from c import d
def function():
    from . import e
    from .g import h
    from ..i import j
import_module("fastspec_kernels._cpu")
"""
    assert set(imported_names(text, ("fastspec", "serve"))) == {
        "a.b",
        "c.d",
        "fastspec.serve.e",
        "fastspec.serve.g.h",
        "fastspec.i.j",
        "fastspec_kernels._cpu",
    }
