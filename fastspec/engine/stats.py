"""Counters of speculation, kept on the host without device synchronisation."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from typing import Any

from fastspec.config.checks import counted

PHASES = ("prefill", "propose", "verify", "commit")
FINISH_REASONS = ("stop", "length", "abort", "error")


@dataclass(repr=False)
class SpecStats:
    """Counters of speculation and caching, for one request or summed over an engine's lifetime.

    Attributes:
        num_prompt_tokens: tokens of all prompts that were started.
        num_cached_prompt_tokens: prompt tokens found in the cache, shared by samples of a prompt or
            by prefix caching.
        num_preemptions: how often a request lost its blocks and had to be reread.
        finish_reasons: number of ended requests by finish reason.
        num_steps: target passes that emitted tokens.
        num_prompt_steps: those of them that also read the end of a prompt, or of a text that had
            lost its blocks; the target's time counts as prefill.
        num_drafts: target passes that verified proposed tokens.
        num_output_tokens: tokens emitted, including the extra token of each step.
        num_draft_tokens: tokens proposed and verified; for a tree, those of its longest path.
        num_accepted_tokens: proposed tokens that were accepted and emitted.
        num_accepted_tokens_per_pos: the same, by position in the draft.
        acceptance_histogram: number of steps by number of accepted tokens, index 0 to K.
        num_draft_passes: passes through each draft model, by its name; a pass over several tokens
            counts once, a batch once for each of its requests.
        seconds: wall time by phase; for a request, of the steps that it took part in.
    """

    num_prompt_tokens: int = 0
    num_cached_prompt_tokens: int = 0
    num_preemptions: int = 0
    finish_reasons: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FINISH_REASONS, 0))
    num_steps: int = 0
    num_prompt_steps: int = 0
    num_drafts: int = 0
    num_output_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)
    acceptance_histogram: list[int] = field(default_factory=list)
    num_draft_passes: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted / proposed tokens; None if nothing was proposed."""
        if self.num_draft_tokens == 0:
            return None
        return self.num_accepted_tokens / self.num_draft_tokens

    @property
    def mean_acceptance_length(self) -> float | None:
        """Emitted tokens per target step, including the extra one; None before the first step."""
        if self.num_steps == 0:
            return None
        return self.num_output_tokens / self.num_steps

    def record_prompt(self, num_tokens: int, num_cached: int) -> None:
        """Count the start of one request."""
        self.num_prompt_tokens += num_tokens
        self.num_cached_prompt_tokens += num_cached

    def record_step(
        self, proposed: int, accepted: int, emitted: int, passes: Mapping[str, int] | None = None
    ) -> None:
        """Count one target pass of one request, and the draft model passes before it."""
        self.num_steps += 1
        self.num_drafts += proposed > 0
        self.num_output_tokens += emitted
        self.num_draft_tokens += proposed
        self.num_accepted_tokens += accepted
        per_pos, histogram = self.num_accepted_tokens_per_pos, self.acceptance_histogram
        per_pos.extend([0] * (accepted - len(per_pos)))
        histogram.extend([0] * (accepted + 1 - len(histogram)))
        histogram[accepted] += 1
        for position in range(accepted):
            per_pos[position] += 1
        for name, count in (passes or {}).items():
            self.num_draft_passes[name] = self.num_draft_passes.get(name, 0) + count

    @classmethod
    def total(cls, parts: Iterable["SpecStats"]) -> "SpecStats":
        """Return the sum of several objects' counts."""
        total = cls()
        for part in parts:
            total.add(part)
        return total

    def add(self, other: "SpecStats") -> None:
        """Add another object's counts to these."""
        for name, value in vars(other).items():
            known = getattr(self, name)
            if isinstance(value, dict):
                value = {key: known.get(key, 0) + value.get(key, 0) for key in {**known, **value}}
            elif isinstance(value, list):
                value = [sum(pair) for pair in zip_longest(known, value, fillvalue=0)]
            else:
                value += known
            setattr(self, name, value)

    def to_metrics(self) -> dict[str, Any]:
        """Return the counters under vLLM's metric names."""
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "prompt_tokens_cached": self.num_cached_prompt_tokens,
            "generation_tokens": self.num_output_tokens,
            "num_preemptions": self.num_preemptions,
            "request_success": dict(self.finish_reasons),
            "spec_decode_num_drafts": self.num_drafts,
            "spec_decode_num_draft_tokens": self.num_draft_tokens,
            "spec_decode_num_accepted_tokens": self.num_accepted_tokens,
            "spec_decode_num_accepted_tokens_per_pos": list(self.num_accepted_tokens_per_pos),
        }

    def __repr__(self) -> str:
        shown = f"{counted(self.num_output_tokens, 'token')} in {counted(self.num_steps, 'step')}"
        if self.acceptance_rate is not None:
            drafts = counted(self.num_draft_tokens, "draft token")
            shown += f", {self.num_accepted_tokens} of {drafts} accepted"
        return f"SpecStats({shown})"

    def to_dict(self) -> dict:
        """Return everything as plain JSON values, including the two ratios."""
        ratios = "acceptance_rate", "mean_acceptance_length"
        return {**asdict(self), **{name: getattr(self, name) for name in ratios}}
