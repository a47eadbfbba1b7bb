"""Text of the bundled models: CPython's standard library and its documentation sources."""

import hashlib
import sysconfig
from pathlib import Path
from typing import NamedTuple

LICENSE = "PSF-2.0"
HELD_OUT_PER_1000 = 20
# Generated tables and fixtures teach nothing, pydoc_data repeats the documentation.
EXCLUDED_FOLDERS = frozenset(
    {"site-packages", "test", "tests", "idle_test", "lib2to3", "ensurepip", "encodings"}
    | {"pydoc_data", "__pycache__"}
)
EXCLUDED_PREFIXES = ("_sysconfigdata", "config-")


class Document(NamedTuple):
    """One file of the corpus: `source` is `lib/…` or `doc/…`, stable across machines."""

    source: str
    text: str


def is_held_out(source: str) -> bool:
    """Says whether a file is kept from training: a hash of its path picks about 2 %."""
    digest = hashlib.sha256(source.encode()).digest()
    return int.from_bytes(digest[:4], "big") % 1000 < HELD_OUT_PER_1000


def read_corpus(docs: Path | None = None, library: Path | None = None) -> list[Document]:
    """Reads the standard library and, when `docs` is given, the documentation, sorted by source.

    `docs` is a folder of `*.rst.txt` or `*.rst` files (the `_sources` folder of a built manual).
    `library` defaults to the running Python's standard library.
    Raises `ValueError` when a folder holds no such file.
    """
    library = library or Path(sysconfig.get_path("stdlib"))
    documents = _read(library, "lib", ("*.py",))
    if docs is not None:
        documents += _read(docs, "doc", ("*.rst.txt", "*.rst"))
    return sorted(documents)


def _read(folder: Path, prefix: str, patterns: tuple[str, ...]) -> list[Document]:
    documents = []
    for path in sorted(path for pattern in patterns for path in folder.rglob(pattern)):
        relative = path.relative_to(folder)
        if _is_excluded(relative):
            continue
        source = f"{prefix}/{relative.as_posix().removesuffix('.txt')}"
        documents.append(Document(source, path.read_text(encoding="utf-8", errors="replace")))
    if not documents:
        raise ValueError(f"{prefix}: no {' or '.join(patterns)} file under {folder}")
    return documents


def _is_excluded(relative: Path) -> bool:
    folders = set(relative.parts[:-1])
    return bool(folders & EXCLUDED_FOLDERS) or relative.parts[0].startswith(EXCLUDED_PREFIXES)
