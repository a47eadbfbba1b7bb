"""Drafting methods: registration of new ones, and planning the drafter that options ask for."""

from collections.abc import Callable, Iterable
from dataclasses import fields as fields_of
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fastspec.config import SpecConfig
from fastspec.config.checks import refuse, require
from fastspec.config.methods import OWN_DRAFTS, Method, add_method, method_named
from fastspec.drafters import reencoding
from fastspec.drafters.auto import kind_of
from fastspec.drafters.base import Drafter
from fastspec.drafters.context import DrafterContext, DrafterPlan, as_plan
from fastspec.drafters.suffix_first import with_copies
from fastspec.drafters.tree import with_siblings, with_trees
from fastspec.models.named import other_drafts, own_draft
from fastspec.models.shared_vocabulary import is_intersection

Build = Callable[[DrafterContext], Drafter | DrafterPlan]


def register(
    name: str,
    build: Build,
    *,
    fields: Iterable[str] = (),
    needs_draft: bool = False,
    summary: str = "",
) -> None:
    """Add a drafting method, for `SpecConfig(name)` and `--method name`.

    A package adds its methods by an entry point of the group "fastspec.drafters": a function that
    calls this one, or a module that does so when imported.

    Args:
        name: an unused name of letters, digits, "_" and "-".
        build: makes the drafter for one engine from a `DrafterContext`: a `Drafter` or, if it runs
            models with their own caches, a `DrafterPlan`. Its exceptions reach the user unchanged.
        fields: SpecConfig fields of other methods that this one also reads, like
            "prompt_lookup_max"; fields that belong to no method are available to all.
        needs_draft: whether it requires a draft model, in `DrafterContext.drafter`.
        summary: one line for help texts.
    Raises:
        ValueError: an argument cannot be used; the message names it.
    """
    is_name = isinstance(name, str) and name.replace("-", "_").isidentifier()
    require("name", name, is_name, "a name of letters, digits, '_' and '-'")
    require("build", build, callable(build), "a function of a DrafterContext")
    known = {field.name for field in fields_of(SpecConfig)}
    read = fields if isinstance(fields, str) else list(fields)
    fits = not isinstance(read, str) and known.issuperset(read)
    require("fields", read, fits, f"names of fields of SpecConfig: {', '.join(sorted(known))}")
    is_line = isinstance(summary, str) and "\n" not in summary
    require("summary", summary, is_line, "one line of text")
    add_method(Method(name, summary, frozenset(read), bool(needs_draft), build))


def plan_drafter(context: DrafterContext) -> DrafterPlan | None:
    """Plan the drafter determined by spec.method, target and drafter; None = plain decoding.

    Raises:
        ValueError: a drafter is missing, not wanted, or cannot be loaded.
    """
    method, given = method_named(context.spec.method), context.drafter
    if given is not None:
        _check(context, method if method.takes_draft else None)
    if not method.proposes:
        return None
    if given is not None and not method.takes_draft:
        raise ValueError(f"drafter: method {method.name!r} does not take one")
    if given is None and method.takes_draft:
        given = own_draft(context.target, method.name)
    if given is None and method.takes_draft:
        has_copy = context.spec.copies_target
        if has_copy and context.spec.heterogeneous_vocab is None:
            return _plan_method(method, context)  # a cascade of the target's copy and MaG
        if method.needs_draft and not has_copy:
            known = other_drafts(context.target)
            raise ValueError(f"drafter: method {method.name!r} needs a draft model{known}")
        if context.spec.cape:
            what = "cape"
        elif context.spec.suffix_tokens is not None:
            what = "suffix_tokens (method 'suffix' copies without one)"
        elif context.spec.heterogeneous_vocab is not None:
            what = "heterogeneous_vocab"
        elif context.spec.draft_bits is not None:
            what = "draft_bits (method 'quantized' copies the target)"
        else:
            return None
        raise ValueError(f"drafter: {what} needs a draft model")
    return _plan_method(method, replace(context, drafter=given))


def plan_given(context: DrafterContext) -> DrafterPlan:
    """Plan a given Drafter, or one that runs a given draft model, whatever spec.method needs.

    It drafts trees if the options ask for them; a registered method runs its own drafter.
    """
    method, given = method_named(context.spec.method), context.drafter
    _check(context, None)
    is_own = method.build is not None and method.needs_draft and not isinstance(given, Drafter)
    if not is_own:
        is_tree = "tree_width" in method.fields and context.spec.drafts_trees
        method = method_named("tree" if is_tree else "auto")
    return _plan_method(method, context)


def _plan_method(method: Method, context: DrafterContext) -> DrafterPlan:
    build = method.build or import_module(f"fastspec.drafters.{method.name}").build
    spec = context.spec
    if isinstance(context.drafter, Drafter) and method.build is None:
        _check_options_of_drafter(spec)
    plan = reencoding.build(context) if method.reencodes else None
    plan = plan or as_plan(build(context))
    reads_it = "heterogeneous_vocab" in method.fields
    if reads_it and any(is_intersection(part.model) for part in plan.models):
        plan = replace(plan, heterogeneous_vocab="intersection")
    if "tree_width" in method.fields and spec.drafts_trees:
        plan = with_trees(plan, context)
    elif spec.cape:
        plan = with_siblings(plan, spec)
    return plan if spec.suffix_tokens is None else with_copies(plan, spec)


def _check_options_of_drafter(spec: SpecConfig) -> None:
    """Refuse options that a given Drafter must be constructed with."""
    why = "not with a Drafter object, which is configured when it is made"
    for name in ("confidence_threshold", "heterogeneous_vocab"):
        refuse(name, getattr(spec, name), why)
    refuse("draft_bits", spec.bits_of_draft_model, why)
    if not (spec.drafts_trees or spec.cape):  # trees draw their tokens themselves
        refuse("draft_sample_method", spec.draft_sample_method, why)


def _check(context: DrafterContext, method: Method | None) -> None:
    """Refuse objects that are not drafters, and draft models that need another method."""
    drafter: Any = context.drafter
    for part in drafter if isinstance(drafter, (list, tuple)) else [drafter]:
        if isinstance(part, PreTrainedTokenizerBase):
            raise ValueError(
                "drafter: got a tokenizer; the second argument is the drafter, pass the tokenizer"
                " as tokenizer="
            )
        if not isinstance(part, (str, Path, PreTrainedModel, Drafter)):
            given = f"the class {part.__name__}" if isinstance(part, type) else type(part).__name__
            raise ValueError(
                "drafter: expected a path, a hub id, a PreTrainedModel, a Drafter, or a list of"
                f" these, got {given}"
            )
        if isinstance(part, Drafter):
            continue
        if context.spec.copies_target:  # in front of them
            continue
        if method is None or method.chooses or method.drafts_trees:  # it runs all kinds
            continue
        kind = kind_of(part, context.read_config)
        if kind in OWN_DRAFTS and kind != method.name:
            what = OWN_DRAFTS[kind]
            raise ValueError(f"drafter: {what} needs method {kind!r}, not {method.name!r}")
