"""`csd`: cascade speculative drafting under its published signature."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fastspec.config import EngineConfig, SamplingParams, SpecConfig, is_int
from fastspec.drafters.context import DraftSource
from fastspec.engine.engine import Engine


def csd(
    draft_list: Sequence[DraftSource],
    target_model: str | Path | PreTrainedModel,
    initial_input: Tensor | Sequence[Sequence[int]],
    input_ids: Tensor | Sequence[Sequence[int]],
    k_matrix: Tensor | Sequence[Sequence[int]],
    max_length: int = 200,
    leniency: float = 1,
    *,
    lenience: float | None = None,
) -> Tensor:
    """Decode one text greedily with a cascade; the ids are those of plain greedy decoding.

    Args:
        draft_list: models, paths or hub ids, biggest first; MaG (a MagDrafter) comes last, and is
            added where k_matrix has one level more than the list.
        target_model: a decoder, or an encoder-decoder of the T5 type.
        initial_input: [1, n] ids of the prompt, which an encoder-decoder's encoder reads.
        input_ids: [1, n] ids that the decoder starts with: the prompt again, or the start token of
            an encoder-decoder.
        k_matrix: see `fastspec.drafters.CascadeDrafter`.
        max_length: new tokens at most, >= 1. The published code stops some tokens later.
        leniency: between drafts only, >= 1; the output does not depend on it.
        lenience: another name of leniency.
    Returns:
        [1, n] int64: input_ids and the new tokens, up to an end-of-sequence token.
    Raises:
        ValueError: an argument that cannot be used; the message names it.

    For several prompts, sampling or streaming use `Engine` with SpecConfig("cascade").
    Source: Chen et al., arXiv 2312.11462 (github.com/lfsszd/CS-Drafting).
    """
    if lenience is not None and leniency not in (1, lenience):
        raise ValueError(f"lenience: expected {leniency!r}, as leniency has it, got {lenience!r}")
    if not is_int(max_length) or max_length < 1:
        raise ValueError(f"max_length: expected an int >= 1, got {max_length!r}")
    prompt, begin = _row("initial_input", initial_input), _row("input_ids", input_ids)
    spec = SpecConfig(
        "cascade", k_matrix=k_matrix, lenience=leniency if lenience is None else lenience
    )
    engine = Engine(
        target_model, list(draft_list), spec=spec, config=EngineConfig(max_batch_size=1)
    )
    expected = prompt if engine.decoder_start_id is None else [engine.decoder_start_id]
    if begin != expected:
        raise ValueError(f"input_ids: expected {expected} for this target, got {begin}")
    params = SamplingParams(temperature=0, max_tokens=max_length)
    (output,) = engine.generate([prompt], params)
    if output.error is not None:
        raise ValueError(f"target_model: {output.error}")
    return torch.tensor([[*begin, *output.token_ids]])


def _row(name: str, ids: Tensor | Sequence[Sequence[int]]) -> list[int]:
    """The only row of a batch of one."""
    rows = ids.tolist() if isinstance(ids, Tensor) else ids
    if not isinstance(rows, Sequence) or len(rows) != 1 or not isinstance(rows[0], Sequence):
        raise ValueError(f"{name}: expected ids of shape [1, n], got {rows!r}")
    return list(rows[0])
