"""`python -m fastspec`."""

from fastspec.cli import app

app(prog_name="fastspec")
