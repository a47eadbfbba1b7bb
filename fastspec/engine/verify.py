"""The target's side of a round: read what is missing, judge the proposals, chains or trees."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import pad

from fastspec.drafters import Proposal
from fastspec.drafters.base import VERIFY_STREAM, Batch
from fastspec.drafters.draft_model import of_rows
from fastspec.drafters.logit_rules import Rows, apply_rules, without_forbidden
from fastspec.engine.coupled import judge_coupled
from fastspec.engine.outputs import Verdict
from fastspec.engine.request import EngineRequest
from fastspec.engine.synthetic import judge_synthetic
from fastspec.models.layout import Span, packed
from fastspec.models.runner import ModelRunner
from fastspec.models.transfer import device_tensor
from fastspec_kernels import row_stats, uniform, verify_chain, verify_tree


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
    triples = list(zip(requests, spans, ends, strict=True))
    others = [triple for triple in triples if not triple[0].lacks_prompt_logprobs]
    for request, span in zip(requests, spans, strict=True):
        if request.lacks_prompt_logprobs and span.count:
            _read_with_logprobs(runner, request, span)
    ids = [request.token_ids[span.start : end] for request, span, end in others]
    runner.prefill(ids, [span for _, span, _ in others])
    for request, _, end in triples:
        request.num_cached = end
    return num_read


def _read_with_logprobs(runner: ModelRunner, request: EngineRequest, span: Span) -> None:
    """Cache a part of a prompt, and keep how likely each token after it was."""
    first, end = span.start + 1, span.start + span.count
    ids = device_tensor(request.token_ids[span.start : end], torch.int64, runner.device)
    logits = runner.forward(ids, [span])
    logsumexp, _ = row_stats(logits, backend=runner.paged_model.backend)
    most, known = min(request.params.prompt_logprobs or 0, logits.shape[1]), request.prompt_logprobs
    best, best_ids = logits.topk(most)
    following = request.token_ids[first : min(end + 1, request.num_prompt_tokens)]
    own = device_tensor(following, torch.int64, runner.device)
    values = logits[: len(following)].gather(1, own[:, None]).float()
    columns = [values - logsumexp[: len(following), None], best.float() - logsumexp[:, None]]
    values, best = (column.tolist() for column in columns)
    rows = zip(following, values, best_ids.tolist(), best, strict=False)
    for place, (token_id, (value,), row_ids, row) in enumerate(rows, start=first):
        if place == len(known):
            known.append({**dict(zip(row_ids, row, strict=True)), token_id: value})


def verify(
    runner: ModelRunner,
    batch: Batch,
    proposal: Proposal,
    method: str = "standard",
    lenience: float = 1.0,
    synthetic_rate: float | None = None,
) -> list[Verdict]:
    """Judge the proposals in one target pass; a round's only copy from the device is made here.

    What is accepted of a tree is moved behind the cached tokens. Exact unless lenience is above 1
    or there is a synthetic rate; these, and method "block", are for chains only. Another copy is
    made for requests that want the best tokens' log-probabilities, and for rules that read drafts
    on the host. Of ranks that share the target all take what rank 0 accepts.
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
    token_bitmask, dead = None, {}
    has_rules = any(request.rules is not None for request in batch.requests)
    if has_rules or method == "coupled":  # the request and the node that each row stands after
        owners = [b for b, count in enumerate(counts) for _ in range(count)]
        nodes = [node for count in counts for node in range(count)]
    else:
        owners, nodes = [], []
    if has_rules:
        texts, rules = zip(*((r.token_ids, r.rules) for r in batch.requests), strict=True)
        judged_rows = Rows(owners, nodes, ids, parents)
        target_logits, token_bitmask, dead = apply_rules(
            texts, rules, target_logits, judged_rows, batch.backend
        )
        for row in [row for row in dead if nodes[row] == 0]:
            rules[owners[row]].failure = dead.pop(row)
            target_logits[row] = torch.nan
    given = {**batch.sampling, "token_bitmask": token_bitmask, "backend": batch.backend}
    path = ids[:, :0]
    drafts = {
        "draft_logits": proposal.draft_logits,
        "draft_token_map": proposal.draft_token_map,
    }
    if method == "coupled":
        places = device_tensor([owners, nodes], torch.int64, batch.device)
        judged = judge_coupled(target_logits, places, ids, parents, batch, token_bitmask)
        path, output_ids, accepted_len, logprobs = judged
    elif parents is None:
        judged = target_logits, cu_rows, proposal.token_ids
        uniforms = _uniforms(batch, batch.num_speculative_tokens)
        if synthetic_rate is not None:
            given = batch.sampling, token_bitmask, batch.backend
            judged = judge_synthetic(*judged, uniforms, synthetic_rate, *given)
        else:
            given |= {"lenience": lenience, "method": method, **drafts}
            judged = verify_chain(*judged, uniforms, **given)
        output_ids, accepted_len, logprobs = judged
    else:
        uniforms = _uniforms(batch, ids.shape[1])
        given |= {"sibling_rule": proposal.sibling_rule, **drafts}
        judged = verify_tree(target_logits, cu_rows, ids, parents, uniforms, **given)
        path, output_ids, accepted_len, logprobs = judged
    if parents is None:
        table = torch.cat([accepted_len[:, None], output_ids, proposal.token_ids], dim=1)
    else:
        lens = accepted_len[:, None].expand_as(output_ids)
        table = torch.stack([lens, path, output_ids, ids, parents], dim=1)
    ranks = runner.paged_model.ranks
    if ranks is not None:
        table = ranks.of_first(table)
        if parents is not None:
            path, accepted_len = table[:, 1].contiguous(), table[:, 0, 0].contiguous()
    if parents is not None:
        runner.compact(spans, path, accepted_len)
    table = table.tolist()
    if ranks is not None and has_rules:
        dead = ranks.all_of([*dead])[0]
    wants_logprobs = any(request.params.logprobs is not None for request in batch.requests)
    if ranks is not None and wants_logprobs:
        logprobs = ranks.of_first(logprobs)
    logprob_rows = logprobs.tolist() if wants_logprobs else [None] * len(table)
    verdicts = []
    for row, count, values in zip(table, counts, logprob_rows, strict=True):
        if parents is not None:
            verdicts.append(tree_verdict(row, count, values))
            continue
        drafts, emitted = row[width + 2 :][: count - 1], row[0] + 1
        proposed = next((i for i, token in enumerate(drafts) if token < 0), len(drafts))
        source = "bonus" if row[0] == proposed else "recovered"
        source = source if proposed else "target"
        values = values and values[:emitted]
        verdicts.append(Verdict(proposed, row[0], row[1 : emitted + 1], values, source))
    for row in dead:  # the draft holds up to there, and then the text fails in the next step
        verdict = verdicts[owners[row]]
        reached = verdict.path[-1] if verdict.path else verdict.accepted_len
        if reached == nodes[row]:
            logprobs = verdict.logprobs and verdict.logprobs[:-1]
            kept = verdict.output_ids[:-1]
            verdicts[owners[row]] = replace(verdict, output_ids=kept, logprobs=logprobs)
    most = max(request.params.logprobs or 0 for request in batch.requests)
    if most:
        _add_best(verdicts, most, target_logits, counts, batch, token_bitmask)
    return verdicts


def _add_best(
    verdicts: list[Verdict],
    most: int,
    target_logits: Tensor,
    counts: list[int],
    batch: Batch,
    token_bitmask: Tensor | None,
) -> None:
    """Give the verdicts of requests that want them the best tokens at each of their places."""
    first, rows, owners = [*accumulate(counts, initial=0)], [], []
    for b, (request, verdict) in enumerate(zip(batch.requests, verdicts, strict=True)):
        if request.params.logprobs and verdict.accepted_len >= 0:
            path = verdict.path or range(1, verdict.accepted_len + 1)
            rows += [first[b] + node for node in (0, *path)][: len(verdict.output_ids)]
            owners += [b] * len(verdict.output_ids)
    if not rows:
        return
    chosen, chosen_owners = device_tensor([rows, owners], torch.int64, batch.device)
    mask = None if token_bitmask is None else token_bitmask[chosen]
    logits, sampling = target_logits[chosen], of_rows(batch.sampling, chosen_owners)
    kept = {**sampling, "token_bitmask": mask, "backend": batch.backend}
    logsumexp, threshold = row_stats(logits, **kept)
    best, token_ids = without_forbidden(logits.float(), mask).topk(min(most, logits.shape[1]))
    scale = sampling["temperature"]
    if scale is not None:
        threshold = threshold.masked_fill(scale == 0, -torch.inf)
        best_of = best / torch.where(scale == 0, 1.0, scale)[:, None]
    else:
        best_of = best
    logprobs = (best_of - logsumexp[:, None]).masked_fill(best < threshold[:, None], -torch.inf)
    for b, ids, values in zip(owners, token_ids.tolist(), logprobs.tolist(), strict=True):
        verdict, num = verdicts[b], batch.requests[b].params.logprobs
        assert verdict.logprobs is not None
        place = len(verdict.top_logprobs)
        pairs = zip(ids[:num], values, strict=False)
        top = {token_id: value for token_id, value in pairs if value > -torch.inf}
        top[verdict.output_ids[place]] = verdict.logprobs[place]
        verdict.top_logprobs.append(top)


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


def tree_verdict(
    row: Sequence[Sequence[int]], count: int, logprobs: list[float] | None = None
) -> Verdict:
    """The verdict on a tree: accepted_len, path, output ids, tokens and parents of its nodes.

    Args:
        row: those five, each as long as the longest, of which the first `count` nodes were read.
    """
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
        list(output_ids[:emitted]),
        logprobs and logprobs[:emitted],
        extra_source if max(depths) else "target",
        tuple(token_ids[:count]),
        tuple(parents),
        tuple(path),
    )
