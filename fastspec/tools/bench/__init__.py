"""End-to-end measurement: our decoding and Hugging Face's, same weights and prompts, in one run."""

from fastspec.tools.bench.end_to_end import (
    ACCEPTANCE,
    BenchConfig,
    Mismatch,
    measure,
    require_equal,
    verify_outputs,
    write_profile,
)
from fastspec.tools.bench.environment import describe_environment
from fastspec.tools.bench.methods import Methods, num_parameters

__all__ = [
    "ACCEPTANCE",
    "BenchConfig",
    "Methods",
    "Mismatch",
    "describe_environment",
    "measure",
    "num_parameters",
    "require_equal",
    "verify_outputs",
    "write_profile",
]
