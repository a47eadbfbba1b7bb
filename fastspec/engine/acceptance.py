"""Acceptance rules: which proposals the target accepts, and the token after them."""

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from fastspec.config import SpecConfig
from fastspec.drafters import Proposal
from fastspec.drafters.base import (
    VERIFY_STREAM,
    Batch,
    SamplingTensors,
    divisors,
    sampling_of_rows,
)
from fastspec.models.transfer import device_tensor
from fastspec_kernels import (
    build_tree,
    row_stats,
    sample,
    sample_coupled,
    verify_chain,
    verify_tree,
)


def rule_inputs(
    spec: SpecConfig, batch: Batch, proposal: Proposal, counts: list[int]
) -> tuple[Tensor, ...]:
    """Return what the acceptance rule reads of the batch: cu_rows and uniforms, see `verify_chain`;
    for coupled verification the places of its rows.

    They do not depend on the target, so that the host prepares them before its pass.

    Args:
        counts: rows of each request.

    The token after the accepted ones is drawn by the number after those of K tokens, so it does not
    depend on how many were proposed.
    """
    if spec.rejection_sample_method == "coupled":
        return (device_tensor(places_of(counts), torch.int64, batch.device),)
    cu_rows = device_tensor([*accumulate(counts, initial=0)], torch.int32, batch.device)
    most = batch.num_speculative_tokens
    num = proposal.token_ids.shape[1] + (proposal.parents is not None)  # a tree has a root, too
    is_synthetic = spec.synthetic_acceptance_rate is not None  # draws for greedy requests as well
    draw = batch.uniforms if is_synthetic else batch.sampling_uniforms
    uniforms = draw(max(num, most) + 1, VERIFY_STREAM)
    if batch.own_limits is not None or num > most:
        uniforms = _by_own_limits(uniforms, num, batch)
    elif num < most:  # the same numbers, without a copy from the host
        uniforms = torch.cat([uniforms[:, :num], uniforms[:, most:]], dim=1)
    return cu_rows, uniforms


def verify_drafts(
    spec: SpecConfig,
    inputs: tuple[Tensor, ...],
    batch: Batch,
    proposal: Proposal,
    logits: Tensor,
    ids: Tensor,
    parents: Tensor | None,
    bitmask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Apply the acceptance rule: output ids, accepted_len, logprobs, and for trees the path.

    Args:
        inputs: see `rule_inputs`.
        logits: [T, V], packed.
        ids, parents: [B, N], node 0 is the last committed token; parents None = chains.
    """
    if spec.rejection_sample_method == "coupled":
        (places,) = inputs
        return verify_coupled(logits, places, ids, parents, batch, bitmask)
    cu_rows, uniforms = inputs
    rate = spec.synthetic_acceptance_rate
    if rate is not None:
        synthetic = logits, cu_rows, proposal.token_ids, uniforms, rate
        return *verify_synthetic(*synthetic, batch.sampling, bitmask, batch.backend), None
    given: dict[str, Any] = {**batch.sampling, "token_bitmask": bitmask, "backend": batch.backend}
    given |= {"draft_logits": proposal.draft_logits, "draft_token_map": proposal.draft_token_map}
    if parents is not None:
        given["sibling_rule"] = proposal.sibling_rule
        verified = verify_tree(logits, cu_rows, ids, parents, uniforms, **given)
        path, output_ids, accepted_len, logprobs = verified
        return output_ids, accepted_len, logprobs, path
    # The kernels' lenience is relaxed_acceptance; SpecConfig.lenience is between drafters only.
    given |= {"lenience": spec.relaxed_acceptance, "method": spec.rejection_sample_method}
    return *verify_chain(logits, cu_rows, proposal.token_ids, uniforms, **given), None


def reads_draft_logits(spec: SpecConfig) -> bool:
    """Whether the acceptance rule depends on the draft logits."""
    is_synthetic = spec.synthetic_acceptance_rate is not None
    return spec.rejection_sample_method != "coupled" and not is_synthetic


def usable_drafts(proposal: Proposal) -> Tensor:
    """Return its token_ids, with -1 for tokens drawn from logits that hold NaN or +inf, or no
    finite value.

    Such rows depend only on the tokens before them, so drafts that end there bend no distribution.
    """
    if proposal.draft_logits is None:
        return proposal.token_ids
    is_usable = proposal.draft_logits.amax(dim=-1).isfinite()  # NaN where a row holds one
    if proposal.parents is not None:
        is_usable = is_usable.gather(1, proposal.parents.clamp(min=0).long())
    return proposal.token_ids.masked_fill(~is_usable, -1)


def places_of(counts: list[int]) -> tuple[list[int], list[int]]:
    """Return the request and the tree node that each packed row follows."""
    owners = [b for b, count in enumerate(counts) for _ in range(count)]
    return owners, [node for count in counts for node in range(count)]


def _by_own_limits(numbers: Tensor, num: int, batch: Batch) -> Tensor:
    """Return [B, N + 1]: one number for each of N proposals, and for the token after the accepted
    ones the number after those of K tokens.

    K is the request's own, so its tokens do not depend on what else the batch proposes.
    """
    limits = batch.own_limits or [batch.num_speculative_tokens] * len(batch.requests)
    extra = device_tensor(limits, torch.int64, batch.device)[:, None]
    places = torch.arange(num, device=batch.device)
    return numbers.gather(1, torch.cat([places + (places >= extra), extra], dim=1))


def verify_coupled(
    target_logits: Tensor,
    places: Tensor,
    ids: Tensor,
    parents: Tensor | None,
    batch: Batch,
    token_bitmask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Draw a token after each of T rows, and accept tree nodes as long as they match the draws.

    A token is the argmax of logit / temperature plus Gumbel noise determined by the seed and the
    position. So the text is the same with any drafter, any number of drafts, or none; and a draft
    model that reads the same noise often draws the same token. Source: Daliri, Musco and Suresh,
    "Coupling without communication and drafter-invariant speculative decoding", arXiv 2408.07978.

    Args:
        places: [2, T] int64, the sequence and the node that each row follows.
        ids: [B, N] int32, node 0 is the last committed token.
        parents: [B, N] int32, None = chains.
    Returns:
        See `verify_drafts`; the tensors are as those of `fastspec_kernels.verify_tree`.
    """
    owners, nodes = places
    num_requests, width = ids.shape
    chain = torch.arange(-1, width - 1, device=ids.device)
    is_chain, depths = parents is None, (chain + 1).expand_as(ids)
    if parents is None:
        parents = chain.expand_as(ids)
    else:
        depths, _ = build_tree(parents, backend=batch.backend)
    seeds, lengths = batch.keys
    picked, logprobs = sample_coupled(
        target_logits,
        seeds[owners],
        lengths[owners] + depths[owners, nodes],
        **sampling_of_rows(batch.sampling, owners),
        token_bitmask=token_bitmask,
        backend=batch.backend,
    )
    choices = torch.full_like(ids, -1)  # [B, N], -1 after nodes that are not verified
    choices[owners, nodes] = picked
    logprob_of = logprobs.new_zeros(ids.shape)
    logprob_of[owners, nodes] = logprobs
    is_verified = torch.zeros_like(ids, dtype=torch.bool)
    is_verified[owners, nodes] = True

    node = torch.zeros((num_requests, 1), dtype=torch.int64, device=ids.device)
    is_going = torch.ones_like(node, dtype=torch.bool)
    steps, tokens, values = [node], [choices[:, :1]], [logprob_of[:, :1]]
    for _ in range(min(batch.num_speculative_tokens, width - 1)):
        choice = choices.gather(1, node)
        follows = (parents == node) & (ids == choice) & is_verified & (choice >= 0)
        is_going = is_going & follows.any(1, keepdim=True)
        node = torch.where(is_going, follows.int().argmax(1, keepdim=True), node)
        steps.append(torch.where(is_going, node, -1))
        tokens.append(torch.where(is_going, choices.gather(1, node), -1))
        values.append(torch.where(is_going, logprob_of.gather(1, node), 0.0))
    path = torch.cat(steps, dim=1)
    accepted_len = (path >= 0).sum(1) - 1
    is_valid = choices.gather(1, node) >= 0  # [B, 1], of the last row that was reached
    accepted_len = torch.where(is_valid[:, 0], accepted_len, -1).int()
    missing = width - path.shape[1]
    return (
        pad(torch.cat(tokens, dim=1).where(is_valid, -1), (0, missing), value=-1),
        accepted_len,
        pad(torch.cat(values, dim=1).where(is_valid, 0.0), (0, missing)),
        None
        if is_chain
        else pad(path[:, 1:].int().where(is_valid, -1), (0, missing + 1), value=-1),
    )


def verify_synthetic(
    target_logits: Tensor,
    cu_rows: Tensor,
    draft_token_ids: Tensor,
    uniforms: Tensor,
    rate: float,
    sampling: SamplingTensors,
    token_bitmask: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Accept each draft token whose predecessors were accepted with probability `rate`, regardless
    of its own probability, to measure speed at a given acceptance rate. LOSSY.

    A token that the bitmask forbids is never accepted. The token after the accepted ones comes
    from the target. Arguments, results and the rows read are as for
    `fastspec_kernels.verify_chain`; greedy requests use the same random rule.
    """
    num_requests, width = draft_token_ids.shape
    device = target_logits.device
    places, first = torch.arange(width, device=device), cu_rows[:-1, None].long()
    counts = cu_rows.diff().long()
    stands = (places < counts[:, None] - 1) & (draft_token_ids >= 0)
    rows = torch.where(stands, first + places, first)
    tokens = draft_token_ids.clamp(min=0).long()
    if token_bitmask is not None:
        stands &= (token_bitmask[rows, tokens // 32] >> (tokens % 32) & 1) == 1
    accepted = (stands & (uniforms[:, :width] < rate)).int().cumprod(1).sum(1)

    owners = torch.arange(num_requests, device=device)  # given a size, torch waits for no counts
    owners = owners.repeat_interleave(counts, output_size=len(target_logits))
    given = {"token_bitmask": token_bitmask, "backend": backend}
    given |= sampling_of_rows(sampling, owners)
    logsumexp, _ = row_stats(target_logits, **given)
    scale = divisors(sampling["temperature"])
    values = target_logits[rows, tokens].float()
    if scale is not None:
        values = values / scale[:, None]
    logprobs = values - logsumexp[rows]

    last = first[:, 0] + accepted
    mask = None if token_bitmask is None else token_bitmask[last]
    given = {**sampling, "token_bitmask": mask, "backend": backend}
    extra, extra_logprob = sample(target_logits[last], uniforms[:, width], **given)
    is_kept = places < accepted[:, None]
    ids = pad(draft_token_ids.where(is_kept, -1), (0, 1), value=-1)
    ids = ids.scatter(1, accepted[:, None], extra[:, None])
    logprobs = pad(logprobs.where(is_kept, 0.0), (0, 1))
    logprobs = logprobs.scatter(1, accepted[:, None], extra_logprob[:, None])
    accepted = torch.where(extra < 0, -1, accepted)
    return ids, accepted.int(), logprobs
