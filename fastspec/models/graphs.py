"""Forward passes replayed as CUDA graphs: one launch instead of one per kernel."""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import Any, TypeVar

import torch
from torch import Tensor

from fastspec.models.layout import (
    KeptInputs,
    KVCache,
    PagedStep,
    PassShape,
    Span,
    lay_out,
    tree_positions,
)
from fastspec.models.paged_model import PagedModel
from fastspec.models.transfer import StaticIntegers

MOST_TOKENS = 512  # a longer pass keeps the GPU busy longer than the host needs to launch it
LEAST_WIDTH = 64  # blocks per row of the block table; wider rows cost nothing to read
MAX_PASSES = 128  # graphs kept of a model's passes; the least recently used one is dropped
CHEAP_TOKENS = 128  # up to these, a few more take little time
FEW_TOKENS = 16  # up to these, kernels of ours multiply, which are faster than torch's
# A capture takes as long as ten passes or so. Sizes that have occurred at most this often, such as
# those of a text's last tokens, take a larger graph if there is one.
RARE_TIMES = 32
NEAR_FACTOR, RARE_FACTOR = 2, 8  # how many times as large that graph may be, in every size
# Passes that read prompts come in many sizes, and win less by a graph, which they get later.
PROMPT_TIMES = 8
logger = logging.getLogger(__name__)
# A capture begins by waiting for the whole GPU; during another one that fails, and ruins both.
_CAPTURING = Lock()

Run = Callable[[], Any]
Capture = Callable[[Run], Run]  # records a function that works on static buffers
# Lets a captured pass read buffers besides tokens and pages, and returns them.
ViewBuffers = Callable[[PagedStep], tuple[Tensor, ...]]
Tree = tuple[Tensor, Tensor]  # depths [B, N], ancestor_mask [B, N, words]
Sizes = TypeVar("Sizes")
Static = TypeVar("Static")  # the buffers of a graph


class CudaCapture:
    """Records CUDA graphs that share scratch memory, as only one is replayed at a time."""

    def __init__(self, device: torch.device):
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, run: Run) -> Run:
        # torch leaves its stream current if it cannot end a capture, hence the second context.
        with torch.cuda.device(self._device), torch.cuda.stream(torch.cuda.current_stream()):
            if self._stream is None:  # one, as torch keeps scratch memory for each
                self._stream = torch.cuda.Stream()
            stream = self._stream
            stream.wait_stream(torch.cuda.current_stream())
            try:
                with torch.cuda.stream(stream):
                    run()  # compile kernels and initialise libraries outside the capture
            finally:
                torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            # Other threads' concurrent GPU work is not part of the pass.
            options = {"pool": self._pool, "stream": stream, "capture_error_mode": "thread_local"}
            with _CAPTURING, torch.cuda.graph(graph, **options):
                out = run()

        def replay() -> Any:
            graph.replay()
            return out

        return replay


def capture_for(
    cuda_graphs: str, paged_model: PagedModel, why_not: str | None = None
) -> Capture | None:
    """Return how to capture passes of the model under this setting; None = no capture.

    Args:
        why_not: why its runner's passes cannot be captured, to follow the model's name.
    Raises:
        ValueError: "on" for a model that is not on a GPU, is an encoder-decoder or recurrent,
            attends in chunks, or has such a runner.
    """
    reason = why_not
    if paged_model.device.type != "cuda":
        reason = f"runs on {paged_model.device.type}; graphs need a CUDA device"
    elif paged_model.recurrent is not None:
        reason = "has recurrent layers, which read sequences one by one"
    elif paged_model.decoder_start_id is not None:
        reason = "is an encoder-decoder, whose cross-attention layout changes in each pass"
    elif paged_model.chunk_size is not None:
        reason = "attends in chunks, whose layout changes in each pass"
    if reason is not None:
        if cuda_graphs == "on":
            raise ValueError(f"cuda_graphs: 'on', but {paged_model.name} {reason}")
        return None
    return None if cuda_graphs == "off" else CudaCapture(paged_model.device)


def bucket(shape: PassShape, block_size: int, num_nodes: int) -> PassShape | None:
    """Return the sizes that a pass is padded to.

    Tokens are rounded up by up to a half, or a quarter above CHEAP_TOKENS, sequences and table
    widths to powers of 2, with enough sequences for the added tokens: up to `num_nodes` in each,
    unless that is 0. None for passes that are not captured, which are long.
    """
    if not 0 < shape.num_tokens <= MOST_TOKENS:
        return None
    num_steps = 2 if shape.num_tokens <= CHEAP_TOKENS else 4  # from a power of 2 to the next
    step = max(1, power_of_2(shape.num_tokens) // (2 * num_steps))
    num_tokens = -(-shape.num_tokens // step) * step
    num_rows = power_of_2(shape.num_rows) if shape.num_rows else 0
    width = max(LEAST_WIDTH, power_of_2(shape.width))
    rounded = PassShape(shape.batch, num_tokens, num_rows, width)
    batch = shape.batch + num_added(shape, rounded, block_size, num_nodes)
    return rounded._replace(batch=power_of_2(batch))


def num_added(asked: PassShape, larger: PassShape, block_size: int, num_nodes: int) -> int:
    """Return how many sequences hold the tokens that pad a pass to the larger sizes."""
    added = larger.num_tokens - asked.num_tokens
    return -(-added // larger.most_added(block_size, num_nodes))


def is_near(larger: PassShape, shape: PassShape, is_rare: bool = False) -> bool:
    """Whether a pass of these sizes may be padded to the larger ones.

    That takes little longer, or for rare sizes not much longer.
    """
    counts = (shape.num_tokens, larger.num_tokens), (shape.num_rows, larger.num_rows)
    if any(a <= FEW_TOKENS < b or a < b > CHEAP_TOKENS for a, b in counts):
        return False
    factor = RARE_FACTOR if is_rare else NEAR_FACTOR
    return all(a <= b <= factor * a for a, b in zip(shape, larger, strict=True))


def padded(values: Sequence[int], length: int, value: int = 0) -> list[int]:
    """Return the values, followed by `value` up to this length."""
    return [*values, *[value] * (length - len(values))]


def power_of_2(number: int) -> int:
    """Return the smallest power of 2 that is >= a positive number."""
    return 1 << (number - 1).bit_length()


class RecentGraphs(dict[Sizes, Static]):
    """Graphs by their sizes, the least recently used first."""

    def __init__(self):
        super().__init__()
        self._occurred: Counter[Sizes] = Counter()

    def occur(self, sizes: Sizes) -> int:
        """Count sizes without a graph; return how often they have occurred."""
        self._occurred[sizes] += 1
        return self._occurred[sizes]

    def use(self, sizes: Sizes, make: Callable[[], Static], most: int) -> Static:
        """Return the graph of these sizes, or make it; keep the `most` that were used last."""
        if (static := self.pop(sizes, None)) is None:
            static = make()
        self[sizes] = static
        if len(self) > most:
            oldest = next(iter(self))
            del self[oldest], self._occurred[oldest]
        return static


@dataclass(eq=False)
class GraphedForward:
    """One model's short passes, captured when sizes occur and no captured ones are near.

    Sizes are rounded up to limit the number of graphs; the added padding affects no row. A pass
    waits for none of its copies to the device: one for its layout and the tokens that the host
    knows, more for trees and for what a draft reads of its target.
    """

    paged_model: PagedModel
    caches: dict[int, KVCache]
    block_size: int
    capture: Capture | None
    must: bool
    inputs: KeptInputs | None = field(default=None, init=False)
    _captures_prompts: bool = field(default=True, init=False)
    _passes: "RecentGraphs[tuple[PassShape, int], StaticPass]" = field(
        default_factory=RecentGraphs, init=False
    )

    def forward(
        self,
        input_ids: Tensor | list[int],
        spans: list[Span],
        rows: list[int] | None,
        tree: Tree | None,
        view_values: Callable[[], tuple[Tensor, ...] | None],
        view_buffers: ViewBuffers,
        reads_text: bool,
    ) -> Tensor | None:
        """See ModelRunner.forward; returns one row, of any token, if `rows` is empty.

        `tree` is the result of `build_tree`; `view_values` returns what goes to the `view_buffers`
        of the captured pass. Returns None if the pass must run without a graph.

        Raises:
            ValueError: the model cannot be captured, but must be.
        """
        num_nodes = 0 if tree is None else tree[1].shape[1]
        is_prompt = reads_text or rows == []
        rows = [0] if rows == [] else rows or []
        asked = PassShape.of(spans, rows, self.block_size)
        shape = bucket(asked, self.block_size, num_nodes)
        if self.capture is None or shape is None:
            return None
        if (key := (shape, num_nodes)) not in self._passes:
            times = self._passes.occur(key)
            near = self._near(times <= RARE_TIMES, asked, *key)
            is_early = times <= PROMPT_TIMES
            if near is None and is_prompt and (is_early or not self._captures_prompts):
                return None
            shape = near or shape
        if (values := view_values()) is None:
            return None
        make = partial(StaticPass, self, shape, num_nodes, view_buffers)
        static = self._passes.use((shape, num_nodes), make, MAX_PASSES)
        layout = lay_out(spans, rows, self.block_size, shape, num_nodes)
        static.fill(input_ids, *layout, tree, [span.count for span in spans], values)
        if static.replay is None:
            static.replay = self.captured(static.run, is_prompt)
        if static.replay is None:
            self._passes.pop((shape, num_nodes), None)
            return None
        return static.replay()[: asked.num_rows or asked.num_tokens].clone()

    def _near(
        self, is_rare: bool, asked: PassShape, rounded: PassShape, num_nodes: int
    ) -> PassShape | None:
        """The smallest near sizes of which there is a graph."""
        found, shape = [], rounded._replace(num_tokens=asked.num_tokens)
        for (larger, nodes), static in self._passes.items():
            if nodes == num_nodes and static.replay is not None and is_near(larger, shape, is_rare):
                added = num_added(asked, larger, self.block_size, nodes)
                if asked.batch + added <= larger.batch:
                    found.append(larger)
        return min(found, key=lambda sizes: (sizes.num_tokens, sizes), default=None)

    def captured(self, run: Run, is_prompt: bool = False) -> Run | None:
        """Capture a function of static buffers; None, from now on, if the model does not allow it.

        If a pass that reads a prompt fails, other passes may still be captured.

        Raises:
            ValueError: the model cannot be captured, but must be, other than for prompts.
        """
        if self.capture is None:
            return None
        try:
            return self.capture(run)
        except RuntimeError as error:
            # To end a failed capture fails as well; what failed before is the context of that.
            first_line = str(error.__context__ or error).split("\n")[0]
            message = f"{self.paged_model.name} cannot be captured in a CUDA graph: {first_line}"
            if is_prompt:
                logger.debug("prompts are read without CUDA graphs: %s", message)
                self._captures_prompts = False
                return None
            if self.must:
                raise ValueError(f"cuda_graphs: 'on', but {message}") from error
            logger.warning("cuda_graphs: %s; its passes run without graphs", message)
            self.capture = None
            self._passes.clear()
            return None

    def keep_inputs(self, inputs: KeptInputs) -> None:
        """Store the inputs of some layers in every pass from now on."""
        self.inputs = inputs
        self._passes.clear()


class StaticPass:
    """Buffers for one combination of sizes, which a graph reads at fixed addresses."""

    def __init__(
        self,
        graphs: GraphedForward,
        shape: PassShape,
        num_nodes: int,
        view_buffers: ViewBuffers,
    ):
        self.replay: Run | None = None
        self._paged_model = model = graphs.paged_model
        self._keeps_rows = shape.num_rows > 0
        device, sizes = model.device, (shape.batch, shape.num_tokens)
        num_wide = shape.num_tokens + shape.wide_size
        self._inputs = StaticIntegers(num_wide, shape.narrow_size, device)
        self._ids, wide = self._inputs.wide.tensor_split((shape.num_tokens,))
        buffers = wide, self._inputs.narrow
        self._step = PagedStep.of(graphs.caches, *buffers, *sizes, model.backend, spans=[])
        self._step.inputs = graphs.inputs
        self._view = view_buffers(self._step)
        if num_nodes:
            mask = (shape.batch, num_nodes, -(-num_nodes // 64))
            self._step.ancestor_mask = torch.zeros(mask, dtype=torch.int64, device=device)

    def fill(
        self,
        input_ids: Tensor | list[int],
        wide: list[int],
        narrow: list[int],
        tree: Tree | None,
        counts: list[int],
        view_values: tuple[Tensor, ...],
    ) -> None:
        """Copy a padded pass into the buffers, with the structure of its trees, if any."""
        step = self._step
        known_ids = input_ids if isinstance(input_ids, list) else []
        self._inputs.replace(padded(known_ids, len(self._ids)) + wide, narrow)
        if isinstance(input_ids, Tensor):
            self._ids[: len(input_ids)].copy_(input_ids)
        for buffer, values in zip(self._view, view_values, strict=True):
            buffer[: len(values)].copy_(values)
        if tree is not None and step.ancestor_mask is not None:
            depths, ancestor_mask = tree
            positions = tree_positions(depths, counts, step.context_lens[: len(counts)])
            step.positions[: len(positions)].copy_(positions)
            step.ancestor_mask[: len(counts)].copy_(ancestor_mask)

    def run(self) -> Tensor:
        """Run the forward pass on the buffers; return logits of the rows, or of all tokens."""
        step = self._step
        keep = step.rows if self._keeps_rows else None
        return self._paged_model.forward(self._ids, step.positions, keep, step)
