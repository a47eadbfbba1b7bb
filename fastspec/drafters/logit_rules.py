"""A request's logit rules other than temperature and filters, for every row that is verified.

A row follows a node of a tree, that is, the committed text and a path of drafted tokens. Which
tokens may come next depends on both, so target and drafters apply the rules to their rows first.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from fastspec.config import SamplingParams
from fastspec.drafters.grammar import LlguidanceGrammar
from fastspec.models.transfer import device_tensor
from fastspec_kernels import penalize

_ALWAYS = 2**31 - 1
_LARGEST_FLOAT32 = float(np.finfo(np.float32).max)
_NO_PENALTIES = (1.0, 0.0, 0.0)  # repetition, presence, frequency


class LogitRules:
    """The rules of one request.

    Args:
        params: parameters of the request.
        vocab_size: V of the target.
        num_prompt_tokens: leading tokens of its text that were given.
        ends: tokens that end its text, which min_tokens delays.
        bad_words: lists of token ids.
        allowed: bits [ceil(V/32)] int32 of the tokens that may be written at all; None = all.
        grammar: grammar that the output must match.
    Attributes:
        failure: what a processor or the grammar raised after the committed text.
    """

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        num_prompt_tokens: int,
        ends: frozenset[int],
        bad_words: Sequence[Sequence[int]] = (),
        allowed: np.ndarray | None = None,
        grammar: LlguidanceGrammar | None = None,
    ):
        self.params = params
        self.grammar = grammar
        self.allowed = allowed
        self.failure: Exception | None = None
        self._processors: Sequence[Callable] = params.logits_processors or ()
        self._vocab_size = vocab_size
        self._num_prompt_tokens = num_prompt_tokens
        self._long_words = [list(word) for word in bad_words if len(word) > 1]
        # What the repetition penalty would take beyond float32 bans its token, as -inf does.
        least = -_LARGEST_FLOAT32 / max(1.0, params.repetition_penalty)
        given = (params.logit_bias or {}).items()
        self._bias = {i: bias if bias >= least else -np.inf for i, bias in given}
        self._bias_bans = -np.inf in self._bias.values()
        self._bias |= {word[0]: -np.inf for word in bad_words if len(word) == 1}
        ends = ends if params.min_tokens else frozenset[int]()
        self._biased_ends = sorted(ends & self._bias.keys())  # a list has one entry per token
        self._ends = ends - self._bias.keys()
        # Of `history`: how many tokens are counted, the distinct ones, and their counts.
        self._counted = 0, np.empty(0, np.int32), np.empty(0, np.int32)

    @property
    def any(self) -> bool:
        """Whether there are any rules."""
        return self.edits or self.reads_path or self.allowed is not None

    @property
    def penalties(self) -> tuple[float, float, float]:
        params = self.params
        return params.repetition_penalty, params.presence_penalty, params.frequency_penalty

    @property
    def has_penalties(self) -> bool:
        return self.penalties != _NO_PENALTIES

    @property
    def changes_rows(self) -> bool:
        """Whether `change` does anything."""
        return bool(self._processors or self._long_words or self._biased_ends)

    @property
    def edits(self) -> bool:
        """Whether single logits change: by penalties, biases or bans."""
        return self.has_penalties or bool(self._bias) or bool(self._ends)

    @property
    def reads_path(self) -> bool:
        """Whether the rules need the drafted tokens themselves, on the host."""
        return self.changes_rows or self.grammar is not None

    def history(self, token_ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return a growing text's distinct tokens, ascending, and the counts in its output."""
        start, seen, counts = self._counted
        if self.has_penalties and start < len(token_ids):
            is_output = np.arange(start, len(token_ids)) >= self._num_prompt_tokens
            ids = np.concatenate([seen, np.asarray(token_ids[start:], np.int32)])
            counts = np.concatenate([counts, is_output.astype(np.int32)])
            seen, place = np.unique(ids, return_inverse=True)
            counts = np.bincount(place, weights=counts).astype(np.int32)
            self._counted = len(token_ids), seen, counts  # at once, as an interrupt may come
        return seen, counts

    def bias(self, token_ids: list[int]) -> list[tuple[int, float, int]]:
        """Return tokens, ascending, the biases of their logits, and for how many more tokens."""
        missing = self.params.min_tokens - (len(token_ids) - self._num_prompt_tokens)
        bans = self._ends if missing > 0 else frozenset[int]()
        return [
            (i, -np.inf, missing) if i in bans else (i, self._bias[i], _ALWAYS)
            for i in sorted(self._bias.keys() | bans)
        ]

    def ends_text(self, token_id: int) -> bool:
        """Whether nothing may follow a newly committed token."""
        return self.grammar is not None and not self.grammar.advance(token_id)

    def dead_end(self, text: list[int]) -> str | None:
        """Return an error that names the options which together leave no token after a text; None
        if they leave one."""
        if self._left_after(text).any():
            return None
        params, num_new = self.params, len(text) - self._num_prompt_tokens
        taking_part = {
            "structured_outputs": self.grammar is not None,
            "allowed_token_ids": self.allowed is not None,
            "bad_words": bool(params.bad_words),
            "logit_bias": self._bias_bans,
            "min_tokens": num_new < params.min_tokens,
        }
        first, *others = [name for name, takes_part in taking_part.items() if takes_part]
        together = f"with {' and '.join(others)}, " if others else ""
        where = f" after token {num_new} of the output" if num_new else ""
        return f"{first}: {together}no token is left to write{where}"

    def _left_after(self, text: list[int]) -> np.ndarray:
        """Return whether the rules, other than processors, leave each token [V] after a text."""
        words = np.full(-(-self._vocab_size // 32), -1, np.int32)
        if self.grammar is not None:
            self.grammar.mask_after([], words)
        if self.allowed is not None:
            words &= self.allowed
        bits = np.unpackbits(words.view(np.uint8), count=self._vocab_size, bitorder="little")
        is_left = bits.astype(bool)
        banned = {i for i, bias in self._bias.items() if bias == -np.inf}
        if len(text) - self._num_prompt_tokens < self.params.min_tokens:
            banned |= {*self._ends, *self._biased_ends}
        banned |= {last for *start, last in self._long_words if text[-len(start) :] == start}
        is_left[[i for i in banned if 0 <= i < self._vocab_size]] = False
        return is_left

    def change(self, text: list[int], path: list[int], row: Tensor) -> None:
        """Ban the last tokens of bad words, and apply the processors to a row [V] float32.

        Raises:
            Exception: whatever a processor raises; ValueError for scores of another shape.
        """
        prefix = text + path
        if len(prefix) - self._num_prompt_tokens < self.params.min_tokens:
            row[[i for i in self._biased_ends if i < len(row)]] = -torch.inf
        for *start, last in self._long_words:
            if prefix[-len(start) :] == start and last < len(row):
                row[last] = -torch.inf
        if not self._processors:
            return
        input_ids = device_tensor([prefix], torch.int64, row.device)
        # A draft model may lack the last tokens of the target.
        scores = pad(row, (0, self._vocab_size - len(row)), value=-torch.inf)[None].clone()
        shape = tuple(scores.shape)
        for processor in self._processors:
            scores = processor(input_ids, scores)
            if not isinstance(scores, Tensor) or tuple(scores.shape) != shape:
                got = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
                raise ValueError(f"expected scores of shape {shape}, got {got}")
        row.copy_(scores[0, : len(row)])


class Rows(NamedTuple):
    """Rows of logits, and the tree node that each follows.

    Attributes:
        requests: [R] each row's request, by its index in the batch.
        nodes: [R] each row's node in the request's tree.
        token_ids: [B, N] int32; node 0 is the last committed token.
        parents: [B, N] int32, as for `fastspec_kernels.build_tree`; None = chains.
    """

    requests: list[int]
    nodes: list[int]
    token_ids: Tensor
    parents: Tensor | None = None


def apply_rules(
    texts: Sequence[list[int]],
    rules: Sequence[LogitRules | None],
    logits: Tensor,
    rows: Rows,
    backend: str,
) -> tuple[Tensor, Tensor | None, dict[int, Exception | None]]:
    """Apply the rules of a batch's requests to logits [R, V], and find the tokens allowed.

    Penalties, biases, bans and min_tokens never wait for the device; processors, grammars and bad
    words of several tokens copy the drafted tokens to the host, and read the rows.

    Args:
        texts: the committed tokens of each request.
        rules: rules of each request; None = none.
        logits: changed in place if they are float32.
    Returns:
        Logits, float32 if any row of the batch may change; [R, ceil(V/32)] int32 with the bits of
        the allowed tokens, None if all are; and the rows where no token can be drawn, after the
        text or after drafted tokens, each with what a processor or grammar raised. Their logits are
        0 and allowed, because verification reads rows that it may not reach.
    """
    known = [rule for rule in rules if rule is not None]
    if any(rule.edits or rule.changes_rows for rule in known):
        logits = logits.float()
    logits = _edited(texts, rules, logits, rows, backend)
    reading = any(rule.reads_path for rule in known)
    if not reading and all(rule.allowed is None for rule in known):
        return logits, None, {}
    token_ids = rows.token_ids.tolist() if reading else []
    parents = rows.parents.tolist() if reading and rows.parents is not None else None
    words = np.full((len(rows.nodes), -(-logits.shape[1] // 32)), -1, np.int32)
    dead: dict[int, Exception | None] = {}
    read: list[int] = []
    for row, (b, node) in enumerate(zip(rows.requests, rows.nodes, strict=True)):
        rule = rules[b]
        if rule is None:
            continue
        if rule.reads_path:
            path = _path(token_ids[b], parents[b] if parents is not None else None, node)
            if path and not 0 <= min(path) <= max(path) < logits.shape[1]:
                continue  # a row that cannot be reached
            read.append(row)
            try:
                if rule.changes_rows:
                    rule.change(texts[b], path, logits[row])
                if rule.grammar is not None:
                    rule.grammar.mask_after(path, words[row])
            except Exception as error:  # third-party code: an error must not end other requests
                dead[row] = error
        if rule.allowed is not None:
            words[row] &= rule.allowed[: words.shape[1]]
    bitmask = None
    if any(rule.allowed is not None or rule.grammar is not None for rule in known):
        bitmask = device_tensor(words, torch.int32, logits.device)
    if read:
        places = device_tensor(read, torch.int64, logits.device)
        left = without_forbidden(logits[places], None if bitmask is None else bitmask[places])
        is_left = (left > -torch.inf).any(1).tolist()
        for row in [row for row, lives in zip(read, is_left, strict=True) if not lives]:
            dead.setdefault(row, None)
    for row in dead:
        logits[row] = 0.0
        if bitmask is not None:
            bitmask[row] = -1
    return logits, bitmask, dead


def without_forbidden(logits: Tensor, token_bitmask: Tensor | None) -> Tensor:
    """Return logits [R, V] with -inf for the tokens whose bit is not set."""
    if token_bitmask is None:
        return logits
    token = torch.arange(logits.shape[1], device=logits.device)
    bits = token_bitmask[:, token // 32] >> (token % 32).int()
    return logits.masked_fill(bits & 1 == 0, -torch.inf)


def _edited(
    texts: Sequence[list[int]],
    rules: Sequence[LogitRules | None],
    logits: Tensor,
    rows: Rows,
    backend: str,
) -> Tensor:
    """Apply biases and penalties to logits."""
    if not any(rule is not None and rule.edits for rule in rules):
        return logits
    nothing = np.empty(0, np.int32)
    histories, biases, factors = [], [], []
    for text, rule in zip(texts, rules, strict=True):
        histories.append((nothing, nothing) if rule is None else rule.history(text))
        biases.append([] if rule is None else rule.bias(text))
        factors.append(_NO_PENALTIES if rule is None else rule.penalties)
    integers, device = torch.int32, logits.device
    ids, counts = (np.concatenate(part) for part in zip(*histories, strict=True))
    entries = [entry for bias in biases for entry in bias]
    bias_ids, values, untils = zip(*entries, strict=True) if entries else ((), (), ())
    repetition, presence, frequency = device_tensor(
        [list(column) for column in zip(*factors, strict=True)], torch.float32, device
    )
    penalize(
        logits,
        device_tensor(rows.requests, integers, device),
        device_tensor(rows.nodes, integers, device),
        rows.token_ids,
        device_tensor(np.cumsum([0, *(len(each) for each, _ in histories)]), integers, device),
        device_tensor(ids, integers, device),
        device_tensor(counts, integers, device),
        device_tensor(np.cumsum([0, *map(len, biases)]), integers, device),
        device_tensor(bias_ids, integers, device),
        device_tensor(values, torch.float32, device),
        device_tensor(untils, integers, device),
        parents=rows.parents,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        backend=backend,
    )
    return logits


def _path(token_ids: list[int], parents: list[int] | None, node: int) -> list[int]:
    """Return the drafted tokens up to a node, without the root."""
    path = []
    while node > 0:
        path.append(token_ids[node])
        node = node - 1 if parents is None else parents[node]
    return path[::-1]
