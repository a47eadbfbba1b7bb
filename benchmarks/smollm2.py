"""Records SmolLM2 with each drafter that needs no more than what is fetched or in the package.

`python -m benchmarks.smollm2` runs one `fastspec bench --record` after the other; SmolLM2 has to be
fetched. Where transformers has a method of the same name, it is timed in the same run. Words given
on the command line choose the runs that contain one of them: `python -m benchmarks.smollm2 tree`.
"""

import shlex
import subprocess
import sys

COMMON = "--target smollm2 --chat --num-prompts 20 --max-tokens 48 --repeats 1 --dtype bfloat16"
RUNS = (
    "--method eagle3 -k 4 --confidence-threshold 0.3 --no-peers",
    "--method eagle3 -k 4 --confidence-threshold 0.3 --suffix-tokens 8 --no-peers",
    "--method eagle3 -k 2 --tree-nodes 4 --no-peers",
    "--method eagle3 -k 2 --tree-nodes 6 --tree-suffix 5 --no-peers",
    "--method suffix -k 6 --no-peers",
    "--method prompt_lookup -k 4 --prompt-lookup-min 2 --prompt-lookup-max 4",
    "--method ngram -k 4 --no-peers",
    "--method mag -k 4 --no-peers",
    "--method early_exit --exit-layer 20 -k 2",
)


def main() -> None:
    words = sys.argv[1:]
    runs = [run for run in RUNS if not words or any(word in run for word in words)]
    for number, run in enumerate(runs, 1):
        command = shlex.split(f"{COMMON} --threads 2 --record {run}")
        sys.stderr.write(f"{number} of {len(runs)}: fastspec bench {shlex.join(command)}\n")
        subprocess.run([sys.executable, "-m", "fastspec", "bench", *command], check=True)


if __name__ == "__main__":
    main()
