"""The drafters of an engine by name."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from fastspec.config import SamplingParams, SpecConfig
from fastspec.config.checks import require, require_one_of
from fastspec.config.methods import method_named
from fastspec.drafters import Drafter, GlideDrafter
from fastspec.drafters.base import CorpusReader
from fastspec.drafters.context import DrafterContext, DrafterPlan, DrafterSource
from fastspec.drafters.draft_model import draft_model_of
from fastspec.drafters.registry import plan_drafter, plan_given
from fastspec.engine.block_manager import BlockManager
from fastspec.engine.outputs import RequestOutput
from fastspec.engine.pacing import Pacer
from fastspec.engine.ranks import SharedSpeculation
from fastspec.engine.request import EngineRequest
from fastspec.engine.request_factory import RequestFactory
from fastspec.engine.speculation import Speculation
from fastspec.models.model_kinds import check_same_kind
from fastspec.models.runner import ModelRunner

logger = logging.getLogger(__name__)


class DrafterTable(dict[str | None, Speculation]):
    """All drafters of an engine, by `SamplingParams.drafter`.

    None is the engine's own, and "none" decodes plainly.

    Args:
        drafting: the target and the options that drafters are made for.
        plan: of the engine's own drafter; None = plain decoding.
        runner, block_manager: those of the target.
        factory: makes the requests with which steps are measured.
    """

    def __init__(
        self,
        drafting: DrafterContext,
        plan: DrafterPlan | None,
        runner: ModelRunner,
        block_manager: BlockManager,
        factory: RequestFactory,
    ):
        super().__init__()
        self._drafting, self._runner = drafting, runner
        self._block_manager, self._factory = block_manager, factory
        self._add(None, drafting.spec, plan)
        plain = SpecConfig("none", rejection_sample_method=drafting.spec.rule_beside)
        self._add("none", plain, None)

    def add(self, name: str, spec: SpecConfig, drafter: DrafterSource | None) -> None:
        """Add a drafter and turn it on; see `Engine.add_drafter`."""
        is_name = isinstance(name, str) and name != ""
        free = is_name and name not in self
        require("name", name, free, "a name that no drafter of the engine has")
        if (ranks := self._runner.paged_model.ranks) is not None:
            ranks.check(call="add_drafter", spec=spec)
        plan = plan_drafter(replace(self._drafting, spec=spec, drafter=drafter))
        if plan is None:
            raise ValueError('spec: it names no drafter; "none" already decodes plainly')
        self._add(name, spec, plan)

    def remove(self, name: str, unfinished: Sequence[EngineRequest]) -> None:
        """Remove a drafter that `add` added; see `Engine.remove_drafter`."""
        names = [each for each in self if each not in (None, "none")]
        known = f"one of {names}" if names else "a drafter that was added, and none was"
        require("name", name, name in names, known)
        users = {request.public_id for request in unfinished if request.params.drafter == name}
        if users:
            raise ValueError(f"name: {name!r} drafts for unfinished requests: {sorted(users)}")
        if (error := self.pop(name).error) is not None:
            raise error

    def check_request(self, params: SamplingParams) -> None:
        """Raise ValueError if a request asks for a drafter, or for drafts, that it cannot get."""
        if params.drafter is not None:
            require_one_of("drafter", params.drafter, [each for each in self if each is not None])
        self[params.drafter].check_request(params)

    def enable(
        self,
        drafter: DrafterSource | None,
        num_speculative_tokens: int | None,
        wants_glide: bool,
        running: list[EngineRequest],
    ) -> None:
        """Turn on the engine's own drafter, or replace it by another; see `enable_spec_dec`."""
        own = self[None]
        if (ranks := self._runner.paged_model.ranks) is not None:
            given = {"num_tokens": num_speculative_tokens, "is_new": drafter is not None}
            ranks.check(call="enable_spec_dec", **given)
        if num_speculative_tokens is None:
            num_speculative_tokens = own.usual_num_speculative_tokens
        own.check_count("n_spec_tokens", num_speculative_tokens)
        if own.spec.suffix_tokens or own.spec.tree_suffix:
            most = own.usual_num_speculative_tokens  # the part of the draft model is fixed
            fits, expected = num_speculative_tokens <= most, f"at most {most} with copies"
            require("n_spec_tokens", num_speculative_tokens, fits, expected)
        known, spec = own.last_drafter, own.spec
        if drafter is not None:
            given = {"drafter": drafter, "wants_glide": wants_glide}
            plan = plan_given(replace(self._drafting, **given))
            known, spec = self._built(plan), _with_chosen_vocab(self._drafting.spec, plan)
        elif known is None:
            raise ValueError("drafter: none to enable; pass one")
        elif wants_glide and not isinstance(draft_model_of(known), GlideDrafter):
            raise ValueError("use_glide_drafter: the drafter to enable is not a GLIDE model")
        own.enable(known, num_speculative_tokens, running, spec)
        if drafter is not None and method_named(spec.method).sets_length:
            logger.warning("drafter: it drafts alone, without the cascade that spec describes")

    def add_corpus(self, texts: list[list[int]]) -> None:
        """Pass a corpus to the drafters that read one; ValueError if there is none."""
        if (ranks := self._runner.paged_model.ranks) is not None:
            ranks.check(call="add_corpus", texts=texts)
        known = [each.last_drafter for each in self.values()]
        readers = [each for each in known if isinstance(each, CorpusReader)]
        if not readers:
            raise ValueError("texts: no drafter of this engine reads a corpus; suffix does")
        for reader in readers:
            reader.add_corpus(texts)

    def raise_unreported_error(self, outputs: Sequence[RequestOutput] = ()) -> None:
        """Raise an unreported error of a drafter or schedule, with complete outputs attached."""
        for speculation in self.values():
            if (error := speculation.take_error()) is not None:
                error.__dict__["outputs"] = list(outputs)
                raise error

    def _add(self, name: str | None, spec: SpecConfig, plan: DrafterPlan | None) -> None:
        """Add a drafter under an unused name and turn it on; a plan of None = plain decoding.

        Raises:
            ValueError: K is too large, or the drafter does not fit the target or the options.
        """
        paged_target, config = self._runner.paged_model, self._drafting.config
        spec = _with_chosen_vocab(spec, plan)
        pacer = Pacer(spec, self._runner, self._block_manager, self._factory, config)
        ranks = paged_target.ranks
        make_speculation = Speculation if ranks is None else partial(SharedSpeculation, ranks)
        speculation = make_speculation(
            self._runner.device,
            paged_target.vocab_size,
            spec,
            config,
            paged_target.chains_only,
            pacer,
        )
        count, option = speculation.usual_num_speculative_tokens, "num_speculative_tokens"
        if count > spec.num_model_tokens(config.max_n_spec_tokens):
            option = "tree_suffix" if spec.tree_suffix else "suffix_tokens"
        speculation.check_count(option, count)
        if plan is not None:
            speculation.enable(self._built(plan), count, [], spec)
        self[name] = speculation

    def _built(self, plan: DrafterPlan) -> Drafter:
        check_same_kind(self._runner.paged_model, plan.models)
        return plan.build(self._runner, self._block_manager)


def _with_chosen_vocab(spec: SpecConfig, plan: DrafterPlan | None) -> SpecConfig:
    """Return options with what was chosen for a draft model that has another tokenizer."""
    chosen = plan and plan.heterogeneous_vocab
    reads_it = "heterogeneous_vocab" in method_named(spec.method).fields
    return replace(spec, heterogeneous_vocab=chosen) if chosen and reads_it else spec
