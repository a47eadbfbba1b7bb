"""Triton's interpreter without what it does over and over, at less than half its cost."""

import inspect
import math
from dataclasses import replace
from functools import cache, wraps
from types import FunctionType, ModuleType
from typing import Any


def quicken(interpreter: ModuleType) -> None:
    """Leave out what changes no result."""
    _patch_once_per_launch(interpreter)
    _remember_types(interpreter)
    # Without `debug` what the check of overflows computes, three operations for one, goes nowhere.
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)


def _remember_types(interpreter: ModuleType) -> None:
    """Look the types and shapes up that each operation builds anew for its result."""
    core = interpreter.tl.core
    numpy_types: dict[str, Any] = {}
    numpy_type_of = interpreter._get_np_dtype

    def numpy_type(kind):
        element = kind.element_ty if isinstance(kind, core.block_type) else kind
        if element.name not in numpy_types:
            numpy_types[element.name] = numpy_type_of(element)
        return numpy_types[element.name]

    @cache
    def shape_of(sizes: tuple[int, ...]):
        return core.constexpr(math.prod(sizes)), core.tuple([core.constexpr(s) for s in sizes])

    def init(tensor, handle, type):
        tensor.handle, tensor.type, tensor.dtype = handle, type, type.scalar
        tensor.numel, tensor.shape = shape_of(tuple(type.shape) if type.is_block() else ())

    block_of = core.block_type.with_element_ty
    blocks = cache(lambda kind, sizes: core.block_type(kind, list(sizes)))

    def with_element_type(block, kind):
        return block_of(block, kind) if kind.is_ptr() else blocks(kind, tuple(block.shape))

    @cache
    def builtins_of(package) -> list[tuple[str, Any]]:
        members = inspect.getmembers(package)
        return [(name, member) for name, member in members if core.is_builtin(member)]

    def patch_builtins(package, builder, scope):
        for name, member in builtins_of(package):
            interpreter._patch_attr(package, name, member, builder, scope)

    interpreter._get_np_dtype = numpy_type
    interpreter._patch_builtin = patch_builtins
    core.tensor.__init__ = init
    core.block_type.with_element_ty = with_element_type


def _patch_once_per_launch(interpreter: ModuleType) -> None:
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
