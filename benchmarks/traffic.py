"""Bytes that a step must move, and bytes that the pipelines of others move for the same step.

The others' counts follow from their public sources: which kernel reads and writes which rows. They
are lower bounds, without sampling filters, scalars and launches.
"""

from benchmarks.cases import ITEM_SIZE, NUM_UNIFORMS, Case

FLOAT32 = 4


def floor_bytes(case: Case, visited_rows: float = 0) -> int:
    """Bytes of the large arrays that any implementation of the op has to move.

    `visited_rows`: target and draft rows together that the walks of `verify_tree` came by, which
    only the result tells.
    """
    row = case.vocab * ITEM_SIZE.get(case.dtype, 0)
    if case.op == "logits_to_probs":
        return case.batch * (row + case.vocab * FLOAT32)
    if case.op == "verify_chain":
        return case.batch * chain_rows(case) * row
    if case.op == "verify_tree":
        return round(visited_rows * row)
    if case.op == "build_tree":
        words = -(-case.num_nodes // 64)
        return case.batch * case.num_nodes * (4 + 4 + 8 * words)
    if case.op == "uniform":
        return case.batch * (8 + 8 + NUM_UNIFORMS * FLOAT32)
    return case.batch * row


def chain_rows(case: Case) -> int:
    """Rows per sequence: every target row (a NaN must be seen), and of the draft those in use."""
    target = case.num_draft + 1
    if case.rule in ("point_mass", "greedy"):
        return target
    return target + (1 if case.rule == "draft_logsumexp" else case.num_draft)


def pipelines(case: Case) -> dict[str, int]:
    """Bytes of other systems' pipelines for this case, by name; empty where none has the op."""
    if case.sampling != "unfiltered":
        return {}
    if case.op == "verify_chain" and case.rule == "standard":
        return {"flashinfer_bytes": _flashinfer_chain(case), "vllm_v2_bytes": _vllm_chain(case)}
    if case.op == "verify_tree" and case.rule == "target_only":
        return {"sglang_bytes": _sglang_tree(case)}
    return {}


def _softmax(rows: int, case: Case) -> int:
    """Logits read once in their dtype, float32 probabilities written."""
    return rows * case.vocab * (ITEM_SIZE[case.dtype] + FLOAT32)


def _flashinfer_chain(case: Case) -> int:
    """Softmax of all rows of both models; then two passes over one row of each."""
    rows = case.batch * (2 * case.num_draft + 1)
    return _softmax(rows, case) + case.batch * 4 * case.vocab * FLOAT32


def _vllm_chain(case: Case) -> int:
    """Tile statistics of all rows of both models, then one more row to draw from."""
    return case.batch * (2 * case.num_draft + 2) * case.vocab * ITEM_SIZE[case.dtype]


def _sglang_tree(case: Case) -> int:
    """Softmax of every node's row, as many zeros written, two passes over two rows to draw."""
    zeros = case.batch * case.num_nodes * case.vocab * FLOAT32
    return _softmax(case.num_rows, case) + zeros + case.batch * 4 * case.vocab * FLOAT32
