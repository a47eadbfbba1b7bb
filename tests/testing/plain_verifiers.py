"""Verifiers with the signatures of verify_chain and verify_tree that run a rule in plain Python."""

import torch

from fastspec_kernels import PAD_TOKEN_ID, logits_to_probs


def chain_verifier(rule):
    """Runs a rule for chains on each sequence."""

    def verify(
        target_logits, cu_rows, draft_token_ids, uniform_samples, draft_logits=None, **parameters
    ):
        batch, num_draft = draft_token_ids.shape
        rows = cu_rows.diff()
        targets = probabilities(target_logits, rows, parameters)
        drafts = [None] * batch
        if draft_logits is not None:
            per_sequence = torch.full((batch,), num_draft)
            drafts = probabilities(draft_logits.flatten(0, 1), per_sequence, parameters)
        output = torch.full((batch, num_draft + 1), PAD_TOKEN_ID)
        accepted_len = torch.full((batch,), -1)
        for b, target in enumerate(targets):
            proposals = [token for token in draft_token_ids[b].tolist() if token >= 0]
            proposals = tuple(proposals[: len(target) - 1])
            draft = drafts[b]
            if draft is None or is_greedy(parameters, b):
                draft = [[float(x == token) for x in range(len(target[0]))] for token in proposals]
            invalid = next((i for i, row in enumerate(target) if has_nan(row)), len(target))
            drawn = draft[: len(proposals)]
            invalid = min([invalid, *(i for i, row in enumerate(drawn) if has_nan(row))])
            emitted = []
            if invalid > 0:  # else there is nothing to judge
                target = [*target[:invalid], *([target[0]] * (len(target) > invalid))]
                emitted = rule(target, draft, proposals[:invalid], uniform_samples[b].tolist())
            if 0 < len(emitted) <= invalid:
                output[b, : len(emitted)] = torch.tensor(emitted)
                accepted_len[b] = len(emitted) - 1
        return output, accepted_len

    return verify


def tree_verifier(rule):
    """Runs a rule for trees on each sequence; greedy ones must be told apart by the caller."""

    def verify(
        target_logits,
        cu_rows,
        tree_token_ids,
        parents,
        uniform_samples,
        sibling_rule,
        draft_logits=None,
        **parameters,
    ):
        batch, num_nodes = tree_token_ids.shape
        targets = probabilities(target_logits, cu_rows.diff(), parameters)
        drafts = [[[]] * num_nodes] * batch
        if draft_logits is not None:
            per_sequence = torch.full((batch,), num_nodes)
            drafts = probabilities(draft_logits.flatten(0, 1), per_sequence, parameters)
        path = torch.full((batch, num_nodes), PAD_TOKEN_ID)
        output = torch.full((batch, num_nodes), PAD_TOKEN_ID)
        accepted_len = torch.full((batch,), -1)
        for b, target in enumerate(targets):
            num = len(target)
            tokens, above = tree_token_ids[b, :num].tolist(), parents[b, :num].tolist()
            nodes, emitted = rule(target, drafts[b], tokens, above, uniform_samples[b].tolist())
            path[b, : len(nodes)] = torch.tensor(nodes)
            output[b, : len(emitted)] = torch.tensor(emitted)
            accepted_len[b] = len(nodes)
        return path, output, accepted_len

    return verify


def probabilities(logits, rows, parameters):
    """The distributions of each sequence as lists."""
    per_row = {name: value.repeat_interleave(rows) for name, value in parameters.items()}
    probs = logits_to_probs(logits, **per_row, backend="reference").double()
    return [part.tolist() for part in probs.split(rows.tolist())]


def is_greedy(parameters, b):
    return "temperature" in parameters and parameters["temperature"][b] == 0


def has_nan(row):
    return any(value != value for value in row)
