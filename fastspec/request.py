"""One request while it runs, and the batch that drafters and the verifier see."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypedDict

import torch
from torch import Tensor

from fastspec.config import SamplingParams
from fastspec.detokenizer import Detokenizer
from fastspec.models.transfer import device_tensor
from fastspec.outputs import RequestOutput
from fastspec.prefix_index import Content
from fastspec.stats import SpecStats
from fastspec_kernels import uniform

# Streams of fastspec_kernels.uniform: drafts must not share numbers with the acceptance tests.
VERIFY_STREAM = 0
DRAFT_STREAM = 1
CASCADE_STREAM = 2


class SamplingTensors(TypedDict):
    """Sampling keyword arguments of the kernels, one value per request; None where none uses it."""

    temperature: Tensor | None
    top_k: Tensor | None
    top_p: Tensor | None
    min_p: Tensor | None


@dataclass(eq=False)
class EncoderInput:
    """What the encoder of an encoder-decoder reads for one request, or several that are alike.

    Each model encodes it once, and keeps what its decoder needs for as long as this object lives.
    """

    token_ids: list[int]


@dataclass
class Request:
    """Committed state of one request; everything in it ends at the same token.

    Attributes:
        token_ids: prompt and committed tokens; of an encoder-decoder, those of its decoder.
        block_table: its blocks, the same in the target's and the drafter's cache.
        contents: of its leading blocks, as far as other requests may find them.
        num_cached: leading tokens whose target keys and values are in the cache.
        max_len: length of token_ids at which it ends.
        encoder_input: the prompt of an encoder-decoder.
        schedule_state: what the schedule of draft lengths remembers of it.
    """

    request_id: str
    token_ids: list[int]
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int]
    max_len: int
    detokenizer: Detokenizer | None
    encoder_input: EncoderInput | None = None
    num_prompt_tokens: int = 0
    block_table: list[int] = field(default_factory=list)
    contents: list[Content] = field(default_factory=list)
    num_cached: int = 0
    logprobs: list[float] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    drafters: list[str | None] = field(default_factory=list)
    stats: SpecStats = field(default_factory=SpecStats)
    schedule_state: Any = None

    def __post_init__(self):
        self.num_prompt_tokens = len(self.token_ids)

    @property
    def prompt_ids(self) -> list[int]:
        """Ids of the prompt, wherever the model reads them."""
        if self.encoder_input is not None:
            return self.encoder_input.token_ids
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def room(self) -> int:
        """Drafts that can be accepted in one step: the token after them has to fit too."""
        return self.max_len - len(self.token_ids) - 1

    def append(
        self, token_id: int, source: str, drafter: str | None, logprob: float | None
    ) -> str | None:
        """Commit one token; the reason to finish, if it is the last one."""
        self.token_ids.append(token_id)
        self.sources.append(source)
        self.drafters.append(drafter)
        if logprob is not None:
            self.logprobs.append(logprob)
        if token_id in self.stop_ids:
            return "stop"
        if self.detokenizer is not None:
            self.detokenizer.push(token_id)
            if self.detokenizer.stopped:
                return "stop"
        if len(self.token_ids) < self.max_len:
            return None
        if self.detokenizer is not None:
            self.detokenizer.finish()  # what it holds back may complete a stop string
        return "stop" if self.detokenizer is not None and self.detokenizer.stopped else "length"

    def output(self, finish_reason: str, error: str | None = None) -> RequestOutput:
        """What the user gets."""
        if self.detokenizer is not None:
            self.detokenizer.finish()
        return RequestOutput(
            request_id=self.request_id,
            prompt_token_ids=tuple(self.prompt_ids),
            token_ids=tuple(self.token_ids[self.num_prompt_tokens :]),
            text=self.detokenizer.text if self.detokenizer is not None else "",
            logprobs=tuple(self.logprobs) if self.params.logprobs else None,
            finish_reason=finish_reason,
            sources=tuple(self.sources),
            drafters=tuple(self.drafters),
            stats=self.stats,
            error=error,
        )


@dataclass(frozen=True)
class Batch:
    """The requests of one step, B of them.

    Attributes:
        requests: read token_ids and block_table; do not write.
        num_draft_tokens: proposals wanted for each, 0..num_speculative_tokens.
        num_speculative_tokens: K, columns of a proposal.
        backend: of the kernels.
    """

    requests: list[Request]
    num_draft_tokens: list[int]
    num_speculative_tokens: int
    device: torch.device
    backend: str = "auto"

    @cached_property
    def all_greedy(self) -> bool:
        return all(request.params.temperature == 0 for request in self.requests)

    @cached_property
    def sampling(self) -> SamplingTensors:
        """For target and draft rows alike, [B] each."""
        return {
            "temperature": self._values("temperature", torch.float32, off=1.0),
            "top_k": self._values("top_k", torch.int32, off=0),
            "top_p": self._values("top_p", torch.float32, off=1.0),
            "min_p": self._values("min_p", torch.float32, off=0.0),
        }

    @cached_property
    def seeds(self) -> Tensor:
        """[B] int64."""
        return self._tensor([request.seed for request in self.requests], torch.int64)

    @cached_property
    def positions(self) -> Tensor:
        """[B] int64, committed lengths; with seed and stream they name a step's random numbers."""
        return self._tensor([len(request.token_ids) for request in self.requests], torch.int64)

    def uniforms(self, num: int, stream: int) -> Tensor:
        """[B, num] float32 random numbers of this step, others for each stream."""
        return uniform(self.seeds, self.positions, num, stream, backend=self.backend)

    def _values(self, name: str, dtype: torch.dtype, off: float) -> Tensor | None:
        values = [getattr(request.params, name) for request in self.requests]
        return None if all(value == off for value in values) else self._tensor(values, dtype)

    def _tensor(self, values: list, dtype: torch.dtype) -> Tensor:
        return device_tensor(values, dtype, self.device)
