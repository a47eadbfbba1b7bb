"""Text files: read with errors that name the option, written whole or not at all."""

from pathlib import Path


def read_text(field: str, path: Path) -> str:
    """The text of a file.

    Raises:
        ValueError: no such file, or not UTF-8; `field` names the option.
    """
    if not path.is_file():
        raise ValueError(f"{field}: no such file: {str(path)!r}")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{field}: {path} is not UTF-8: {error}") from error


def write_whole(text: str, path: Path) -> None:
    """Write a file; whoever reads it finds the old one or the whole new one."""
    staged = path.with_name(path.name + ".new")
    staged.write_text(text, encoding="utf-8")
    staged.replace(path)
