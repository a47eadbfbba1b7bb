"""Text of the bundled models: CPython's standard library and docs, and other packages of Python."""

import hashlib
import sysconfig
import zlib
from pathlib import Path
from typing import NamedTuple

LICENSE = "PSF-2.0"
LICENSES_OF_PACKAGES = "BSD-3-Clause, MIT and Apache-2.0"
HELD_OUT_PER_1000 = 20
# Generated tables and fixtures teach nothing, pydoc_data repeats the documentation.
EXCLUDED_FOLDERS = frozenset(
    {"site-packages", "test", "tests", "idle_test", "lib2to3", "ensurepip", "encodings"}
    | {"pydoc_data", "__pycache__", "locale", "migrations", "changelog", "releases", "examples"}
)
EXCLUDED_PREFIXES = ("_sysconfigdata", "config-")
LEAST_COMPRESSED = 0.15  # of a file's bytes, by zlib: what is smaller repeats itself


class Document(NamedTuple):
    """One file of the corpus: `source` is `lib/…`, `doc/…` or `PACKAGE/…` on every machine."""

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


def packages_in(folder: Path) -> list[str]:
    """Names of the unpacked source distributions in a folder, with their versions."""
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


def read_packages(folder: Path) -> list[Document]:
    """Reads code and documentation of the unpacked source distributions in a folder.

    Comments at the top of a file, which hold licences, and comments without a word are left out,
    and so are files that repeat themselves.
    """
    documents = []
    for package in packages_in(folder):
        patterns = ("*.py", "*.rst", "docs/**/*.txt")
        prefix = package.rpartition("-")[0].lower()
        for source, text in _read(folder / package, prefix, patterns):
            text = _without_rules(text)
            data = text.encode()
            if len(zlib.compress(data)) > LEAST_COMPRESSED * len(data):
                documents.append(Document(source, text))
    return sorted(documents)


def _without_rules(text: str) -> str:
    lines = text.splitlines()
    first = next((i for i, line in enumerate(lines) if line and line[0] != "#"), len(lines))
    kept = [line for line in lines[first:] if not _is_rule(line.strip())]
    return "\n".join(kept) + "\n"


def _is_rule(line: str) -> bool:
    return line.startswith("#") and not any(map(str.isalnum, line))


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
