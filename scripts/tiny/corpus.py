"""Text of the bundled models beside the textbook: CPython's standard library."""

import hashlib
import sysconfig
from pathlib import Path
from typing import NamedTuple

LICENSE = "PSF-2.0"
HELD_OUT_PER_1000 = 20
LONGEST = 20_000  # characters of a file
# Generated tables and fixtures teach nothing, pydoc_data repeats the documentation.
EXCLUDED_FOLDERS = frozenset(
    {"site-packages", "test", "tests", "idle_test", "lib2to3", "ensurepip", "encodings"}
    | {"pydoc_data", "__pycache__"}
)
EXCLUDED_PREFIXES = ("_sysconfigdata", "config-")


class Document(NamedTuple):
    """One file of the corpus: `source` is `lib/…`, `code/…` or `page/…`, stable across machines."""

    source: str
    text: str


def is_held_out(source: str) -> bool:
    """Says whether a file is kept from training: a hash of its path picks about 2 %."""
    digest = hashlib.sha256(source.encode()).digest()
    return int.from_bytes(digest[:4], "big") % 1000 < HELD_OUT_PER_1000


def read_corpus(library: Path | None = None) -> list[Document]:
    """Reads the shorter files of the standard library, sorted by source.

    `library` defaults to the running Python's. Raises `ValueError` when it holds no such file.
    """
    library = library or Path(sysconfig.get_path("stdlib"))
    documents = []
    for path in library.rglob("*.py"):
        relative = path.relative_to(library)
        text = path.read_text(encoding="utf-8", errors="replace")
        if not _is_excluded(relative) and len(text) < LONGEST:
            documents.append(Document(f"lib/{relative.as_posix()}", text))
    if not documents:
        raise ValueError(f"library: no *.py file under {library}")
    return sorted(documents)


def _is_excluded(relative: Path) -> bool:
    folders = set(relative.parts[:-1])
    return bool(folders & EXCLUDED_FOLDERS) or relative.parts[0].startswith(EXCLUDED_PREFIXES)
