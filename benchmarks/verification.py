"""The checks before a timing: our results against the reference, the peers' rule against ours.

A few sequences of each batch are recomputed by the reference on the CPU, three times: with the
uniform numbers as they are and a little lower and higher. Where the three agree on what is
accepted, so must we, and our drawn token must lie among theirs.
"""

import torch
from torch import Tensor

import fastspec_kernels as ops
from benchmarks.peers import hf_probs

NUDGE = 3e-5  # in uniform numbers; three times the margin within which backends may differ
MAX_ELEMENTS = 1 << 23  # logits that one check gives to the reference
MAX_BETWEEN = 1e-4
MAX_TV = 1e-3  # between our distribution and Hugging Face's


def rows(op: str, logits: Tensor, extra: tuple, params: dict, ours) -> None:
    """One of the row ops at some of its rows."""
    for row in picks(len(logits)):
        at = slice(row, row + 1)
        own = [part[at].cpu() for part in (ours if isinstance(ours, tuple) else (ours,))]
        here = {name: value[at].cpu() for name, value in params.items()}
        if op == "sample":
            _check_draw(logits[at].cpu(), extra[0][at].cpu(), here, own)
            continue
        own_extra = (part[at].cpu() for part in extra)
        expected = getattr(ops, op)(logits[at].cpu(), *own_extra, **here, backend="reference")
        if op == "sample_coupled":  # two sums within 1e-5 of each other do not come by
            _require(int(own[0]) == int(expected[0]), "token", own[0], expected[0])
            torch.testing.assert_close(own[1], expected[1], rtol=1e-4, atol=1e-4)
        elif op == "logits_to_probs":
            _require(_tv(own[0], expected) < 1e-4, "probabilities", own[0], expected)
        else:
            torch.testing.assert_close(own[0], expected[0], rtol=1e-5, atol=1e-4)
            _check_threshold(logits[at].cpu(), here, own[1], expected)


def _check_threshold(logits: Tensor, params: dict, own: Tensor, expected: tuple) -> None:
    """The thresholds may differ, but hardly any probability may lie between them."""
    logsumexp, threshold = expected
    options = {name: params[name] for name in ("temperature", "token_bitmask") if name in params}
    all_probs = ops.logits_to_probs(logits, **options, backend="reference")
    all_logsumexp, _ = ops.row_stats(logits, **options, backend="reference")
    low, high = torch.minimum(own, threshold), torch.maximum(own, threshold)
    between = (logits >= low) & (logits < high)
    mass = all_probs[between].sum() * (all_logsumexp - logsumexp).exp()
    _require(float(mass) < MAX_BETWEEN, "threshold", own, threshold)


def _check_draw(logits: Tensor, uniform: Tensor, params: dict, own: list[Tensor]) -> None:
    runs = [ops.sample(logits, u, **params, backend="reference") for u in _nudged(uniform)]
    low, middle, high = (int(tokens) for tokens, _ in runs)
    _require(low <= int(own[0]) <= high, "token", own[0], runs[1][0])
    if int(own[0]) == middle:
        torch.testing.assert_close(own[1], runs[1][1], rtol=1e-4, atol=1e-4)


def chain(args: tuple, kwargs: dict, ours: tuple) -> None:
    """Some sequences of `verify_chain`."""
    output, accepted, logprobs = (part.cpu() for part in ours)
    chosen = picks(len(accepted), args[0].numel() // len(accepted))
    runs = _runs_of_reference(ops.verify_chain, args, kwargs, chosen)
    for i, b in enumerate(chosen):
        if len({int(run[1][i]) for run in runs}) == 1:
            num = int(runs[1][1][i])
            _require(int(accepted[b]) == num, "accepted_len", accepted[b], num)
            _check_output(output[b], logprobs[b], num, [(run[0][i], run[2][i]) for run in runs])


def tree(args: tuple, kwargs: dict, ours: tuple) -> None:
    """Some sequences of `verify_tree`."""
    path, output, accepted, logprobs = (part.cpu() for part in ours)
    chosen = picks(len(accepted), args[0].numel() // len(accepted))
    runs = _runs_of_reference(ops.verify_tree, args, kwargs, chosen)
    for i, b in enumerate(chosen):
        if len({tuple(run[0][i].tolist()) for run in runs}) == 1:
            expected, num = runs[1][0][i], int(runs[1][2][i])
            _require(torch.equal(path[b], expected), "path", path[b], expected)
            _require(int(accepted[b]) == num, "accepted_len", accepted[b], num)
            _check_output(output[b], logprobs[b], num, [(run[1][i], run[3][i]) for run in runs])


def mean_accepted(accepted_len: Tensor) -> float:
    """Over a batch without an invalid sequence."""
    _require(bool((accepted_len >= 0).all()), "accepted_len", accepted_len, "none invalid")
    return float(accepted_len.float().mean())


def mean_inner_nodes(path: Tensor, parents: Tensor) -> float:
    """Nodes with children, the root among them, that a walk came by; parents [N] of every tree."""
    is_inner = torch.isin(torch.arange(len(parents), device=path.device), parents)
    return 1 + float((is_inner[path.clamp_min(0)] & (path >= 0)).sum()) / len(path)


def _runs_of_reference(op, args: tuple, kwargs: dict, chosen: list[int]) -> list[tuple]:
    """The reference on some sequences, with the uniform numbers nudged down, kept, nudged up."""
    here, options = sequences(args, kwargs, chosen)
    *others, uniform = (part.cpu() for part in here)
    options = {
        name: value.cpu() if isinstance(value, Tensor) else value for name, value in options.items()
    }
    return [op(*others, u, **options, backend="reference") for u in _nudged(uniform)]


def sequences(args: tuple, kwargs: dict, chosen: list[int]) -> tuple[tuple, dict]:
    """Arguments of verify_chain or verify_tree for some sequences of the batch alone."""
    target, cu_rows, *per_sequence = args
    starts, ends = cu_rows[:-1].tolist(), cu_rows[1:].tolist()
    rows = [i for b in chosen for i in range(starts[b], ends[b])]
    whose = {"token_bitmask": rows, "draft_token_map": slice(None)}
    options = {
        name: value[whose.get(name, chosen)] if isinstance(value, Tensor) else value
        for name, value in kwargs.items()
    }
    counts = cu_rows.diff()[chosen].cumsum(0, dtype=torch.int32)
    own = torch.cat([counts.new_zeros(1), counts])
    return (target[rows], own, *(part[chosen] for part in per_sequence)), options


def _check_output(output: Tensor, logprobs: Tensor, num: int, runs: list) -> None:
    """Accepted tokens equal, the drawn one between those of the nudged runs, nothing after it."""
    expected, expected_logprobs = runs[1]
    _require(torch.equal(output[:num], expected[:num]), "accepted tokens", output, expected)
    low, drawn, high = int(runs[0][0][num]), int(output[num]), int(runs[2][0][num])
    _require(low <= drawn <= high, "drawn token", output, expected)
    _require(bool((output[num + 1 :] == -1).all()), "padding", output, expected)
    if drawn == int(expected[num]):
        torch.testing.assert_close(logprobs, expected_logprobs, rtol=1e-4, atol=1e-4)


def peer_rule(logits: Tensor, values: dict) -> None:
    """Hugging Face's distribution of a row is ours; in float32, where ties do not split them."""
    if logits.dtype == torch.float32:
        params = {
            name: torch.full((1,), value, dtype=torch.int32 if name == "top_k" else torch.float32)
            for name, value in values.items()
        }
        ours = ops.logits_to_probs(logits.cpu(), **params, backend="reference")
        theirs = hf_probs(logits, values).cpu()
        _require(_tv(ours, theirs) < MAX_TV, "Hugging Face's distribution", theirs, ours)


def equal(ours: tuple, expected: tuple) -> None:
    for one, other in zip(ours, expected, strict=True):
        _require(torch.equal(one.cpu(), other.cpu()), "result", one, other)


def picks(num: int, elements: int = 1) -> list[int]:
    """First, last and middle of `num` things of so many logits each; fewer where they are large."""
    distinct = list(dict.fromkeys((0, num - 1, num // 2)))
    return sorted(distinct[: max(1, MAX_ELEMENTS // elements)])


def _nudged(uniform: Tensor) -> list[Tensor]:
    highest = 1 - 2.0**-24
    return [(uniform + shift).clamp(0, highest) for shift in (-NUDGE, 0.0, NUDGE)]


def _tv(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().sum(-1).max()) / 2


def _require(holds: bool, what: str, ours, expected) -> None:
    if not holds:
        raise AssertionError(f"{what}: got {ours}, expected {expected}")
