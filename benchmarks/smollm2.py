"""Records SmolLM2 with each drafter: those that need nothing more, and drafts that you trained.

`python -m benchmarks.smollm2` runs one `fastspec bench --record` after the other; SmolLM2 has to be
fetched. Where transformers has a method of the same name, it is timed in a run of its own. Words
given on the command line choose the runs that contain one of them: `python -m benchmarks.smollm2
tree`.

`--draft DIR` names what `fastspec train draft` made for SmolLM2, which cannot be fetched; without
it the runs that need it are left out.
"""

import argparse
import shlex
import subprocess
import sys
from collections.abc import Iterable

COMMON = (
    "--target smollm2 --chat --num-prompts 20 --repeats 1 --dtype bfloat16 --threads 2 --record"
)
# Transformers needs several times as long, so outputs are shorter where it runs beside.
ALONE = "--max-tokens 128 --no-peers"
BESIDE_PEERS = "--max-tokens 24"
RUNS = (
    f"{ALONE} --method eagle3 -k 3 --confidence-threshold 0.3 --draft-bits 8",
    f"{ALONE} --method eagle3 -k 3 --confidence-threshold 0.3 --suffix-tokens 8 --draft-bits 8",
    # Where a pass over some more rows costs no more, as with AMX.
    f"{ALONE} --method eagle3 -k 5 --confidence-threshold 0.2 --suffix-tokens 10 --draft-bits 8",
    f"{ALONE} --method eagle3 -k 2 --tree-nodes 4",
    f"{ALONE} --method eagle3 -k 2 --tree-nodes 6 --tree-suffix 5",
    f"{ALONE} --method glide -k 2 --confidence-threshold 0.3 --draft-bits 8",
    f"{ALONE} --method glide -k 2 --confidence-threshold 0.3 --suffix-tokens 8",
    f"{ALONE} --method quantized -k 5",
    f"{ALONE} --method quantized -k 5 --suffix-tokens 8",
    f"{ALONE} --method quantized -k 7 --dtype float32",
    f"{ALONE} --method cascade --draft smollm2-eagle3 --draft-bits 8",
    f"{ALONE} --method suffix -k 12 --suffix-max-spec-factor 3",
    f"{ALONE} --method prompt_lookup -k 8 --prompt-lookup-min 2 --prompt-lookup-max 16",
    f"{ALONE} --method ngram -k 4",
    f"{ALONE} --method mag -k 4",
    f"{ALONE} --method early_exit --exit-layer 20 -k 2",
    f"{BESIDE_PEERS} --method prompt_lookup -k 8 --prompt-lookup-min 2 --prompt-lookup-max 16",
    f"{BESIDE_PEERS} --method early_exit --exit-layer 20 -k 2",
)
OF_A_DRAFT = (
    f"{ALONE} --method draft_model -k 2",
    f"{ALONE} --method draft_model -k 2 --suffix-tokens 8",
    f"{ALONE} --method tree -k 2 --tree-nodes 4",
    f"{ALONE} --method cascade --k-matrix [[1,8],[0,0]]",
    f"{BESIDE_PEERS} --method draft_model -k 2",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("words", nargs="*", help="of the runs to make; by default all")
    about = "what `fastspec train draft` has made; the records name it as you do"
    parser.add_argument("--draft", metavar="DIR", help=about)
    options = parser.parse_args()

    def chosen(runs: Iterable[str]) -> list[str]:
        return [run for run in runs if not options.words or any(w in run for w in options.words)]

    runs, wanted = chosen(RUNS), chosen(OF_A_DRAFT)
    if options.draft is not None:
        runs += [f"{run} --draft {shlex.quote(options.draft)}" for run in wanted]
    elif wanted:
        sys.stderr.write(f"{len(wanted)} runs are left out: they need --draft DIR\n")
    for number, run in enumerate(runs, 1):
        command = shlex.split(f"{COMMON} {run}")
        sys.stderr.write(f"{number} of {len(runs)}: fastspec bench {shlex.join(command)}\n")
        subprocess.run([sys.executable, "-m", "fastspec", "bench", *command], check=True)


if __name__ == "__main__":
    main()
