"""`fastspec.tools.compat` by a shorter name: what published scripts call."""

from typing import TYPE_CHECKING

from fastspec.tools.compat import __all__ as __all__
from fastspec.tools.compat import __dir__ as __dir__
from fastspec.tools.compat import __getattr__ as __getattr__

if TYPE_CHECKING:
    from fastspec.tools.compat import *  # noqa: F403
