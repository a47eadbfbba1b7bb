"""A drafter against stored outputs of a target, which need not be there.

A step accepts the draft tokens up to the first that differs from the stored text, and takes the
next token from it. That is what standard verification of the live engine does as well, sampled or
greedy: after a rejection the target never writes the token it has just rejected. So from the same
prompts, parameters and seeds the same draft tokens are accepted in each step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from fastspec.config import EngineConfig, SpecConfig
from fastspec.drafters import Drafter, Proposal
from fastspec.drafters.base import Batch
from fastspec.drafters.context import DrafterContext, DrafterSource, ModelSource
from fastspec.drafters.registry import plan_drafter
from fastspec.engine.block_manager import BlockManager, blocks_needed
from fastspec.engine.request import EngineRequest
from fastspec.engine.schedule import Step
from fastspec.engine.scheduler import Scheduler
from fastspec.engine.stats import SpecStats
from fastspec.models.cache_size import cache_blocks
from fastspec.models.loading import resolve_device
from fastspec.models.transfer import device_tensor
from fastspec.tools.stored_outputs import StoredOutput

_NO_TOKEN = -2  # beyond the end of a text; equal to no proposal, not even to none (-1)


@dataclass
class Simulation:
    """What a drafter would have done for one output.

    Attributes:
        steps: one for each target pass.
        stats: the same counts as those of a live request.
    """

    steps: list[Step] = field(default_factory=list)
    stats: SpecStats = field(default_factory=SpecStats)

    @property
    def accepted(self) -> list[int]:
        """Draft tokens accepted in each step."""
        return [step.accepted for step in self.steps]

    @property
    def matched(self) -> list[int]:
        """Tokens of the output that stood after each step."""
        emitted, total = [], 0
        for step in self.steps:
            total += step.accepted + 1
            emitted.append(min(total, self.stats.num_output_tokens))
        return emitted


class Simulator:
    """Runs one drafter over stored outputs, many at a time, each at its own pace.

    Args:
        drafter: a path, a hub id, a loaded model or a Drafter; None where spec.method needs none,
            or the target brings its own.
        target: whose outputs they are; only names what stands beside its weights.
        vocab_size: of the target.
        tokenizer: of the target, compared with the drafter's.
        spec: the drafter and K, as for the engine.
        config: device, dtype and cache, as for the engine.
    Attributes:
        stats: counters of all outputs together.
    Raises:
        ValueError: a drafter or option that cannot be used.
    """

    def __init__(
        self,
        target: ModelSource,
        drafter: DrafterSource | None,
        vocab_size: int,
        tokenizer: PreTrainedTokenizerBase | None = None,
        spec: SpecConfig = SpecConfig(),  # noqa: B008 (frozen)
        config: EngineConfig = EngineConfig(),  # noqa: B008 (frozen)
    ):
        if spec.rejection_sample_method != "standard":
            raise ValueError(
                "rejection_sample_method: only 'standard' can be simulated, got"
                f" {spec.rejection_sample_method!r}"
            )
        if spec.relaxed_acceptance != 1:
            raise ValueError(
                "relaxed_acceptance: only exact verification can be simulated, got"
                f" {spec.relaxed_acceptance}"
            )
        plan = plan_drafter(DrafterContext(spec, config, tokenizer, vocab_size, target, drafter))
        if plan is None:
            raise ValueError("drafter: there is none to simulate")
        self._plan = plan
        self._vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._config = config
        self._num_draft = spec.num_draft_tokens()
        self.stats = SpecStats()
        self.device = plan.models[0].device if plan.models else resolve_device(config)

    def run(
        self,
        outputs: Sequence[StoredOutput],
        advance: Callable[[int], None] = lambda num_tokens: None,
    ) -> list[Simulation]:
        """Simulate all outputs, in their order; `advance` is called with tokens done.

        Raises:
            ValueError: an output whose ids are not the target's, or that outgrows the cache;
                nothing is run then.
        """
        runs = [self._run(number, output) for number, output in enumerate(outputs, 1)]
        scheduler, drafter = self._prepare(runs)
        while scheduler.has_unfinished:
            for request in scheduler.schedule(self._num_draft):
                drafter.release(request)
            scheduler.admit(self._num_draft)
            running = cast(list[_Run], list(scheduler.running))
            self._step(running, drafter, advance)
            for run in running:
                if run.is_done:
                    scheduler.remove(run.request_id)
                    drafter.release(run)
        return [Simulation(run.steps, run.stats) for run in runs]

    def _prepare(self, runs: list["_Run"]) -> tuple[Scheduler, Drafter]:
        size, batch = self._config.block_size, self._config.max_batch_size
        longest = max(run.max_len for run in runs)
        num_blocks = batch * blocks_needed(longest, size)
        if self._plan.models:
            num_blocks = cache_blocks(self._config, self._plan.models, longest)
        block_manager = BlockManager(num_blocks, size)
        scheduler = Scheduler(block_manager, batch)
        for run in runs:
            scheduler.check_fits(run)
        for run in runs:
            scheduler.add(run)
            for stats in (self.stats, run.stats):
                stats.record_prompt(run.num_prompt_tokens, 0)
        return scheduler, self._plan.build(None, block_manager)

    @torch.inference_mode()
    def _step(
        self, running: list["_Run"], drafter: Drafter, advance: Callable[[int], None]
    ) -> None:
        num = self._num_draft
        wanted = [min(num, run.room) for run in running]
        batch = Batch(running, wanted, num, self.device, self._config.backend)
        proposal = drafter.propose(batch)
        if proposal.parents is not None:
            raise ValueError("drafter: token trees cannot be simulated")
        stored = device_tensor([run.following(num) for run in running], torch.int32, self.device)
        steps = _judge(proposal, stored, wanted)
        for run, step in zip(running, steps, strict=True):
            advance(run.commit(step, self.stats))
        drafter.commit(batch, [step.accepted for step in steps])

    def _run(self, number: int, output: StoredOutput) -> "_Run":
        prompt = output.prompt
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise ValueError(f"output {number}: its prompt is a text; a tokenizer is needed")
            prompt = self._tokenizer(prompt)["input_ids"]
        if not prompt:
            raise ValueError(f"output {number}: its prompt is empty")
        largest = max(*prompt, *output.token_ids)
        if largest >= self._vocab_size:
            raise ValueError(
                f"output {number}: token id {largest} is not in 0..{self._vocab_size - 1}"
            )
        reached = len(output.token_ids) + self._num_draft + 1  # no step asks for room beyond
        return _Run(
            request_id=f"output-{number}",
            token_ids=list(prompt),
            params=output.params,
            seed=output.params.seed or 0,
            stop_ids=frozenset(),
            max_len=len(prompt) + min(output.params.max_tokens or reached, reached),
            text=[*prompt, *output.token_ids],
        )


@dataclass(eq=False)
class _Run(EngineRequest):
    """A request whose text is known; its token_ids are what has been matched so far."""

    text: list[int] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return len(self.token_ids) == len(self.text)

    def following(self, count: int) -> list[int]:
        """The next `count` stored ids."""
        ids = self.text[len(self.token_ids) :][:count]
        return ids + [_NO_TOKEN] * (count - len(ids))

    def commit(self, step: Step, all_stats: SpecStats) -> int:
        """Append what a step emits and count it; the number of tokens."""
        emitted = self.text[len(self.token_ids) :][: step.accepted + 1]
        self.token_ids += emitted
        was_cut = len(emitted) <= step.accepted
        judged = Step(*[step.accepted] * 3) if was_cut else step
        self.steps.append(judged)
        for stats in (self.stats, all_stats):
            stats.record_step(judged.proposed, judged.accepted, len(emitted))
        return len(emitted)


def first_mismatch(draft_token_ids: Tensor, stored_token_ids: Tensor) -> Tensor:
    """Leading places of each row that agree, [B] int64; of [B, K] ids each."""
    return (draft_token_ids == stored_token_ids).long().cumprod(dim=1).sum(dim=1)


def _judge(proposal: Proposal, stored: Tensor, wanted: list[int]) -> list[Step]:
    """A step for each row; one copy from the device."""
    drafts = proposal.token_ids
    proposed = (drafts >= 0).long().cumprod(dim=1).sum(dim=1)
    table = torch.stack([proposed, first_mismatch(drafts, stored)], dim=1).tolist()
    return [
        Step(limit, min(count, limit), min(match, limit))
        for (count, match), limit in zip(table, wanted, strict=True)
    ]
