"""The mean of the weights of drafts of one shape: `python -m scripts.smollm2.mean`.

Weights before and after a training at a rate that starts high again lie in one valley of the loss,
and their mean is often better than either (Wortsman et al., 2203.05482).
"""

import argparse
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

_WEIGHTS, _OTHERS = "model.safetensors", ("config.json", "record.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    about = "config and record are those of the last one"
    parser.add_argument("drafts", nargs="+", type=Path, metavar="DIR", help=about)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    options = parser.parse_args()
    files = [safe_open(draft / _WEIGHTS, "pt") for draft in options.drafts]
    weights = {}
    for name in files[-1].keys():  # noqa: SIM118 (not a dict)
        *others, last = (file.get_tensor(name) for file in files)
        if last.is_floating_point():
            weights[name] = torch.stack([*others, last]).double().mean(0).to(last.dtype)
        elif all(other.equal(last) for other in others):
            weights[name] = last
        else:
            raise SystemExit(f"{name}: differs, so these drafts have no mean")
    options.out.mkdir(parents=True, exist_ok=True)
    save_file(weights, options.out / _WEIGHTS, files[-1].metadata())
    for name in _OTHERS:
        shutil.copy(options.drafts[-1] / name, options.out / name)


if __name__ == "__main__":
    main()
