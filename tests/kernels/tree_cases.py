"""Batches for verify_tree, and their comparison with the oracle."""

import math

import numpy as np
import torch

from fastspec_kernels import PAD_TOKEN_ID, verify_tree

from .cases import margin_of, on_device, random_logits, random_params, uniform_samples
from .chain_cases import params_of, random_map
from .oracle_tree import Tree, walk

RULES = ("target_only", "without_replacement", "with_replacement")


def run(case, backend):
    """Call the op on a dictionary of CPU tensors; returns four CPU tensors."""
    outputs = verify_tree(**on_device(case, backend), backend=backend)
    assert [out.dtype for out in outputs] == [torch.int32] * 3 + [torch.float32]
    return [out.cpu() for out in outputs]


def check(case, backend) -> int:
    """Compare every sequence with the oracle; returns how many were too close to call."""
    path, output, accepted_len, logprobs = run(case, backend)
    num_nodes, close = path.shape[1], 0
    wanted = logprobs.numpy().copy()  # rows too close to call are as they are
    for b in range(len(path)):
        expected = expect(case, b)
        if expected.margin < margin_of(backend):
            close += 1
            continue
        length = len(expected.tokens)
        padding = [PAD_TOKEN_ID] * num_nodes
        assert path[b].tolist() == (expected.path + padding)[:num_nodes], b
        assert output[b].tolist() == (expected.tokens + padding)[:num_nodes], b
        assert int(accepted_len[b]) == expected.accepted_len, b
        wanted[b, :length] = expected.logprobs
        assert not np.any(wanted[b, length:]), b
    np.testing.assert_allclose(logprobs, wanted, rtol=1e-5, atol=1e-5)
    return close


def expect(case, b):
    """What the oracle says of sequence b."""
    start, end = case["cu_rows"][b : b + 2].tolist()
    draft_logits, bitmask = case.get("draft_logits"), case.get("token_bitmask")
    token_map = case.get("draft_token_map")
    tree = Tree(
        case["target_logits"][start:end].double().numpy(),
        case["tree_token_ids"][b].tolist(),
        case["parents"][b].tolist(),
        case["uniform_samples"][b].double().tolist(),
        case["sibling_rule"],
        None if draft_logits is None else draft_logits[b].double().numpy(),
        params_of(case, b),
        None if token_map is None else token_map.tolist(),
        None if bitmask is None else bitmask[start:end].numpy(),
    )
    return walk(tree)


def random_parents(batch, num_nodes, generator):
    """Trees that are wide, deep, chains or arbitrary, with padding here and there."""
    node = torch.arange(num_nodes)
    wide = torch.rand(batch, num_nodes, generator=generator) ** 2 * node
    deep = node - 1 - torch.rand(batch, num_nodes, generator=generator) ** 3 * node
    anywhere = torch.rand(batch, num_nodes, generator=generator) * node
    chain = (node - 1).expand(batch, num_nodes)
    kinds = torch.stack([wide, deep, anywhere, chain.float()]).floor().int()
    parents = kinds[torch.arange(batch) % 4, torch.arange(batch)].minimum(node.int() - 1)
    parents = parents.clamp(min=0)
    parents[torch.rand(batch, num_nodes, generator=generator) < 0.07] = -1
    parents[:, 0] = -1
    return parents


def random_case(batch, num_nodes, vocab, generator, rule, dtype=torch.float32, draft="random"):
    """A ragged batch with every kind of row, parameter, tree, token and padding.

    draft: "random"; "smaller", a vocabulary that ends earlier; "mapped", one with gaps.
    """
    rows = torch.randint(num_nodes + 3, (batch,), generator=generator)
    rows[::3] = num_nodes
    cu_rows = torch.nn.functional.pad(rows.cumsum(0), (1, 0)).int()
    num_rows = int(cu_rows[-1]) + 2  # two rows that belong to nobody
    target_logits = random_logits(num_rows, vocab, generator, dtype)
    target_logits[int(cu_rows[-1]) :] = math.nan
    case = {
        "target_logits": target_logits,
        "cu_rows": cu_rows,
        "tree_token_ids": torch.randint(vocab, (batch, num_nodes), generator=generator).int(),
        "parents": random_parents(batch, num_nodes, generator),
        "uniform_samples": uniform_samples((batch, num_nodes + 1), generator),
        "sibling_rule": rule,
        **random_params(batch, vocab, generator),
    }
    if rule != "target_only":
        draft_vocab = vocab if draft == "random" else max(1, vocab - 3)
        flat = random_logits(batch * num_nodes, draft_vocab, generator, dtype)
        case["draft_logits"] = flat.view(batch, num_nodes, draft_vocab)
        if draft == "mapped":
            case["draft_token_map"] = random_map(vocab, draft_vocab, generator)
    _choose_tokens(case, generator)
    return case


def _choose_tokens(case, generator):
    """Likely, equal, repeated and impossible tokens beside random ones, in place."""
    tokens, parents, cu_rows = case["tree_token_ids"], case["parents"], case["cu_rows"]
    vocab, draft_logits = case["target_logits"].shape[1], case.get("draft_logits")
    for b in range(len(tokens)):
        for i in range(1, tokens.shape[1]):
            choice = int(torch.randint(12, (1,), generator=generator))
            parent = int(parents[b, i])
            row = int(cu_rows[b]) + parent
            if parent < 0 or row >= int(cu_rows[b + 1]):
                continue
            if choice < 5:
                tokens[b, i] = int(case["target_logits"][row].nan_to_num(-math.inf).argmax())
                if choice < 2 and draft_logits is not None and draft_logits.shape[2] == vocab:
                    draft_logits[b, parent] = case["target_logits"][row]
            elif choice == 5 and draft_logits is not None and draft_logits.shape[2] == vocab:
                tokens[b, i] = int(draft_logits[b, parent].argmax())
            elif choice == 6:
                tokens[b, i] = tokens[b, i - 1]
            elif choice == 7:
                tokens[b, i] = (-1, vocab, -(2**31), 2**31 - 1)[i % 4]


def plain_case(batch, vocab, generator, rule, parents):
    """Full trees of one shape, siblings chosen as the rule demands, moderate rows, no filters."""
    num_nodes = len(parents)
    target = torch.randn(batch, num_nodes, vocab, generator=generator) * 1.5
    draft = target + torch.randn(batch, num_nodes, vocab, generator=generator)
    tokens = torch.zeros(batch, num_nodes, dtype=torch.int32)
    for node in range(num_nodes):
        children = [child for child in range(1, num_nodes) if parents[child] == node]
        if children:
            probs = draft[:, node].softmax(-1)
            replacement = rule == "with_replacement"
            drawn = torch.multinomial(probs, len(children), replacement, generator=generator)
            tokens[:, children] = drawn.int()
    return {
        "target_logits": target.flatten(0, 1),
        "cu_rows": torch.arange(batch + 1, dtype=torch.int32) * num_nodes,
        "tree_token_ids": tokens,
        "parents": torch.tensor([parents], dtype=torch.int32).repeat(batch, 1),
        "uniform_samples": torch.rand(batch, num_nodes + 1, generator=generator),
        "sibling_rule": rule,
        "draft_logits": None if rule == "target_only" else draft,
    }
