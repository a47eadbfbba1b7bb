"""Batches for verify_chain, and their comparison with the oracle."""

import math

import numpy as np
import torch

from fastspec_kernels import PAD_TOKEN_ID, row_stats, verify_chain

from .cases import (
    invalid_rows,
    margin_of,
    on_device,
    random_bitmask,
    random_logits,
    random_params,
    uniform_samples,
)
from .oracle_chain import Sequence, chain

NAMES = ("temperature", "top_k", "top_p", "min_p")
OFF = -math.inf
LAST = 1 - 2.0**-24  # the largest uniform number


def run(case, backend):
    """Call the op on a dictionary of CPU tensors; returns three CPU tensors."""
    output, accepted_len, logprobs = verify_chain(**on_device(case, backend), backend=backend)
    dtypes = (output.dtype, accepted_len.dtype, logprobs.dtype)
    assert dtypes == (torch.int32, torch.int32, torch.float32)
    return output.cpu(), accepted_len.cpu(), logprobs.cpu()


def check(case, backend) -> int:
    """Compare every sequence with the oracle; returns how many were too close to call."""
    output, accepted_len, logprobs = run(case, backend)
    close, wanted = 0, logprobs.numpy().copy()  # rows too close to call are as they are
    for b in range(len(output)):
        expected = expect(case, b)
        if expected.margin < margin_of(backend):
            close += 1
            continue
        length = len(expected.tokens)
        padding = [PAD_TOKEN_ID] * (output.shape[1] - length)
        assert output[b].tolist() == expected.tokens + padding, b
        assert int(accepted_len[b]) == expected.accepted_len, b
        wanted[b, :length] = expected.logprobs
        assert not np.any(wanted[b, length:]), b
    np.testing.assert_allclose(logprobs, wanted, rtol=1e-5, atol=1e-5)
    return close


def expect(case, b):
    """What the oracle says of sequence b."""
    start, end = case["cu_rows"][b : b + 2].tolist()
    draft_logits, logsumexp = case.get("draft_logits"), case.get("draft_logsumexp")
    token_map, bitmask = case.get("draft_token_map"), case.get("token_bitmask")
    sequence = Sequence(
        case["target_logits"][start:end].double().numpy(),
        case["draft_token_ids"][b].tolist(),
        case["uniform_samples"][b].double().tolist(),
        None if draft_logits is None else draft_logits[b].double().numpy(),
        params_of(case, b),
        case.get("lenience", 1.0),
        case.get("method", "standard"),
        None if logsumexp is None else logsumexp[b].tolist(),
        None if token_map is None else token_map.tolist(),
        None if bitmask is None else bitmask[start:end].numpy(),
    )
    return chain(sequence)


def params_of(case, b) -> dict:
    """The sampling parameters of sequence b as numbers."""
    return {name: case[name][b].item() for name in NAMES if case.get(name) is not None}


def random_case(batch, num_draft, vocab, generator, dtype=torch.float32, draft="random"):
    """A ragged batch with every kind of row, parameter, proposal and padding.

    draft: "random"; "smaller", a vocabulary that ends earlier; "mapped", one with gaps; "certain".
    """
    rows = torch.randint(num_draft + 3, (batch,), generator=generator)
    cu_rows = torch.nn.functional.pad(rows.cumsum(0), (1, 0)).int()
    num_rows = int(cu_rows[-1]) + 2  # two rows that belong to nobody
    target_logits = random_logits(num_rows, vocab, generator, dtype)
    target_logits[int(cu_rows[-1]) :] = math.nan
    case = {
        "target_logits": target_logits,
        "cu_rows": cu_rows,
        "draft_token_ids": torch.randint(vocab, (batch, num_draft), generator=generator).int(),
        "uniform_samples": uniform_samples((batch, num_draft + 1), generator),
        **random_params(batch, vocab, generator),
    }
    if draft != "certain":
        draft_vocab = vocab if draft == "random" else max(1, vocab - 3)
        flat = random_logits(batch * num_draft, draft_vocab, generator, dtype)
        case["draft_logits"] = flat.view(batch, num_draft, draft_vocab)
    if draft == "mapped":
        case["draft_token_map"] = random_map(vocab, draft_vocab, generator)
    _choose_proposals(case, draft, generator)
    return case


def _choose_proposals(case, draft, generator):
    """Likely, equal, unlikely, missing and impossible proposals, in place."""
    target_logits, cu_rows, tokens = case["target_logits"], case["cu_rows"], case["draft_token_ids"]
    num_rows, vocab = target_logits.shape
    num_draft = tokens.shape[1]
    for b in range(len(tokens)):
        for i in range(num_draft):
            choice = int(torch.randint(8, (1,), generator=generator))
            row = min(int(cu_rows[b]) + i, num_rows - 3)
            if choice < 4 and int(cu_rows[b + 1]) > int(cu_rows[b]) + i:
                tokens[b, i] = int(target_logits[row].float().argmax())
                if choice < 2 and draft == "random":
                    case["draft_logits"][b, i] = target_logits[row]
            elif choice == 4 and draft in ("random", "smaller"):
                tokens[b, i] = int(case["draft_logits"][b, i].float().argmax())
        if b % 5 == 4 and num_draft:
            tokens[b, num_draft // 2] = PAD_TOKEN_ID
        if b % 7 == 6 and num_draft:
            tokens[b, num_draft - 1] = vocab + b


def random_map(vocab, draft_vocab, generator):
    """The column of each target token; numbers that name no column for tokens without one."""
    columns = torch.randperm(vocab, generator=generator).int()
    missing = torch.tensor([-1, draft_vocab, 2**31 - 1, -(2**31)], dtype=torch.int32)
    return torch.where(columns < draft_vocab, columns, missing[columns % 4])


def with_bitmask(case, generator):
    """The case under a random mask; proposals are allowed or not as it happens."""
    return {**case, "token_bitmask": random_bitmask(case["target_logits"], generator)}


def with_invalid_rows(case, generator):
    """The case with a target row of every second sequence spoiled, and a draft row of some."""
    cu_rows, target, draft = case["cu_rows"], case["target_logits"].clone(), case["draft_logits"]
    bad = invalid_rows(target.shape[1]).to(target.dtype)
    for b in range(0, len(cu_rows) - 1, 2):
        rows = range(*cu_rows[b : b + 2].tolist())
        if rows:
            target[rows[int(torch.randint(len(rows), (1,), generator=generator))]] = bad[b % 3]
    if draft is not None:
        draft = draft.clone()
        for b in range(0, len(draft), 6):
            place = int(torch.randint(draft.shape[1], (1,), generator=generator))
            draft[b, place] = bad[b % 3, : draft.shape[2]]
    return {**case, "target_logits": target, "draft_logits": draft}


def with_logsumexp(case):
    """The case with the log-sum-exp that row_stats gives of every draft row."""
    batch, num_draft, _ = case["draft_logits"].shape
    params = {
        name: case[name].repeat_interleave(num_draft)
        for name in NAMES
        if case.get(name) is not None
    }
    logsumexp, _ = row_stats(case["draft_logits"].flatten(0, 1), **params, backend="reference")
    return {**case, "draft_logsumexp": logsumexp.view(batch, num_draft)}


def chain_case(target, draft, tokens, samples, **params):
    """One sequence given by rows of logits."""
    return {
        "target_logits": torch.tensor(target, dtype=torch.float32),
        "cu_rows": torch.tensor([0, len(target)], dtype=torch.int32),
        "draft_token_ids": torch.tensor([tokens], dtype=torch.int32).reshape(1, -1),
        "uniform_samples": torch.tensor([samples], dtype=torch.float32),
        "draft_logits": None if draft is None else torch.tensor([draft], dtype=torch.float32),
        **{name: torch.tensor([value]) for name, value in params.items()},
    }
