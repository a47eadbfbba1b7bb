"""The target's side of a round: read uncached tokens, verify the proposed chains or trees."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, chain
from math import inf
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from fastspec.config import SpecConfig
from fastspec.drafters import Proposal
from fastspec.drafters.base import Batch, divisors, sampling_of_rows
from fastspec.drafters.logit_rules import Rows, apply_rules, without_forbidden
from fastspec.engine.acceptance import places_of, rule_inputs, verify_drafts
from fastspec.engine.outputs import Verdict
from fastspec.engine.request import EngineRequest
from fastspec.models.layout import Span, packed
from fastspec.models.runner import ModelRunner
from fastspec.models.transfer import device_tensor
from fastspec_kernels import row_stats

_STANDARD = SpecConfig()  # the standard acceptance rule


def prefill(runner: ModelRunner, requests: list[EngineRequest], most: int) -> int:
    """Cache up to `most` committed tokens in all, in order of requests; return how many.

    The last token of each request is left to be read together with its proposal.
    """
    spans, num_read = [], 0
    for request in requests:
        start = runner.paged_model.resume(request.state_key, request.num_cached)
        spans.append(request.span(start, min(len(request.token_ids) - 1 - start, most - num_read)))
        num_read += spans[-1].count
    ids, others = [], []
    for request, span in zip(requests, spans, strict=True):
        if not request.lacks_prompt_logprobs:
            ids.append(request.token_ids[span.start : span.start + span.count])
            others.append(span)
        elif span.count:
            _read_with_logprobs(runner, request, span)
    runner.prefill(ids, others)
    for request, span in zip(requests, spans, strict=True):
        request.num_cached = span.start + span.count
    return num_read


def _read_with_logprobs(runner: ModelRunner, request: EngineRequest, span: Span) -> None:
    """Cache part of a prompt, and record the log-probabilities of the tokens that follow."""
    first, end = span.start + 1, span.start + span.count
    ids = device_tensor(request.token_ids[span.start : end], torch.int64, runner.device)
    logits = runner.forward(ids, [span])
    logsumexp, _ = row_stats(logits, backend=runner.paged_model.backend)
    most, known = request.params.prompt_logprobs or 0, request.prompt_logprobs
    best = largest(logits, [most] * len(logits))
    following = request.token_ids[first : min(end + 1, request.num_prompt_tokens)]
    own = device_tensor(following, torch.int64, runner.device)
    values = logits[: len(following)].gather(1, own[:, None]).float()
    rows = zip(following, values[:, 0].tolist(), best, logsumexp.tolist(), strict=False)
    for place, (token_id, value, pairs, total) in enumerate(rows, start=first):
        if place == len(known):
            known.append({**{i: x - total for i, x in pairs}, token_id: value - total})


def largest(logits: Tensor, counts: Sequence[int]) -> list[list[tuple[int, float]]]:
    """Return each row's counts[r] most probable tokens and their logits [R, V], best first and the
    lowest ids first on ties."""
    size, most = logits.shape[1], max(counts)
    if not most:
        return [[] for _ in counts]
    best = logits.topk(min(most + 1, size))
    values, ids = best.values.float().tolist(), best.indices.tolist()
    pairs = [[*zip(*row, strict=True)] for row in zip(ids, values, strict=True)]
    # Where the next token is as probable as the last one wanted, `topk` takes any of such tokens.
    least = {
        row: own[count - 1]
        for row, (count, own) in enumerate(zip(counts, values, strict=True))
        if 0 < count < size and own[count - 1] == own[count] > -inf
    }
    if least:
        tied = logits[device_tensor([*least], torch.int64, logits.device)].float()
        bounds = device_tensor([*least.values()], torch.float32, logits.device)
        places = (tied >= bounds[:, None]).nonzero()
        for row in least:
            pairs[row] = []
        found = zip(places.tolist(), tied[tuple(places.T)].tolist(), strict=True)
        rows = [*least]
        for (place, token_id), value in found:
            pairs[rows[place]].append((token_id, value))
    ordered = (sorted(row, key=lambda pair: (-pair[1], pair[0])) for row in pairs)
    return [row[:count] for row, count in zip(ordered, counts, strict=True)]


def verify(
    runner: ModelRunner, batch: Batch, proposal: Proposal, spec: SpecConfig = _STANDARD
) -> list[Verdict]:
    """Verify the proposals in one target pass and one copy from the device.

    The pass also reads committed tokens that are not cached yet; before trees, another one does.

    Log-probabilities cost one more copy, the most probable tokens three further ones, two more
    where they are tied, and rules that read drafts on the host two. Accepted tree nodes are moved
    to follow the cached tokens. Exact unless relaxed_acceptance is above 1 or there is a synthetic
    rate; these, and method "block", are for chains only. Ranks that share the target all use what
    rank 0 accepts.

    Args:
        spec: names the acceptance rule.
    """
    requests, parents, ranks = batch.requests, proposal.parents, runner.paged_model.ranks
    # Read what is unread of each request, its last token at least, and its proposal.
    wanted = batch.num_draft_tokens if parents is None else batch.max_nodes
    proposed, width = proposal.num_tokens or wanted, proposal.token_ids.shape[1]
    counts = [min(*pair, width) + 1 for pair in zip(wanted, proposed, strict=True)]
    if parents is not None and any(r.num_cached < len(r.token_ids) - 1 for r in requests):
        reading = cast(list[EngineRequest], requests)
        prefill(runner, reading, sum(len(request.token_ids) for request in reading))
    starts = [request.num_cached for request in requests]
    if runner.paged_model.recurrent is not None:
        starts = [runner.paged_model.resume(r.state_key, r.num_cached) for r in requests]
    unread = [r.token_ids[start:] for r, start in zip(requests, starts, strict=True)]
    sizes = [len(ids) + count - 1 for ids, count in zip(unread, counts, strict=True)]
    spans = [r.span(*span) for r, *span in zip(requests, starts, sizes, strict=True)]
    rows, reads_text = None, sizes != counts
    if reads_text:  # logits after the last token and the proposal alone
        ends = zip(accumulate(sizes), counts, strict=True)
        rows = [row for end, count in ends for row in range(end - count, end)]
    inputs = rule_inputs(spec, batch, proposal, counts)
    is_plain = max(counts) == 1 and parents is None
    if is_plain:  # the pass need not wait for `ids`
        logits = runner.forward([*chain.from_iterable(unread)], spans, rows, reads_text=reads_text)
    newest = [ids[-1] for ids in unread]
    newest_ids = device_tensor(newest, torch.int32, batch.device)
    ids = torch.cat([newest_ids[:, None], proposal.token_ids], dim=1)  # [B, 1 + N]
    if parents is not None:
        parents = pad(parents.masked_fill(proposal.token_ids < 0, -1), (1, 0), value=-1)
    if not is_plain:
        readable = ids.clamp(0, runner.vocab_size - 1).long()
        readable = readable.view(-1) if min(counts) == width + 1 else packed(readable, counts)
        if rows is not None:
            earlier = [ids[:-1] for ids in unread]
            known = device_tensor([*chain.from_iterable(earlier)], torch.int64, batch.device)
            parts = known.split([*map(len, earlier)]), readable.split(counts)
            readable = torch.cat([*chain.from_iterable(zip(*parts, strict=True))])
        logits = runner.forward(readable, spans, rows, parents, reads_text)  # [T, V]
    if proposal.on_target_logits is not None:
        proposal.on_target_logits(logits, counts)

    # Apply the requests' logit rules, then the acceptance rule.
    bitmask, dead = None, []
    has_rules = any(request.rules is not None for request in requests)
    if has_rules:
        logits, bitmask, dead = _ruled(batch, logits, Rows(*places_of(counts), ids, parents))
    given = batch, proposal, logits, counts, spans, ids, parents, bitmask  # a `Pass` if rows fail
    verdicts = _accepted(runner, spec, inputs, *given)
    if ranks is not None and has_rules:
        dead = ranks.all_gather_objects(dead)[0]
    if any(verdict.accepted_len < 0 and verdict.num_draft_tokens for verdict in verdicts):
        dead += _accept_up_to_non_finite_rows(runner, spec, verdicts, Pass(*given))
    for b, node in dead:  # the draft is accepted up to there; the request fails in the next step
        verdicts[b] = _cut_after(verdicts[b], node)
    if any(request.params.logprobs for request in requests):
        _add_best(verdicts, logits, counts, batch, bitmask)
    return verdicts


class Pass(NamedTuple):
    """A pass of the target over proposals, whose logits obey the rules of the requests.

    Attributes:
        logits: [T, V], packed: counts[b] rows of request b.
        ids, parents: [B, N] int32, node 0 is the last committed token; parents None = chains.
        bitmask: [T, ceil(V/32)] int32 of the allowed tokens; None = all.
    """

    batch: Batch
    proposal: Proposal
    logits: Tensor
    counts: list[int]
    spans: list[Span]
    ids: Tensor
    parents: Tensor | None
    bitmask: Tensor | None

    def without_non_finite_rows(self, places: list[int]) -> tuple["Pass", list[tuple[int, int]]]:
        """The part of some requests, and the place of each row after drafts that has no best token.

        That is the request in the part and the node. Such a row is 0 in the part: verification
        reads rows that it may not reach, and what is accepted ends before its token.
        """
        first = [*accumulate(self.counts, initial=0)]
        chosen = [row for b in places for row in range(first[b], first[b + 1])]
        counts = [self.counts[b] for b in places]
        rows = device_tensor(chosen, torch.int64, self.batch.device)
        index = device_tensor(places, torch.int64, self.batch.device)
        logits = self.logits[rows]
        bitmask = None if self.bitmask is None else self.bitmask[rows]
        parents = None if self.parents is None else self.parents[index]
        best = without_forbidden(logits.float(), bitmask).amax(dim=-1)  # NaN where a row holds one
        owners, nodes = places_of(counts)
        fits = best.isfinite().tolist()
        non_finite = [row for row, node in enumerate(nodes) if node and not fits[row]]
        logits[non_finite] = 0
        if bitmask is not None:
            bitmask[non_finite] = -1
        batch, proposal = self.batch.at(places), self.proposal.at(places)
        spans = [self.spans[b] for b in places]
        own = Pass(batch, proposal, logits, counts, spans, self.ids[index], parents, bitmask)
        return own, [(owners[row], nodes[row]) for row in non_finite]


def _accepted(
    runner: ModelRunner,
    spec: SpecConfig,
    inputs: tuple[Tensor, ...],
    batch: Batch,
    proposal: Proposal,
    logits: Tensor,
    counts: list[int],
    spans: list[Span],
    ids: Tensor,
    parents: Tensor | None,
    bitmask: Tensor | None,
) -> list[Verdict]:
    """Apply the acceptance rule to a `Pass`, compact trees, and copy the results to the host.

    inputs: see `rule_inputs`.
    """
    ranks, width = runner.paged_model.ranks, ids.shape[1]
    verified = verify_drafts(spec, inputs, batch, proposal, logits, ids, parents, bitmask)
    output_ids, accepted_len, logprobs, path = verified
    columns = [accepted_len[:, None], output_ids, ids]
    columns += [] if path is None else [path, parents]
    table = torch.cat(columns, dim=1)  # for one copy
    if ranks is not None:
        table = ranks.broadcast(table)
        accepted_len = table[:, 0].contiguous()
        path = None if path is None else table[:, 1 + 2 * width : 1 + 3 * width]
    if path is not None:
        runner.compact(spans, path, accepted_len)
    rows = table.tolist()
    wants_logprobs = any(request.params.logprobs is not None for request in batch.requests)
    if ranks is not None and wants_logprobs:
        logprobs = ranks.broadcast(logprobs)
    values = logprobs.tolist() if wants_logprobs else [None] * len(counts)
    verdicts = []
    for row, count, own_values in zip(rows, counts, values, strict=True):
        tokens, nodes, *tree = (row[i : i + width] for i in range(1, len(row), width))
        verdicts.append(verdict_of(row[0], tokens, nodes[:count], *tree, logprobs=own_values))
    return verdicts


def _accept_up_to_non_finite_rows(
    runner: ModelRunner, spec: SpecConfig, verdicts: list[Verdict], whole: Pass
) -> list[tuple[int, int]]:
    """Verify requests that failed once more, up to target rows that hold NaN behind their drafts.

    Plain decoding might end the text before it gets there, and must find the same tokens on its
    way: what was drawn before counts. Changes their verdicts, and returns the nodes that nothing
    may follow.
    """
    failed = [b for b, verdict in enumerate(verdicts) if verdict.accepted_len < 0]
    part, non_finite = whole.without_non_finite_rows(failed)
    inputs = rule_inputs(spec, part.batch, part.proposal, part.counts)
    for b, verdict in zip(failed, _accepted(runner, spec, inputs, *part), strict=True):
        verdicts[b] = verdict
    if (ranks := runner.paged_model.ranks) is not None:
        non_finite = ranks.all_gather_objects(non_finite)[0]
    return [(failed[place], node) for place, node in non_finite]


def _ruled(
    batch: Batch, logits: Tensor, rows: Rows
) -> tuple[Tensor, Tensor | None, list[tuple[int, int]]]:
    """Apply the requests' rules: logits, allowed tokens, and draft nodes that nothing may follow.

    If nothing may follow a request's text, its row becomes NaN, and its rules keep the reason.
    """
    texts, rules = zip(*((r.token_ids, r.rules) for r in batch.requests), strict=True)
    logits, bitmask, failures = apply_rules(texts, rules, logits, rows, batch.backend)
    dead = []
    for row, failure in failures.items():
        place = rows.requests[row], rows.nodes[row]
        if place[1]:
            dead.append(place)
        else:
            rules[place[0]].failure = failure
            logits[row] = torch.nan
    return logits, bitmask, dead


def _add_best(
    verdicts: list[Verdict],
    target_logits: Tensor,
    counts: list[int],
    batch: Batch,
    token_bitmask: Tensor | None,
) -> None:
    """Add the most probable tokens at each position to the verdicts of requests that want them."""
    first, rows, owners, own, nums = [*accumulate(counts, initial=0)], [], [], [], []
    for b, (request, verdict) in enumerate(zip(batch.requests, verdicts, strict=True)):
        if request.params.logprobs and verdict.accepted_len >= 0:
            path = verdict.path or range(1, verdict.accepted_len + 1)
            rows += [first[b] + node for node in (0, *path)][: len(verdict.output_ids)]
            owners += [b] * len(verdict.output_ids)
            own += verdict.output_ids
            nums += [request.params.logprobs] * len(verdict.output_ids)
    if not rows:
        return
    chosen, chosen_owners = device_tensor([rows, owners], torch.int64, batch.device)
    mask = None if token_bitmask is None else token_bitmask[chosen]
    logits, sampling = target_logits[chosen], sampling_of_rows(batch.sampling, chosen_owners)
    kept = {**sampling, "token_bitmask": mask, "backend": batch.backend}
    logsumexp, threshold = row_stats(logits, **kept)
    if (temperature := sampling["temperature"]) is not None:
        threshold = threshold.masked_fill(temperature == 0, -torch.inf)
    scale = divisors(temperature)
    scale = torch.ones_like(logsumexp) if scale is None else scale
    own_ids = device_tensor(own, torch.int64, batch.device)[:, None]
    columns = [scale, logsumexp, threshold, logits.gather(1, own_ids)[:, 0].float()]
    best = largest(without_forbidden(logits, mask), nums)
    for b, pairs, row in zip(owners, best, torch.stack(columns, dim=1).tolist(), strict=True):
        verdict, (divisor, total, least, own_logit) = verdicts[b], row
        assert verdict.logprobs is not None
        place = len(verdict.top_logprobs)
        own_logprob = verdict.logprobs[place]
        # Relative to the token's own, or rounding might change their order.
        known, total = (own_logit, -own_logprob) if own_logprob > -inf else (0.0, total)
        top = {i: (x - known) / divisor - total for i, x in pairs if x >= least and x > -inf}
        top[verdict.output_ids[place]] = own_logprob
        verdict.top_logprobs.append(top)


def _cut_after(verdict: Verdict, node: int) -> Verdict:
    """Cut a verdict after a node whose row is unusable, if that node was accepted."""
    path = [0, *(verdict.path or range(1, verdict.accepted_len + 1))]
    if verdict.accepted_len < 0 or node not in path:
        return verdict
    kept = path.index(node)
    return replace(
        verdict,
        accepted_len=kept,
        output_ids=verdict.output_ids[:kept],
        logprobs=verdict.logprobs and verdict.logprobs[:kept],
        path=verdict.path[:kept],
    )


def verdict_of(
    accepted_len: int,
    output_ids: Sequence[int],
    token_ids: Sequence[int],
    path: Sequence[int] = (),
    parents: Sequence[int] = (),
    logprobs: list[float] | None = None,
) -> Verdict:
    """Build the verdict on a request's proposal; all but `token_ids` may be padded.

    Args:
        token_ids: the last committed token and the proposed ones that were read, -1 where there is
            none.
        path, parents: of a tree, see `fastspec_kernels.verify_tree`; empty for chains.
    """
    emitted, tree_ids = accepted_len + 1, ()
    if parents:
        path, parents = path[: max(accepted_len, 0)], parents[: len(token_ids)]
        depths = [0]  # of each node; -1 where there is none
        for parent in parents[1:]:
            depths.append(depths[parent] + 1 if parent >= 0 and depths[parent] >= 0 else -1)
        proposed, is_whole = max(depths), [0, *path][-1] not in parents
        tree_ids = token_ids
    else:
        drafts = token_ids[1:]
        proposed = next((i for i, token in enumerate(drafts) if token < 0), len(drafts))
        is_whole = accepted_len == proposed
    source = ("bonus" if is_whole else "recovered") if proposed else "target"
    return Verdict(
        num_draft_tokens=proposed,
        accepted_len=accepted_len,
        output_ids=list(output_ids[:emitted]),
        logprobs=logprobs and logprobs[:emitted],
        extra_source=source,
        token_ids=tuple(tree_ids),
        parents=tuple(parents),
        path=tuple(path),
    )
