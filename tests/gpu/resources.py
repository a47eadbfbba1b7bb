"""What compilers make of the shipped kernels for sm_90, as benchmarks/gpu/predict.py wants it.

`python -m tests.gpu.resources` compiles them, some minutes, and writes anew what they take to
benchmarks/gpu/resources.json and the tables of docs/kernels.md.
"""

import json
import re
import subprocess
from importlib.metadata import version

from benchmarks.gpu import predict, resource_model
from tests.cuda import test_compile as cuda
from tests.cuda.sass import region
from tests.triton import test_compile as triton
from tests.triton import test_compile_attention as attention

# Name: source, part of the mangled name, and by which instructions a region is known.
CUDA = {
    "penalize": ("penalize", "penalize_kernel", {}),
    "verify_tree": (
        "verify_tree",
        r"verify_tree_kernelILb1E",
        {
            "first": r"FMNMX|LDG\.E\.128",
            "sum": r"F2I\.U64|LDS\.128",
            "residual": r"MUFU\.EX2|LDG\.E\.128",
        },
    ),
    "build_tree": ("build_tree", "build_tree_kernel", {}),
    "uniform": ("uniform", "uniform_kernel", {}),
    "store_kv": ("store_kv", "Eight", {}),
    "compact_kv": ("compact_kv", "5uint4", {}),
}
OF_ATTENTION = ("registers", "spills", "shared", "warps", "block_n", "in_flight", "regions")


def of_cuda() -> dict[str, dict]:
    """Of the kernels of csrc/cuda; shared memory is asked for at the launch."""
    found = {}
    for name, (source, part, regions) in CUDA.items():
        reports = cuda.kernels_of(cuda.compiled(("90",))[source, "90"][1])
        (mangled,) = (mangled for mangled in reports if re.search(part, mangled))
        lines = cuda.disassembly(source, "90")[mangled]
        found[name] = {
            "registers": int(re.search(r"Used (\d+) registers", reports[mangled])[1]),
            "spills": sum(map(int, re.findall(r"(\d+) bytes spill", reports[mangled]))),
            "shared": 0,
        }
        if regions:
            found[name]["regions"] = {key: region(lines, text) for key, text in regions.items()}
    return found


def of_attention(lines: list[dict]) -> dict[str, dict]:
    """From what tests/triton/compile_attention.py prints."""
    wanted = re.compile(r"(tree|cross) q(5|16) d128 b\d+ bf16|merge d128")
    return {
        line["name"]: {key: line[key] for key in OF_ATTENTION if key in line}
        for line in lines
        if wanted.fullmatch(line["name"])
    }


def of_others(records: list[dict]) -> dict[str, dict]:
    """Of each kernel that tests/triton/compile_all.py prints, the first variant: 16 bits, aligned
    rows of 128256 logits, nothing optional."""
    found: dict[str, dict] = {}
    for record in records:
        spills = record["stack"] + record["local"]
        own = {"registers": record["registers"], "spills": spills, "shared": record["shared"]}
        own["warps"] = record["options"].get("num_warps", 4)
        is_wide = record["dtype"] == "fp32"
        if record["kernel"] not in found or (found[record["kernel"]]["is_wide"] and not is_wide):
            found[record["kernel"]] = {**own, "is_wide": is_wide}
    for own in found.values():
        del own["is_wide"]
    return found


def compilers() -> dict[str, str]:
    text = subprocess.run([cuda.find_nvcc(), "--version"], capture_output=True, text=True).stdout
    return {"nvcc": re.search(r"V([\d.]+)", text)[1], "triton": version("triton")}


def main() -> None:
    kernels = {
        **of_cuda(),
        **of_attention(attention.compile_all(90)),
    }
    others = of_others(triton.compile_all(90))
    kernels["match_suffix"] = others.pop("match_suffix_kernel")
    found = {**compilers(), "architecture": "sm_90", "kernels": kernels, "others": others}
    resource_model.RESOURCES.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    page = predict.PAGE.read_text(encoding="utf-8")
    predict.PAGE.write_text(predict.updated(page), encoding="utf-8")


if __name__ == "__main__":
    main()
