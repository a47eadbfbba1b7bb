"""The functions and classes of published scripts under their own names, run by the engine."""

from fastspec.tools.compat import __all__ as __all__
from fastspec.tools.compat import __dir__ as __dir__
from fastspec.tools.compat import __getattr__ as __getattr__
