"""Triton's interpreter with the work of a launch done once, not once for each function it calls."""

import inspect
from functools import cache, wraps
from types import FunctionType, ModuleType


def patch_once_per_launch(interpreter: ModuleType) -> None:
    """Make nested functions reuse what the launch has patched.

    The interpreter replaces the functions of triton.language at a launch, and looks for what there
    is to replace at each call of a nested function again: most of its time, and never a change.
    """
    language = interpreter.tl
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[ModuleType] = set()

    @cache
    def modules_of(function: FunctionType) -> frozenset[ModuleType]:
        modules = [value for value in function.__globals__.values() if inspect.ismodule(value)]
        return frozenset(value for value in modules if value in (language, language.core))

    @wraps(patch)
    def patch_what_is_new(function: FunctionType):
        if modules_of(function) <= patched:
            return None
        patched.update(modules_of(function))
        return patch(function)

    def launch_anew(executor, *args, **kwargs):
        patched.clear()
        return launch(executor, *args, **kwargs)

    interpreter._patch_lang = patch_what_is_new
    interpreter.GridExecutor.__call__ = launch_anew
