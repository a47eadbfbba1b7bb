"""Fewer cases for interpreted kernels."""

from collections import defaultdict

import torch

# Too long, or too many draws, for an interpreter that takes a millisecond per operation.
LEFT_OUT = (
    "large_vocabularies",
    "test_distribution",
    "test_is_uniform",
    "test_long_periodic_texts",
)
CASES_PER_TEST = 2
WHOLE_TABLES = ("test_edges", "test_wrong_arguments")


def pytest_collection_modifyitems(config, items):
    """Without a GPU Triton takes a few cases of each test, evenly spread, and all edge tables."""
    if torch.cuda.is_available():
        return
    tests = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec") and "triton" in item.callspec.id:
            tests[item.nodeid.split("[")[0]].append(item)
    dropped = set()
    for name, cases in tests.items():
        if any(part in name for part in WHOLE_TABLES):
            continue
        limit = 0 if any(part in name for part in LEFT_OUT) else CASES_PER_TEST
        limit = min(limit, 1) if "test_bit_identity" in name else limit
        kept = {len(cases) * i // limit for i in range(min(limit, len(cases)))}
        dropped |= {item for i, item in enumerate(cases) if i not in kept}
    config.hook.pytest_deselected(items=list(dropped))
    items[:] = [item for item in items if item not in dropped]
