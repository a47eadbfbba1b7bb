"""Draft logits of an engine with an EAGLE draft, row by row, against a plain statement of them."""

import torch


def spied(engine):
    """The proposals of an engine's drafter as they are made, with their batches and texts."""
    seen, drafter = [], engine.drafter
    propose = drafter.propose

    def spy(batch):
        proposal = propose(batch)
        texts = [list(request.token_ids) for request in batch.requests]
        seen.append((texts, batch, proposal))
        return proposal

    drafter.propose = spy
    return seen


def rows_of(proposal, batch, index):
    """For each row of logits of a request: its node, and the tokens on the way to it."""
    tokens = proposal.token_ids[index].tolist()[: batch.max_nodes[index]]
    paths, parents = [[]], range(len(tokens))
    if proposal.parents is not None:
        parents = proposal.parents[index].tolist()[: len(tokens)]
    for token, parent in zip(tokens, parents, strict=True):
        paths.append([*paths[parent], token])
    depth = batch.num_draft_tokens[index]
    return [(node, paths[node]) for node in sorted(set(parents)) if len(paths[node]) < depth]


def whole_row(proposal, index, row):
    """Row of a proposal's logits over all tokens [V]."""
    own, columns = proposal.draft_logits[index, row], proposal.draft_token_map
    if columns is None:
        return own
    return own[columns.clamp(min=0).long()].masked_fill(columns < 0, -torch.inf)


def assert_logits(seen, published, least):
    """All rows of logits are those of `published`, given a text and what is drafted behind it."""
    num_rows = 0
    for texts, batch, proposal in seen:
        for index, text in enumerate(texts):
            if len(text) < 2:
                continue  # nothing to go on from
            for row, path in rows_of(proposal, batch, index):
                expected = published(text, path)[-1]
                logits = whole_row(proposal, index, row)
                torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
                num_rows += 1
    assert num_rows >= least
