"""`csd`: cascade speculative drafting under its published signature."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast, overload

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fastspec.config import EngineConfig, SamplingParams, SpecConfig
from fastspec.config.checks import require_int
from fastspec.drafters import CascadeDrafter, Drafter, MagDrafter
from fastspec.drafters.context import DraftSource
from fastspec.engine.engine import Engine
from fastspec.engine.stats import SpecStats
from fastspec.tools.compat.cs_drafting import CSDraftingMaGModel, CSDraftingModel, StoredTarget
from fastspec.tools.simulate import Simulator

Ids = Tensor | Sequence[Sequence[int]]
# New ids, counts, seconds by level, and where the target is.
_Run = tuple[list[int], SpecStats, dict[str, float], torch.device]
_CONFIG = EngineConfig(max_batch_size=1)


@overload
def csd(*args: Any, return_stats: Literal[True], **kwargs: Any) -> tuple[Tensor, SpecStats]: ...


@overload
def csd(*args: Any, **kwargs: Any) -> Tensor: ...


def csd(
    draft_list: Sequence[DraftSource | CSDraftingModel],
    target_model: str | Path | PreTrainedModel | CSDraftingModel,
    initial_input: Ids,
    input_ids: Ids,
    k_matrix: Ids,
    max_length: int = 200,
    leniency: float = 1,
    *,
    lenience: float | None = None,
    bigram_path: str | Path | None = None,
    return_stats: bool = False,
) -> Tensor | tuple[Tensor, SpecStats]:
    """Decode one text greedily with a cascade; the ids are those of plain greedy decoding.

    Args:
        draft_list: models, paths or hub ids, biggest first; MaG (a MagDrafter or "mag") comes last,
            and is added if k_matrix has one level more than the list. The published model wrappers
            in `fastspec.compat` are also accepted; the Counted ones count their passes.
        target_model: a decoder, or an encoder-decoder of the T5 type.
        initial_input: [1, n] ids of the prompt, which an encoder-decoder's encoder reads.
        input_ids: [1, n] ids that the decoder starts with: the prompt, or the start token of an
            encoder-decoder, and any part of the output that already exists.
        k_matrix: see `fastspec.drafters.CascadeDrafter`; MaG writes as much as the published one,
            or more, see SpecConfig.mag_surplus.
        max_length: maximum number of new tokens, >= 1. The published code stops some tokens later.
        leniency: between drafts only, >= 1; the output does not depend on it.
        lenience: another name for leniency.
        bigram_path: the bigram table of the MaG that is added; by default bigram.json in the
            target's folder, if it exists.
        return_stats: also return the counters: num_steps are the target's passes, and
            num_draft_passes those of each draft model.
    Returns:
        [1, n] int64 on the target's device: input_ids and the new tokens, up to an end-of-sequence
        token.
    Raises:
        ValueError: an argument that cannot be used; the message names it.

    For several prompts, sampling or streaming, use `Engine` with SpecConfig("cascade").
    Source: Chen et al., arXiv 2312.11462 (github.com/lfsszd/CS-Drafting).
    """
    if lenience is not None and leniency not in (1, lenience):
        raise ValueError(f"lenience: expected leniency ({leniency!r}), got {lenience!r}")
    require_int("max_length", max_length, 1)
    prompt, begin = _row("initial_input", initial_input), _row("input_ids", input_ids)
    if isinstance(draft_list, str) or not isinstance(draft_list, Sequence):
        raise ValueError(f"draft_list: expected a list, got {type(draft_list).__name__}")
    drafts = [_unwrapped(f"draft_list: item {n}:", each) for n, each in enumerate(draft_list)]
    if drafts[-1:] == ["mag"]:
        drafts.pop()  # k_matrix has a level more than the list now, and adds it
    if "mag" in drafts:
        raise ValueError(f"draft_list: item {drafts.index('mag')}: 'mag' comes last")
    if bigram_path is not None and drafts and isinstance(drafts[-1], Drafter):
        raise ValueError("bigram_path: the MaG in draft_list has its own table")
    spec = SpecConfig(
        "cascade",
        k_matrix=k_matrix,
        lenience=leniency if lenience is None else lenience,
        bigram_path=bigram_path,
    )
    has_mag = len(spec.cascade_matrix) != len(drafts)
    if has_mag or any(isinstance(each, Drafter) for each in drafts):
        spec = replace(spec, mag_surplus=True)
    if bigram_path is not None and len(spec.cascade_matrix) <= len(drafts):
        raise ValueError("bigram_path: k_matrix has no level for a MaG to read it")
    if isinstance(target_model, StoredTarget):
        run = _stored(target_model, drafts, spec, prompt, begin, max_length)
    else:
        target = _unwrapped("target_model:", target_model, drafters=False)
        run = _decoded(target, drafts, spec, prompt, begin, max_length)
    token_ids, stats, seconds, device = run
    for wrapper, (name, spent) in zip(draft_list, seconds.items(), strict=False):
        if isinstance(wrapper, CSDraftingModel):
            wrapper.record(stats.num_draft_passes.get(name, 0), spent)
    if isinstance(target_model, CSDraftingModel):
        verifying = (stats.seconds[phase] for phase in ("prefill", "verify", "commit"))
        target_model.record(stats.num_steps, sum(verifying))
    ids = torch.tensor([[*begin, *token_ids]], device=device)
    return (ids, stats) if return_stats else ids


def _decoded(
    target: Any,
    drafts: list[DraftSource],
    spec: SpecConfig,
    prompt: list[int],
    begin: list[int],
    max_length: int,
) -> _Run:
    """A live run."""
    engine = Engine(target, drafts, spec=spec, config=_CONFIG)
    start = engine.decoder_start_id
    expected = prompt if start is None else [start]
    if begin[: len(expected)] != expected:
        raise ValueError(
            f"input_ids: expected to begin with {expected} for this target, got {begin}"
        )
    params = SamplingParams(temperature=0, max_tokens=max_length)
    if start is None:
        engine.add_request(begin, params)
    else:
        engine.add_request(prompt, params, decoder_input_ids=begin)
    while (output := next((e.output for e in engine.step() if e.output), None)) is None:
        pass
    if output.error is not None:
        raise ValueError(f"target_model: {output.error}")
    seconds = cast(CascadeDrafter, engine.drafter).seconds
    return [*output.token_ids], output.stats, seconds, engine.device


def _stored(
    target: StoredTarget,
    drafts: list[DraftSource],
    spec: SpecConfig,
    prompt: list[int],
    begin: list[int],
    max_length: int,
) -> _Run:
    """A run over the target's stored outputs."""
    start, output = target.first_decode_id, target.output_of(prompt)
    expected = prompt if start is None else [start]
    if begin != expected:
        raise ValueError(f"input_ids: expected {expected} for a stored target, got {begin}")
    output = output.limited(max_length)
    vocab_size = target.vocab_size
    simulator = Simulator(target.name, drafts, vocab_size, None, spec, _CONFIG, start)
    (simulation,) = simulator.run([output])
    seconds = cast(CascadeDrafter, simulator.drafter).seconds
    return output.token_ids, simulation.stats, seconds, target.device


def _unwrapped(field: str, given: Any, drafters: bool = True) -> Any:
    """The model in a published wrapper, or one without; ValueError for anything else."""
    model = given.model if isinstance(given, CSDraftingModel) else given
    if isinstance(given, CSDraftingMaGModel):
        model = MagDrafter(given.model)
    if isinstance(model, (str, Path, PreTrainedModel)) or (drafters and isinstance(model, Drafter)):
        return model
    raise ValueError(
        f"{field} expected a model, a path, a hub id{', a MagDrafter' if drafters else ''} or a"
        f" wrapper of fastspec.compat, got {type(given).__name__}"
    )


def _row(name: str, ids: Ids) -> list[int]:
    """The only row of a batch of one."""
    rows = ids.tolist() if isinstance(ids, Tensor) else ids
    if not isinstance(rows, Sequence) or len(rows) != 1 or not isinstance(rows[0], Sequence):
        raise ValueError(f"{name}: expected ids of shape [1, n], got {rows!r}")
    return list(rows[0])
