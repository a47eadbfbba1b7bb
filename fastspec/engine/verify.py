"""The target's side of a round: read what is missing, judge the proposals, chains or trees."""

from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import pad

from fastspec.drafters import Proposal
from fastspec.drafters.base import VERIFY_STREAM, Batch
from fastspec.engine.outputs import Verdict
from fastspec.engine.request import EngineRequest
from fastspec.models.runner import ModelRunner, Span
from fastspec.models.token_tree import packed
from fastspec.models.transfer import device_tensor
from fastspec_kernels import uniform, verify_chain, verify_tree


def prefill(runner: ModelRunner, requests: list[EngineRequest], most: int) -> int:
    """Cache committed tokens, `most` of all requests together, the first request's first.

    The last token of each is left, which is read together with the proposals. How many were cached.
    """
    spans, num_read = [], 0
    for request in requests:
        start = runner.paged_model.resume(request.state_key, request.num_cached)
        spans.append(request.span(start, min(len(request.token_ids) - 1 - start, most - num_read)))
        num_read += spans[-1].count
    ends = [span.start + span.count for span in spans]
    pairs = list(zip(requests, spans, ends, strict=True))
    runner.prefill([r.token_ids[span.start : end] for r, span, end in pairs], spans)
    for request, _, end in pairs:
        request.num_cached = end
    return num_read


def verify(
    runner: ModelRunner,
    batch: Batch,
    proposal: Proposal,
    method: str = "standard",
    lenience: float = 1.0,
) -> list[Verdict]:
    """Judge the proposals in one target pass; a round's only copy from the device is made here.

    What is accepted of a tree is moved behind the cached tokens. Exact unless lenience is above 1;
    that, and method "block", are for chains only.
    """
    width = proposal.token_ids.shape[1]
    wanted = batch.num_draft_tokens if proposal.parents is None else batch.max_nodes
    proposed = wanted if proposal.num_tokens is None else proposal.num_tokens
    pairs = zip(wanted, proposed, strict=True)
    counts = [min(*pair, width) + 1 for pair in pairs]
    spans = [
        request.span(len(request.token_ids) - 1, count)
        for request, count in zip(batch.requests, counts, strict=True)
    ]
    newest = [[request.token_ids[-1]] for request in batch.requests]
    newest_ids = device_tensor(newest, torch.int32, batch.device)
    ids = torch.cat([newest_ids, proposal.token_ids], dim=1)  # [B, 1 + K]
    cu_rows = device_tensor([*accumulate(counts, initial=0)], torch.int32, batch.device)
    readable = ids.clamp(0, runner.vocab_size - 1).long()
    readable = readable.view(-1) if min(counts) == width + 1 else packed(readable, counts)
    parents = proposal.parents
    if parents is not None:
        parents = pad(parents.masked_fill(proposal.token_ids < 0, -1), (1, 0), value=-1)
    rows = None
    if runner.paged_model.recurrent is not None:
        readable, spans, rows = _after_reread(runner, batch, readable, counts)
    target_logits = runner.forward(readable, spans, rows, parents)
    if proposal.on_judged is not None:
        proposal.on_judged(target_logits, counts)
    given = {"draft_logits": proposal.draft_logits, **batch.sampling, "backend": batch.backend}
    if parents is None:
        uniforms = _uniforms(batch, batch.num_speculative_tokens)
        rule = {"lenience": lenience, "method": method}
        output_ids, accepted_len, logprobs = verify_chain(
            target_logits, cu_rows, proposal.token_ids, uniforms, **given, **rule
        )
        judged = torch.cat([accepted_len[:, None], output_ids, proposal.token_ids], dim=1)
    else:
        rule, uniforms = proposal.sibling_rule, _uniforms(batch, ids.shape[1])
        assert rule is not None
        path, output_ids, accepted_len, logprobs = verify_tree(
            target_logits, cu_rows, ids, parents, uniforms, sibling_rule=rule, **given
        )
        runner.compact(spans, path, accepted_len)
        lens = accepted_len[:, None].expand_as(path)
        judged = torch.stack([lens, path, output_ids, ids, parents], dim=1)
    table = judged.tolist()
    wants_logprobs = any(request.params.logprobs for request in batch.requests)
    logprob_rows = logprobs.tolist() if wants_logprobs else [None] * len(table)
    rows = zip(table, counts, logprob_rows, strict=True)
    if parents is not None:
        return [_tree_verdict(*row) for row in rows]
    verdicts = []
    for row, count, row_logprobs in rows:
        accepted_len, drafts = row[0], row[width + 2 :][: count - 1]
        proposed = next((i for i, token in enumerate(drafts) if token < 0), len(drafts))
        emitted = accepted_len + 1
        source = "bonus" if accepted_len == proposed else "recovered"
        source = source if proposed else "target"
        logprobs = row_logprobs and row_logprobs[:emitted]
        verdicts.append(Verdict(proposed, accepted_len, row[1 : emitted + 1], logprobs, source))
    return verdicts


def _after_reread(
    runner: ModelRunner, batch: Batch, token_ids: Tensor, counts: list[int]
) -> tuple[Tensor, list[Span], list[int]]:
    """Tokens to judge [T] behind those after the last state kept; their spans, and their rows."""
    parts, spans, rows, end = [], [], [], 0
    for request, new, count in zip(batch.requests, token_ids.split(counts), counts, strict=True):
        last = len(request.token_ids) - 1
        start = runner.paged_model.resume(request.state_key, last)
        parts += [device_tensor(request.token_ids[start:last], torch.int64, batch.device), new]
        spans.append(request.span(start, last - start + count))
        end += last - start + count
        rows += range(end - count, end)
    return torch.cat(parts), spans, rows


def _uniforms(batch: Batch, num: int) -> Tensor:
    """[B, N + 1]: a number for each of N proposals, and last that of the extra token, the K-th.

    K is the request's own: it gets the same token whatever else is proposed in the batch.
    """
    most, own_limits = batch.num_speculative_tokens, batch.own_limits
    seeds, lengths = batch.keys
    numbers = uniform(seeds, lengths, max(num, most) + 1, VERIFY_STREAM, backend=batch.backend)
    if num == most and own_limits is None:
        return numbers
    limits = own_limits or [most] * len(batch.requests)
    extra = device_tensor(limits, torch.int64, batch.device)[:, None]
    places = torch.arange(num, device=batch.device)
    return numbers.gather(1, torch.cat([places + (places >= extra), extra], dim=1))


def _tree_verdict(row: list[list[int]], count: int, logprobs: list[float] | None) -> Verdict:
    (accepted_len, *_), path, output_ids, token_ids, parents = row
    emitted = accepted_len + 1
    parents, path = parents[:count], path[: max(accepted_len, 0)]
    depths = [0]  # of each node; -1 where there is none
    for parent in parents[1:]:
        depths.append(depths[parent] + 1 if parent >= 0 and depths[parent] >= 0 else -1)
    extra_source = "recovered" if [0, *path][-1] in parents else "bonus"
    return Verdict(
        max(depths),
        accepted_len,
        output_ids[:emitted],
        logprobs and logprobs[:emitted],
        extra_source if max(depths) else "target",
        tuple(token_ids[:count]),
        tuple(parents),
        tuple(path),
    )
