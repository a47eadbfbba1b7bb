"""Builds the benchmark of one case: inputs on its device, our call, the others', the check."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

import fastspec_kernels as ops
from benchmarks import inputs, peers, traffic, verification
from benchmarks.cases import NUM_UNIFORMS, SAMPLING, Case
from benchmarks.peers import Peer

HF_MAX_BATCH = 8  # its rule takes one sequence at a time


@dataclass
class Workload:
    """One benchmark, ready to run; each call takes the number of one of `num_sets` input sets."""

    case: Case
    backend: str
    device: torch.device
    num_sets: int
    ours: Callable[[int], object]
    read: Callable[[int], object]  # one read of the logits that must be read
    verify: Callable[[], dict]  # call first; raises AssertionError, gives fields of the record
    floor_bytes: int = 0
    peers: dict[str, Peer] = field(default_factory=dict)


def build(case: Case, backend: str, device: torch.device, num_sets: int) -> Workload:
    """Inputs for `num_sets` calls; on a GPU each set has its own logits, on a CPU its uniforms."""
    makers = {
        "verify_chain": _chain,
        "verify_tree": _tree,
        "build_tree": _build_tree,
        "uniform": _uniform,
    }
    workload = makers.get(case.op, _rows)(case, backend, device, num_sets)
    workload.floor_bytes = traffic.floor_bytes(case)
    return workload


class _Maker:
    """Draws the inputs of one case."""

    def __init__(self, case: Case, device: torch.device, num_sets: int):
        self.case, self.device, self.num_sets = case, device, num_sets
        self.values = SAMPLING[case.sampling]
        self.generator = torch.Generator(device).manual_seed(0)
        self.copies = num_sets if device.type == "cuda" else 1
        self.dtype = getattr(torch, case.dtype)

    def logits(self, num_rows: int) -> list[Tensor]:
        """One [num_rows, V] for each set with logits of its own."""
        kind, vocab = self.case.logits, self.case.vocab
        return [
            inputs.make_logits(kind, num_rows, vocab, self.dtype, self.generator)
            for _ in range(self.copies)
        ]

    def uniforms(self, *shape: int) -> list[Tensor]:
        return list(torch.rand(self.num_sets, *shape, generator=self.generator, device=self.device))

    def params(self) -> dict[str, Tensor]:
        values = {"temperature": 0.0} if self.case.rule == "greedy" else self.values
        return inputs.parameters(values, self.case.batch, self.device)

    def cu_rows(self, per_sequence: int) -> Tensor:
        ends = torch.arange(self.case.batch + 1, dtype=torch.int32, device=self.device)
        return ends * per_sequence

    def draw(self, rows: Tensor, num: int = 1, replacement: bool = True) -> Tensor:
        return inputs.draw_tokens(rows, self.values, num, replacement, self.generator)


def _reader(*tensors: list[Tensor]) -> Callable[[int], list[Tensor]]:
    """One read of the given rows, in one call for each tensor that holds some."""
    return lambda i: [rows[i % len(rows)].amax(-1) for rows in tensors]


def _rows(case: Case, backend: str, device: torch.device, num_sets: int) -> Workload:
    make = _Maker(case, device, num_sets)
    logits = make.logits(case.batch)
    extras = [
        inputs.randomness(case.op, case.batch, make.generator, device) for _ in range(num_sets)
    ]
    params, values, op = make.params(), make.values, getattr(ops, case.op)

    def at(i: int) -> Tensor:
        return logits[i % len(logits)]

    def ours(i: int):
        return op(at(i), *extras[i], **params, backend=backend)

    def check() -> dict:
        for i in verification.picks(len(logits)):
            verification.rows(case.op, at(i), extras[i], params, ours(i))
        verification.peer_rule(at(0)[:1], values)
        return {}

    theirs = {
        "sample": peers.hf_sample,
        "sample_coupled": peers.hf_sample,
        "row_stats": lambda rows, values: peers.hf_logits(rows, values).logsumexp(-1),
        "logits_to_probs": peers.hf_probs,
    }[case.op]
    others = {"peer": Peer(lambda i: theirs(at(i), values))}
    if case.op in ("sample", "sample_coupled"):
        others["torch"] = Peer(lambda i: peers.torch_sample(at(i), values))
    if peers.HAS_FLASHINFER and device.type == "cuda" and case.op != "row_stats":
        draws = case.op in ("sample", "sample_coupled")
        of_flashinfer = peers.flashinfer_sample if draws else peers.flashinfer_probs
        others["flashinfer"] = Peer(lambda i: of_flashinfer(at(i), values))
    return Workload(case, backend, device, num_sets, ours, _reader(logits), check, peers=others)


def _chain(case: Case, backend: str, device: torch.device, num_sets: int) -> Workload:
    make = _Maker(case, device, num_sets)
    batch, num_draft, vocab = case.batch, case.num_draft, case.vocab
    target = make.logits(batch * (num_draft + 1))
    shaped = [rows.view(batch, num_draft + 1, vocab) for rows in target]
    drafts = [
        inputs.noisy(rows[:, :-1].reshape(-1, vocab), make.generator).view(batch, num_draft, vocab)
        for rows in shaped
    ]
    if case.rule in ("point_mass", "greedy"):
        tokens = [rows.argmax(-1).int() for rows in drafts]
    else:
        tokens = [
            make.draw(drafts[i % len(drafts)].flatten(0, 1)).view(batch, num_draft)
            for i in range(num_sets)
        ]
    uniforms, cu_rows = make.uniforms(batch, num_draft + 1), make.cu_rows(num_draft + 1)
    params, values = make.params(), make.values
    options = [_draft_options(case, rows, params, backend) for rows in drafts]

    def arguments(i: int) -> tuple[tuple, dict]:
        k = i % len(target)
        return (target[k], cu_rows, tokens[i % len(tokens)], uniforms[i]), {**options[k], **params}

    def ours(i: int):
        args, kwargs = arguments(i)
        return ops.verify_chain(*args, **kwargs, backend=backend)

    def check() -> dict:
        for i in verification.picks(num_sets, target[0].numel() // batch):
            verification.chain(*arguments(i), ours(i))
        verification.peer_rule(target[0][:1], values)
        accepted = [verification.mean_accepted(ours(i)[1]) for i in range(num_sets)]
        return {"mean_accepted_len": round(sum(accepted) / num_sets, 3)}

    def at(i: int) -> tuple:
        k = i % len(target)
        return shaped[k], drafts[k], tokens[i % len(tokens)], values

    others = {"target_amax": Peer(_reader(target))}
    in_use = traffic.chain_rows(case) - num_draft - 1
    read = _reader(target, [rows[:, :in_use] for rows in drafts]) if in_use else _reader(target)
    if case.rule in ("standard", "draft_logsumexp", "block"):
        if batch <= HF_MAX_BATCH:
            others["peer"] = Peer(lambda i: peers.hf_chain(*at(i)), capturable=False)
        if peers.HAS_FLASHINFER and device.type == "cuda":
            others["flashinfer"] = Peer(lambda i: peers.flashinfer_chain(*at(i)))
    return Workload(case, backend, device, num_sets, ours, read, check, peers=others)


def _draft_options(case: Case, draft: Tensor, params: dict, backend: str) -> dict:
    """The keyword arguments of `verify_chain` for the case's rule."""
    if case.rule in ("point_mass", "greedy"):
        return {}
    if case.rule == "draft_logsumexp":
        rows = {name: value.repeat_interleave(case.num_draft) for name, value in params.items()}
        logsumexp, _ = ops.row_stats(draft.flatten(0, 1), **rows, backend=backend)
        return {"draft_logits": draft, "draft_logsumexp": logsumexp.view(draft.shape[:2])}
    return {"draft_logits": draft, "method": "block" if case.rule == "block" else "standard"}


def _tree_tokens(make: _Maker, draft: Tensor, rule: str, parents: Tensor) -> Tensor:
    """[B, N] tokens of binary trees, siblings chosen from their parent's draft row by the rule."""
    if rule == "target_only":
        siblings = draft.topk(2).indices.int()
    else:
        siblings = make.draw(draft, 2, replacement=rule == "with_replacement")  # [B * N, 2]
    child = torch.arange(len(parents), device=draft.device)
    places = 2 * parents.clamp_min(0) + (child - 1) % 2  # first or second child of its parent
    return siblings.view(make.case.batch, -1)[:, places].contiguous()


def _tree(case: Case, backend: str, device: torch.device, num_sets: int) -> Workload:
    make = _Maker(case, device, num_sets)
    batch, num_nodes, vocab = case.batch, case.num_nodes, case.vocab
    target = make.logits(batch * num_nodes)
    parents = inputs.binary_tree(num_nodes).to(device)
    rule = "target_only" if case.rule == "greedy" else case.rule
    drafts = [inputs.noisy(rows, make.generator) for rows in target]
    draws = len(drafts) if rule == "target_only" else num_sets
    tokens = [_tree_tokens(make, drafts[i % len(drafts)], rule, parents) for i in range(draws)]
    drafts = [] if rule == "target_only" else [rows.view(batch, -1, vocab) for rows in drafts]
    uniforms, cu_rows = make.uniforms(batch, num_nodes + 1), make.cu_rows(num_nodes)
    params, all_parents = make.params(), parents.expand(batch, -1).contiguous()

    def arguments(i: int) -> tuple[tuple, dict]:
        k = i % len(target)
        args = (target[k], cu_rows, tokens[i % len(tokens)], all_parents, uniforms[i])
        draft = {"draft_logits": drafts[k]} if drafts else {}
        return args, {"sibling_rule": rule, **draft, **params}

    def ours(i: int):
        args, kwargs = arguments(i)
        return ops.verify_tree(*args, **kwargs, backend=backend)

    def check() -> dict:
        for i in verification.picks(num_sets, target[0].numel() // batch):
            verification.tree(*arguments(i), ours(i))
        walks = [ours(i) for i in range(num_sets)]
        accepted = sum(verification.mean_accepted(walk[2]) for walk in walks) / num_sets
        inner = sum(verification.mean_inner_nodes(walk[0], parents) for walk in walks) / num_sets
        visited = batch * (accepted + 1 + (inner if drafts else 0))
        workload.read = _reader([rows[: round(visited)] for rows in target])
        return {
            "mean_accepted_len": round(accepted, 3),
            "visited_rows": round(visited, 1),
            "floor_bytes": traffic.floor_bytes(case, visited),
        }

    def softmax(i: int) -> Tensor:
        return target[i % len(target)].float().softmax(-1)

    others = {"torch_softmax": Peer(softmax)}  # the first stage of any rule on probabilities
    workload = Workload(case, backend, device, num_sets, ours, _reader(target), check, peers=others)
    return workload


def _build_tree(case: Case, backend: str, device: torch.device, num_sets: int) -> Workload:
    parents = inputs.binary_tree(case.num_nodes).expand(case.batch, -1).contiguous().to(device)

    def check() -> dict:
        verification.equal(
            ops.build_tree(parents, backend=backend),
            ops.build_tree(parents.cpu(), backend="reference"),
        )
        return {}

    return Workload(
        case,
        backend,
        device,
        num_sets,
        ours=lambda i: ops.build_tree(parents, backend=backend),
        read=lambda i: parents.clone(),
        verify=check,
    )


def _uniform(case: Case, backend: str, device: torch.device, num_sets: int) -> Workload:
    seed, position = torch.randint(2**62, (2, case.batch), device=device)
    shape = (case.batch, NUM_UNIFORMS)

    def ours(i: int) -> Tensor:
        return ops.uniform(seed, position, NUM_UNIFORMS, i, backend=backend)

    def check() -> dict:
        expected = ops.uniform(seed.cpu(), position.cpu(), NUM_UNIFORMS, 0, backend="reference")
        verification.equal((ours(0),), (expected,))
        return {}

    return Workload(
        case,
        backend,
        device,
        num_sets,
        ours,
        read=lambda i: torch.empty(shape, device=device).fill_(0.5),
        verify=check,
        peers={"peer": Peer(lambda i: torch.rand(shape, device=device))},
    )
