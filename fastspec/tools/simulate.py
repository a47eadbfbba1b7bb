"""Run a drafter against stored outputs of a target, which need not be present.

The loop is the engine's, with a verifier that reads what the target has written: it accepts the
draft tokens up to the first that differs, and takes the next token from the text. Standard
verification of a model's logits does the same, sampled or greedy: after a rejection the target
never writes the token it has just rejected. So with the same prompts, parameters and seeds, the
same draft tokens are accepted in each step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import cast

from transformers import PreTrainedTokenizerBase

from fastspec.config import EngineConfig, SpecConfig
from fastspec.config.checks import is_int, require
from fastspec.config.token_trees import MAX_TREE_NODES
from fastspec.drafters import Proposal
from fastspec.drafters.base import Batch, Drafter, common_prefix_len
from fastspec.drafters.context import DrafterContext, DrafterSource, ModelSource
from fastspec.drafters.registry import plan_drafter
from fastspec.engine.block_manager import BlockManager
from fastspec.engine.loop import Loop
from fastspec.engine.outputs import Verdict
from fastspec.engine.request import EngineRequest
from fastspec.engine.schedule import Step
from fastspec.engine.scheduler import Scheduler
from fastspec.engine.speculation import Speculation
from fastspec.engine.stats import SpecStats
from fastspec.engine.verify import verdict_of
from fastspec.models.blocks import blocks_needed
from fastspec.models.cache_size import cache_blocks
from fastspec.models.layout import EncoderInput
from fastspec.models.loading import resolve_device
from fastspec.tools.stored_outputs import StoredOutput

_AS_BY_DEFAULT = (
    "rejection_sample_method",
    "relaxed_acceptance",
    "synthetic_acceptance_rate",
    "schedule",
)


@dataclass
class Simulation:
    """What a drafter would have done for one output.

    Attributes:
        steps: one for each target pass.
        stats: the same counts as those of a live request, which ended as the stored one.
    """

    steps: list[Step] = field(default_factory=list)
    stats: SpecStats = field(default_factory=SpecStats)

    @property
    def accepted(self) -> list[int]:
        """Draft tokens accepted in each step."""
        return [step.accepted for step in self.steps]

    @property
    def matched(self) -> list[int]:
        """Number of output tokens after each step."""
        emitted, total = [], 0
        for step in self.steps:
            total += step.accepted + 1
            emitted.append(min(total, self.stats.num_output_tokens))
        return emitted


class Simulator:
    """Runs one drafter over stored outputs, many at a time, each at its own pace.

    Args:
        drafter: a path, a hub id, a loaded model or a Drafter; None if spec.method needs none, or
            the target has its own.
        target: the model whose outputs they are; only used to find files next to its weights.
        vocab_size: of the target.
        tokenizer: of the target, compared with the drafter's.
        spec: the drafter and K, as for the engine.
        config: device, dtype and cache, as for the engine.
        decoder_start_id: of a target that is an encoder-decoder, whose encoder reads the prompts.
    Attributes:
        stats: counters of all outputs together.
        drafter: the drafter of the last run.
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
        decoder_start_id: int | None = None,
    ):
        if needed := spec.reads_target:
            raise ValueError(f"method: {spec.method!r} reads {needed}, which stored outputs lack")
        exact = SpecConfig()
        for name in _AS_BY_DEFAULT:
            value, expected = getattr(spec, name), getattr(exact, name)
            require(name, value, value == expected, f"{expected!r}, the only one that is simulated")
        plan = plan_drafter(DrafterContext(spec, config, tokenizer, vocab_size, target, drafter))
        if plan is None:
            raise ValueError("drafter: none to simulate; pass one")
        for model in plan.models:
            if (model.decoder_start_id is None) != (decoder_start_id is None):
                raise ValueError(
                    f"drafter: {model.name} and the target must both be decoders, or both"
                    " encoder-decoders"
                )
        self._plan = plan
        self._decoder_start_id = decoder_start_id
        self._vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._spec, self._config = spec, config
        self._max_nodes = MAX_TREE_NODES if spec.drafts_trees or spec.cape else 0
        self.stats = SpecStats()
        self.drafter: Drafter | None = None
        self.device = plan.models[0].device if plan.models else resolve_device(config)

    def run(
        self,
        outputs: Sequence[StoredOutput],
        advance: Callable[[int], None] = lambda num_tokens: None,
    ) -> list[Simulation]:
        """Simulate all outputs, in order; `advance` is called with the number of tokens done.

        Raises:
            ValueError: no outputs, one without a new token or whose ids are not the target's, or
                that outgrows the cache; nothing is run then.
        """
        if not outputs:
            raise ValueError("outputs: expected one or more, got none")
        # Drafts of a cascade end where a text would.
        ends = frozenset(output.token_ids[-1] for output in outputs if output.is_ended)
        requests = [self._request(*pair, ends) for pair in enumerate(outputs, 1)]
        size, batch = self._config.block_size, self._config.max_batch_size
        longest = max(request.max_len for request in requests) + self._max_nodes
        num_blocks = batch * blocks_needed(longest, size)
        if self._plan.models:
            num_blocks = cache_blocks(self._config, self._plan.models, longest)
        block_manager = BlockManager(num_blocks, size)
        scheduler = Scheduler(block_manager, batch)
        for request in requests:
            scheduler.check_fits(request)
            scheduler.add(request)
        speculation = Speculation(self.device, self._vocab_size, self._spec, self._config)
        self.drafter = self._plan.build(None, block_manager)
        speculation.enable(self.drafter, self._spec.num_draft_tokens(), [], self._spec)
        sides = _skip_prefill, _compare
        loop = Loop(scheduler, {None: speculation}, *sides, self.stats, chunk_size=1)
        while scheduler.has_unfinished:
            loop.round()
            if speculation.error is not None:
                raise speculation.error
            advance(sum(len(event.token_ids) for event in loop.events))
            loop.events.clear()
        return [Simulation(request.steps, request.stats) for request in requests]

    def _request(self, number: int, output: StoredOutput, ends: frozenset[int]) -> "_StoredRequest":
        prompt = output.prompt
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise ValueError(f"output {number}: its prompt is a string and needs a tokenizer")
            prompt = self._tokenizer(prompt)["input_ids"]
        if not prompt:
            raise ValueError(f"output {number}: its prompt is empty")
        if not output.token_ids:
            raise ValueError(f"output {number}: it has no new token")
        for token_id in (*prompt, *output.token_ids):
            if not is_int(token_id) or not 0 <= token_id < self._vocab_size:
                raise ValueError(
                    f"output {number}: token id {token_id} is not in 0..{self._vocab_size - 1}"
                )
        # No step asks for room beyond.
        reached = len(output.token_ids) + self._spec.num_draft_tokens() + 1
        start = self._decoder_start_id
        begin = list(prompt) if start is None else [start]
        return _StoredRequest(
            request_id=f"output-{number}",
            token_ids=begin,
            params=output.params,
            seed=output.params.seed or 0,
            stop_ids=ends.difference(output.token_ids[:-1]),
            max_len=len(begin) + min(output.params.max_tokens or reached, reached),
            text=[*begin, *output.token_ids],
            end=output.end,
            encoder_input=None if start is None else EncoderInput(list(prompt)),
        )


@dataclass(eq=False)
class _StoredRequest(EngineRequest):
    """A request whose text is known; its token_ids are what has been matched so far."""

    text: list[int] = field(default_factory=list)
    end: str = "stop"
    steps: list[Step] = field(default_factory=list)

    def append(self, token_id: int, *others) -> str | None:
        super().append(token_id, *others)
        return self.end if len(self.token_ids) == len(self.text) else None


def _skip_prefill(requests: list[EngineRequest], most: int) -> int:
    for request in requests:
        request.num_cached = len(request.token_ids) - 1
    return 0


def _compare(batch: Batch, proposal: Proposal, spec: SpecConfig) -> list[Verdict]:
    """The verdicts of a target that writes the stored text."""
    if proposal.on_target_logits is not None:
        raise ValueError("on_target_logits: expected None, stored outputs have no logits to read")
    verdicts, parents = [], proposal.parents
    trees = [None] * len(batch.requests) if parents is None else parents.tolist()
    rows = zip(proposal.token_ids.tolist(), trees, strict=True)
    for place, (request, (row, tree)) in enumerate(zip(batch.requests, rows, strict=True)):
        request, limit = cast(_StoredRequest, request), batch.num_draft_tokens[place]
        following = request.text[len(request.token_ids) :][: limit + 1]
        if tree is None:
            drafts = list(takewhile(lambda token_id: token_id >= 0, row[:limit]))
            accepted = common_prefix_len(drafts, following)
            emitted = following[: accepted + 1]
            verdict = Verdict(len(drafts), accepted, emitted, None, "target")
        else:
            verdict = _follow(request, row, tree, batch.max_nodes[place], following)
        accepted = verdict.accepted_len
        is_cut = accepted == len(following)
        counts = [accepted] * 3 if is_cut else (limit, verdict.num_draft_tokens, accepted)
        request.steps.append(Step(*counts))
        verdicts.append(verdict)
    return verdicts


def _follow(
    request: EngineRequest, row: list[int], tree: list[int], most: int, following: list[int]
) -> Verdict:
    """The verdict on a tree of at most `most` nodes, given the tokens that follow."""
    token_ids = [request.token_ids[-1], *row]
    parents = [-1, *(p if token >= 0 else -1 for p, token in zip(tree, row, strict=True))]
    path = [0]
    for token in following:
        nodes = range(path[-1] + 1, min(most, len(row)) + 1)
        found = (n for n in nodes if parents[n] == path[-1] and token_ids[n] == token)
        if (node := next(found, None)) is None:
            break
        path.append(node)
    emitted = following[: len(path)]
    nodes = token_ids[: min(most, len(row)) + 1]
    return verdict_of(len(path) - 1, emitted, nodes, path[1:], parents)
