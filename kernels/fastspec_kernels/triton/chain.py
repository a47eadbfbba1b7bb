"""verify_chain: statistics, a verdict per sequence, sums of the residual, the draw."""

import torch
from torch import Tensor

from fastspec_kernels.triton.chain_block import block_kernel, scales_kernel
from fastspec_kernels.triton.chain_draw import draw_kernel, residual_kernel
from fastspec_kernels.triton.chain_verdict import Chain, Verdict, verdict_kernel
from fastspec_kernels.triton.launch import launch
from fastspec_kernels.triton.slots import NO_ROWS, Params, Slots
from fastspec_kernels.triton.statistics import draft_rows, target_rows, tiles_of
from fastspec_kernels.triton.tiles import next_power_of_2, tiling_of, vector_warps


def verify_chain(
    target_logits: Tensor,
    cu_rows: Tensor,
    draft_token_ids: Tensor,
    uniform_samples: Tensor,
    draft_logits: Tensor | None,
    temperature: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    lenience: float,
    method: str,
    draft_logsumexp: Tensor | None,
    draft_token_map: Tensor | None,
    token_bitmask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launches: 3; 4 with draft_logits, 5 with method "block" as well or with draft_logsumexp.

    Those of the filters are not counted; with draft_logsumexp they run twice.
    """
    batch, num_draft = draft_token_ids.shape
    tiling = tiling_of(target_logits.shape[1])
    sampling = Params(temperature, top_k, top_p, min_p)
    target, draft = target_rows(target_logits, token_bitmask), draft_rows(draft_logits)
    is_block = method == "block"
    reads_later = draft_logsumexp is not None  # only the draft row at the rejection
    first_draft = NO_ROWS if reads_later else draft
    draft_steps = 0 if draft_logits is None or reads_later else num_draft
    slots = Slots(num_draft + 1, draft_steps, cu_rows, None)
    num_slots = batch * (num_draft + 1 + draft_steps)
    tiles = tiles_of(target, first_draft, slots, sampling, num_slots)
    num_weighed = num_draft if is_block else 1
    new = draft_token_ids.new_empty
    verdict = Verdict(
        position=new((batch,)),
        rejected=new((batch,)),
        weight=new((batch, num_weighed), dtype=torch.float32),
        draft_best=new((batch, num_weighed), dtype=torch.float32),
        ratio=new((batch, num_weighed), dtype=torch.float32),
        output_token_ids=new((batch, num_draft + 1)),
        accepted_len=new((batch,)),
        logprobs=new((batch, num_draft + 1), dtype=torch.float32),
    )
    chain = Chain(draft_token_ids, uniform_samples, draft_logsumexp, draft_token_map, num_draft)
    steps = next_power_of_2(num_draft + 1)
    rule = {
        "STEPS": steps,
        "MERGED": tiling.merged,
        "num_warps": vector_warps(steps * tiling.merged),
    }
    args = (target, draft, slots, sampling, tiles, chain, verdict)
    if is_block and draft_logits is not None:
        launch(scales_kernel, batch, *args, tiling.num_tiles, **rule)
    if not is_block:
        launch(verdict_kernel, batch, *args, float(lenience), tiling.num_tiles, **rule)

    draft_slots, draft_tiles = slots, tiles
    if reads_later:
        draft_slots = Slots(0, 1, cu_rows, verdict.rejected)
        draft_tiles = tiles_of(target, draft, draft_slots, sampling, batch)
    sums = None
    if draft_logits is not None:
        sums = new((batch * num_weighed, tiling.num_tiles), dtype=torch.int64)
    residual = (*args[:5], draft_slots, draft_tiles, chain, verdict, sums, num_weighed)
    cut = {"BLOCK": is_block, "TILE": tiling.tile, "MERGED": tiling.merged}
    if draft_logits is not None:
        launch(
            residual_kernel,
            batch * num_weighed * tiling.num_tiles,
            *residual,
            tiling.num_tiles,
            **cut,
            num_warps=tiling.tile_warps if draft_token_map is not None else tiling.statistics_warps,
        )
    if is_block:
        launch(block_kernel, batch, *args, sums, tiling.num_tiles, **rule)
    launch(draw_kernel, batch, *residual, tiling.num_tiles, **cut, num_warps=tiling.search_warps)
    return verdict.output_token_ids, verdict.accepted_len, verdict.logprobs
