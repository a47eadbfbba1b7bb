"""The drafter protocol: the requests and batches that drafters see, and their proposals.

It depends on neither the verifier nor any other part of the engine.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import takewhile
from typing import Any, NamedTuple, Protocol, TypedDict, cast, runtime_checkable

import torch
from torch import Tensor

from fastspec.config import SamplingParams
from fastspec.config.checks import is_int
from fastspec.drafters.logit_rules import LogitRules
from fastspec.models.layout import EncoderInput, Span, StateKey
from fastspec.models.reduced_vocabulary import DraftVocabulary
from fastspec.models.transfer import device_tensor
from fastspec_kernels import sample, sample_coupled, uniform

# Streams of fastspec_kernels.uniform: drafts must not share numbers with the acceptance rule.
VERIFY_STREAM = 0
DRAFT_STREAM = 1
CASCADE_STREAM = 2

_COPY_CONTEXT = 16  # tokens of a prompt that are read again after a prediction
_SAMPLING = (
    ("temperature", torch.float32, 1.0),
    ("top_k", torch.int32, 0),
    ("top_p", torch.float32, 1.0),
    ("min_p", torch.float32, 0.0),
)
_SIBLING_RULES = ("target_only", "without_replacement", "with_replacement")


class SamplingTensors(TypedDict):
    """Sampling arguments of the kernels, one value per request; None if no request uses it."""

    temperature: Tensor | None
    top_k: Tensor | None
    top_p: Tensor | None
    min_p: Tensor | None


# What a draft model wrote by one launch or call: tokens [B, N] int32, -1 after the last, their
# logits [B, N, V'] if kept, and the number of tokens of each draft, at most N.
Drafts = tuple[Tensor, Tensor | None, list[int]]


def common_prefix_len(token_ids: Sequence[int], others: Sequence[int]) -> int:
    """How many leading tokens two sequences share."""
    pairs = zip(token_ids, others, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def divisors(temperature: Tensor | None) -> Tensor | None:
    """Return the divisors of logits, 1 for greedy rows; None if no request has a temperature."""
    return None if temperature is None else temperature.masked_fill(temperature == 0, 1.0)


def sampling_of_rows(sampling: SamplingTensors, rows: Tensor) -> SamplingTensors:
    """Return the parameters of the requests that rows of logits belong to, [R] each."""
    values = cast(dict[str, Tensor | None], sampling)
    taken = {name: None if value is None else value[rows] for name, value in values.items()}
    return cast(SamplingTensors, taken)


def draw(
    logits: Tensor,
    random_inputs: dict[str, Tensor],
    step: int,
    sampling: SamplingTensors,
    vocabulary: DraftVocabulary,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Draw a token after each row of logits [R, V']; return tokens [R] and log-probabilities.

    Args:
        random_inputs: "uniforms" [R, K] float32, or also "seeds" and "lengths" [R] int64 to draw by
            position instead.
    """
    if "seeds" not in random_inputs:
        uniforms = random_inputs["uniforms"][:, step].contiguous()
        picked, logprobs = sample(logits, uniforms, **sampling, backend=backend)
        if vocabulary.token_map is not None:
            picked = vocabulary.tokens(picked)
        return picked, logprobs
    whole = vocabulary.whole(logits)  # noise belongs to token ids, not columns
    keys = random_inputs["seeds"], random_inputs["lengths"] + step
    return sample_coupled(whole, *keys, **sampling, backend=backend)


def greedy_sampling(num: int, device: torch.device) -> SamplingTensors:
    """Return the parameters of greedy decoding for that many requests or rows."""
    zeros = torch.zeros(num, dtype=torch.float32, device=device)
    return SamplingTensors(temperature=zeros, top_k=None, top_p=None, min_p=None)


@dataclass(eq=False)
class Request:
    """The committed tokens of one request and where they are cached; read-only for drafters.

    Attributes:
        token_ids: prompt and committed tokens; for an encoder-decoder, those of its decoder.
        seed: seed of its random numbers.
        stop_ids: token ids that end the text.
        max_len: length of token_ids at which the text ends.
        encoder_input: the prompt of an encoder-decoder.
        rereads_above: length above which its model rereads the text, see `RotaryLengths`.
        rules: logit rules other than `params`; None = none.
        prediction: what the output may resemble, for drafters that copy, see `prompt_to_copy`.
        num_prompt_tokens: leading token_ids that were given.
        first_read_len: num_prompt_tokens, or the length of the text when it was last reread because
            it had outgrown rereads_above.
        block_table: its blocks, the same in the target's and the drafter's cache.
        state_key: names its states in recurrent layers; replaced when it loses its blocks.
        num_cached: leading tokens whose target keys and values are in the cache.
    """

    request_id: str
    token_ids: list[int]
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int]
    max_len: int
    encoder_input: EncoderInput | None = None
    rereads_above: int | None = None
    rules: LogitRules | None = None
    prediction: list[int] = field(default_factory=list)
    num_prompt_tokens: int = field(init=False)
    first_read_len: int = field(init=False)
    block_table: list[int] = field(default_factory=list)
    state_key: StateKey = field(default_factory=StateKey)
    num_cached: int = 0

    def __post_init__(self):
        self.num_prompt_tokens = self.first_read_len = len(self.token_ids)

    @cached_property
    def prompt_to_copy(self) -> list[int]:
        """What drafters that copy read in place of the prompt.

        Before it comes the input of an encoder; after it a prediction, and the prompt's end again.
        The output then follows the end of the prompt as the prediction does, and of equally long
        matches the latest are in the output, the next in the prediction.
        """
        prompt = self.token_ids[: self.num_prompt_tokens]
        if self.prediction:
            prompt = prompt + self.prediction + prompt[-_COPY_CONTEXT:]
        return prompt if self.encoder_input is None else self.encoder_input.token_ids + prompt

    @property
    def room(self) -> int:
        """Draft tokens that can be accepted in one step, leaving room for the token after them.

        None are verified beyond the length at which the text must be reread, until it is.
        """
        length, most = len(self.token_ids), self.max_len - 1
        if self.rereads_above is not None and length <= self.rereads_above:
            most = min(most, self.rereads_above)
        return most - length

    @property
    def must_be_reread(self) -> bool:
        """Whether the text has grown beyond `rereads_above` since it was last read."""
        limit = self.rereads_above
        return limit is not None and self.first_read_len <= limit < len(self.token_ids)

    def span(self, start: int, count: int) -> Span:
        """Return the span of `count` of its tokens, for a forward pass."""
        return Span(
            self.block_table,
            start,
            count,
            encoder_input=self.encoder_input,
            target_len=self.num_cached,
            first_read_len=self.first_read_len,
            state_key=self.state_key,
            settled_len=len(self.token_ids),
        )


@dataclass(frozen=True)
class Batch:
    """The requests of one step, B of them.

    Attributes:
        requests: see `Request`.
        num_draft_tokens: proposals wanted for each, 0..num_speculative_tokens; for a tree, on its
            longest path.
        max_nodes: maximum tree nodes of each request; for chains, its num_draft_tokens.
        num_speculative_tokens: K, the most columns of a proposal of chains.
        backend: backend of the kernels.
        own_limits: K of each request, if some ask for less; it selects random numbers.
        is_coupled: tokens are drawn by numbers tied to their position in the text, so drafts drawn
            by the same numbers are accepted more often, see `fastspec_kernels.sample_coupled`.
        num_model_tokens: what a schedule wants of the model of a `PartlyScheduled` drafter.
    """

    requests: Sequence[Request]
    num_draft_tokens: list[int]
    max_nodes: list[int]
    num_speculative_tokens: int
    device: torch.device
    backend: str = "auto"
    own_limits: list[int] | None = None
    is_coupled: bool = False
    num_model_tokens: list[int] | None = None

    def at(self, places: Sequence[int]) -> "Batch":
        """The part of the requests at these places."""
        part = {"own_limits": self.own_limits, "num_model_tokens": self.num_model_tokens}
        part |= {"num_draft_tokens": self.num_draft_tokens, "max_nodes": self.max_nodes}
        chosen = {name: v and [v[place] for place in places] for name, v in part.items()}
        return replace(self, requests=[self.requests[place] for place in places], **chosen)

    @cached_property
    def all_greedy(self) -> bool:
        return all(request.params.temperature == 0 for request in self.requests)

    @cached_property
    def sampling(self) -> SamplingTensors:
        """Sampling parameters [B] each, for target and draft rows alike."""
        tensors: dict[str, Tensor | None] = {}
        for name, dtype, off in _SAMPLING:
            values = [getattr(request.params, name) for request in self.requests]
            if len(set(values)) > 1:
                tensors[name] = device_tensor(values, dtype, self.device)
            elif values and values[0] != off:  # no copy, which would take the host longer
                size = (len(values),)
                tensors[name] = torch.full(size, values[0], dtype=dtype, device=self.device)
            else:
                tensors[name] = None
        return cast(SamplingTensors, tensors)

    @cached_property
    def keys(self) -> Tensor:
        """[2, B] int64: seeds and committed lengths, which select random numbers of a stream."""
        lengths = [len(request.token_ids) for request in self.requests]
        seeds = [request.seed for request in self.requests]
        return device_tensor([seeds, lengths], torch.int64, self.device)

    def uniforms(self, num: int, stream: int) -> Tensor:
        """Return [B, num] float32 random numbers of this step, different for each stream."""
        seeds, lengths = self.keys
        return uniform(seeds, lengths, num, stream, backend=self.backend)

    def sampling_uniforms(self, num: int, stream: int) -> Tensor:
        """Return `uniforms` to sample with; zeros if all requests are greedy, which read none."""
        if self.all_greedy:
            shape = len(self.requests), num
            return torch.zeros(shape, dtype=torch.float32, device=self.device)
        return self.uniforms(num, stream)


class Branch(NamedTuple):
    """The writer of one path of each tree, and the tokens of that path after the root."""

    writer: str
    token_ids: Sequence[Sequence[int]]


@dataclass(frozen=True)
class Proposal:
    """Draft tokens of a batch, one chain or one tree per request.

    Attributes:
        token_ids: [B, N] int32, for chains with N <= K; -1 after the last proposal of a chain, or
            for no token in a tree.
        parents: [B, N] int32, None = chains. Node 0 of a tree is the last committed token, node
            i + 1 is token_ids[:, i], and parents[:, i] < i + 1 is its parent.
        draft_logits: logits that the tokens were sampled from under the request's own sampling
            parameters, with V' up to the target's vocabulary: [B, N, V'], row i for token i of a
            chain; [B, N + 1, V'], row i for the children of node i of a tree. None if the tokens
            are point masses, that is, chosen by a deterministic rule (argmax, the k most probable,
            a match in the text).
        num_tokens: proposals in each row, for a drafter that knows them without waiting for the
            device: the target then reads no more than these. None = as many as were wanted.
        sibling_rule: how tokens with the same parent were chosen, see
            `fastspec_kernels.verify_tree`; required for trees, None for chains.
        writers: who wrote each proposal, for a drafter with several parts; None = the drafter.
        passes: for each request, the passes through each draft model in this step, by its name.
        on_target_logits: for chains only: called with the target's logits [T, V] and num_rows;
            packed, num_rows[b] rows of request b: after its last committed token and each proposal
            read.
        draft_token_map: [V] int32, the column of draft_logits for each of the target's tokens, -1
            if there is none; None = column x is token x.
        branch: for trees only: accepted tokens count as written by its writer as far as they match
            its path. The tree need not contain the whole path.
        num_asked: of a `PartlyScheduled` drafter: tokens requested of its model for each request,
            None where the proposal is not the model's.
    """

    token_ids: Tensor
    parents: Tensor | None = None
    draft_logits: Tensor | None = None
    num_tokens: list[int] | None = None
    sibling_rule: str | None = None
    writers: list[list[str]] | None = None
    passes: list[dict[str, int]] | None = None
    on_target_logits: Callable[[Tensor, list[int]], None] | None = None
    draft_token_map: Tensor | None = None
    branch: Branch | None = None
    num_asked: list[int | None] | None = None

    def at(self, places: Sequence[int]) -> "Proposal":
        """Return what the acceptance rule reads of the proposals of some requests."""
        index = device_tensor(places, torch.int64, self.token_ids.device)
        return Proposal(
            self.token_ids[index],
            None if self.parents is None else self.parents[index],
            None if self.draft_logits is None else self.draft_logits[index],
            self.num_tokens and [self.num_tokens[place] for place in places],
            self.sibling_rule,
            draft_token_map=self.draft_token_map,
        )


def check_proposal(proposal: Any, batch: Batch, vocab_size: int) -> None:
    """Check a proposal against the protocol as far as possible without reading the tokens.

    Raises:
        ValueError: a field is invalid; the message names it, what is expected and what was given.
    """
    if not isinstance(proposal, Proposal):
        raise ValueError(f"propose: expected a Proposal, got {type(proposal).__name__}")
    num_requests, num = len(batch.requests), batch.num_speculative_tokens
    is_chain = proposal.parents is None
    _check_tensor("token_ids", proposal.token_ids, (num_requests, None), {torch.int32}, batch)
    shape = _, width = proposal.token_ids.shape
    if is_chain and width > num:
        raise ValueError(f"token_ids: expected at most {num} columns, got {width}")
    if is_chain and proposal.sibling_rule is not None:
        raise ValueError(f"sibling_rule: expected None for chains, got {proposal.sibling_rule!r}")
    if not is_chain:
        _check_tensor("parents", proposal.parents, shape, {torch.int32}, batch)
        if proposal.sibling_rule not in _SIBLING_RULES:
            expected = f"one of {_SIBLING_RULES}"
            raise ValueError(f"sibling_rule: expected {expected}, got {proposal.sibling_rule!r}")
        if proposal.on_target_logits is not None:
            raise ValueError("on_target_logits: expected None for trees")
        if proposal.sibling_rule != "target_only" and proposal.draft_logits is None:
            raise ValueError(f"draft_logits: expected for {proposal.sibling_rule}, got None")
    if proposal.draft_logits is not None:
        rows = (num_requests, width if is_chain else width + 1, None)
        floats = {torch.float32, torch.bfloat16, torch.float16}
        _check_tensor("draft_logits", proposal.draft_logits, rows, floats, batch)
        if not 1 <= (columns := proposal.draft_logits.shape[-1]) <= vocab_size:
            expected = f"at most the target's {vocab_size} columns"
            raise ValueError(f"draft_logits: expected {expected}, got {columns}")
    if (token_map := proposal.draft_token_map) is not None:
        if proposal.draft_logits is None:
            raise ValueError("draft_token_map: expected None without draft_logits")
        _check_tensor("draft_token_map", token_map, (vocab_size,), {torch.int32}, batch)
        if not token_map.is_contiguous():
            raise ValueError("draft_token_map: expected a contiguous tensor")
    counts = batch.num_draft_tokens if is_chain else batch.max_nodes
    if (num_tokens := proposal.num_tokens) is not None:
        if len(num_tokens) != num_requests or not all(is_int(n) and n >= 0 for n in num_tokens):
            raise ValueError(f"num_tokens: expected {num_requests} ints >= 0, got {num_tokens!r}")
        counts = [min(pair) for pair in zip(counts, num_tokens, strict=True)]
    if (asked := proposal.num_asked) is not None:
        fits = all(num is None or (is_int(num) and num >= 0) for num in asked)
        if len(asked) != num_requests or not fits:
            expected = f"{num_requests} ints >= 0 or None"
            raise ValueError(f"num_asked: expected {expected}, got {asked!r}")
    if (writers := proposal.writers) is not None:
        lengths = [len(names) for names in writers]
        least = [min(count, width) for count in counts]
        if len(lengths) != num_requests or any(a < b for a, b in zip(lengths, least, strict=True)):
            raise ValueError(f"writers: expected names of {least} tokens, got {lengths}")
    if (branch := proposal.branch) is not None:
        paths = branch[1]
        are_paths = len(paths) == num_requests and all(isinstance(p, Sequence) for p in paths)
        if is_chain or not are_paths:
            expected = "None for chains" if is_chain else f"paths of {num_requests} requests"
            raise ValueError(f"branch: expected {expected}, got {branch!r}")
    if (passes := proposal.passes) is not None:
        are_counts = all(isinstance(each, dict) for each in passes) and all(
            type(count) is int for each in passes for count in each.values()
        )
        if len(passes) != num_requests or not are_counts:
            raise ValueError(f"passes: expected {num_requests} dicts of numbers, got {passes!r}")


def _check_tensor(
    name: str, value: Any, shape: tuple[int | None, ...], dtypes: set[torch.dtype], batch: Batch
) -> None:
    """Check a tensor of a proposal; None in its shape is any size."""
    if not isinstance(value, Tensor):
        raise ValueError(f"{name}: expected a tensor, got {type(value).__name__}")
    if value.layout is not torch.strided or value.is_nested:
        raise ValueError(f"{name}: expected a dense tensor, got a sparse or nested one")
    pairs = zip(value.shape, shape, strict=False)
    if value.dim() != len(shape) or any(size not in (given, None) for given, size in pairs):
        sizes = ", ".join("*" if size is None else str(size) for size in shape)
        raise ValueError(f"{name}: expected shape [{sizes}], got {list(value.shape)}")
    if value.dtype not in dtypes:
        expected = " or ".join(sorted(str(dtype) for dtype in dtypes))
        raise ValueError(f"{name}: expected {expected}, got {value.dtype}")
    if value.device != batch.device:
        raise ValueError(f"{name}: expected a tensor on {batch.device}, got {value.device}")


@runtime_checkable
class Drafter(Protocol):
    """Protocol of anything that proposes tokens; `name` is reported as the writer of accepted ones.

    If a method raises or a proposal is invalid, the engine decodes that step plainly, releases the
    requests, passes the error to the caller once, and asks the drafter again in the next step. If
    draft logits contain NaN or +inf, or no finite value, the proposal ends before the tokens drawn
    from them. The output distribution stays exact in both cases, unless a drafter that draws its
    tokens raises depending on what it drew.

    One that has a true attribute `copies_texts` also gets requests with a prediction, which others
    are spared: it reads `request.prompt_to_copy`. One that has a true attribute `reads_target` is
    asked only after the target has read all but the last of a text's tokens, and not for the first
    token of a sampled text; others are asked also before.
    """

    name: str

    def propose(self, batch: Batch) -> Proposal:
        """Propose up to batch.num_draft_tokens[b] tokens after each request's committed tokens."""
        ...

    def commit(self, batch: Batch, accepted: list[int]) -> None:
        """Learn of a step's end: requests have their new tokens; accepted[b] were proposed ones."""
        ...

    def release(self, request: Request) -> None:
        """Forget what was cached for a request, which has ended or lost its blocks."""
        ...


@runtime_checkable
class TreeProposer(Drafter, Protocol):
    """A drafter that proposes more tokens than can be accepted in one step.

    batch.max_nodes[b] nodes fit; no path may have more than batch.num_draft_tokens[b] tokens.
    """

    def max_nodes(self, num_speculative_tokens: int) -> int:
        """Return the maximum columns of a proposal whose paths may have that many tokens."""
        ...


@runtime_checkable
class PartlyScheduled(Drafter, Protocol):
    """A drafter of whose parts a schedule controls `model` alone, as the others cost no pass."""

    model: Drafter
    num_model_tokens: int  # K of the model; batch.num_model_tokens may be less


@runtime_checkable
class CorpusReader(Drafter, Protocol):
    """A drafter that also copies from texts passed to `Engine.add_corpus`."""

    def add_corpus(self, texts: Iterable[Sequence[int]]) -> None:
        """Add texts, as token ids."""
        ...


class NoDrafter:
    """Proposes nothing, so every step is plain decoding."""

    name = "none"

    def propose(self, batch: Batch) -> Proposal:
        shape = len(batch.requests), 0
        return Proposal(torch.empty(shape, dtype=torch.int32, device=batch.device))

    def commit(self, batch: Batch, accepted: list[int]) -> None:
        """Do nothing; there is nothing to learn."""

    def release(self, request: Request) -> None:
        """Do nothing; there is nothing to forget."""
