"""`fastspec info`: what runs here, and what does not, and why."""

import json
import platform

import typer
from rich.console import Console
from rich.table import Table

import fastspec
from fastspec.cli.options import AsJson


def info(as_json: AsJson = False) -> None:
    """Show versions, devices and kernel backends, with the reason why some are unavailable."""
    facts = describe()
    if as_json:
        typer.echo(json.dumps(facts))
        return
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    backends = "unavailable_backends", "bundled_models", "fetched_models"
    missing, bundled, fetched = (facts.pop(name).items() for name in backends)
    facts["cpu_instruction_set"] = facts["cpu_instruction_set"] or "none, _cpu is not built"
    for name, value in facts.items():
        label = name.replace("_", " ").replace("cpu", "CPU").replace("threads", "CPU threads")
        table.add_row(label, ", ".join(value) if isinstance(value, list) else str(value))
    for name, reason in missing:
        table.add_row(f"no {name} backend", reason)
    for name, is_there in bundled:
        table.add_row(f"bundled {name}", "present" if is_there else "missing")
    for name, is_there in fetched:
        table.add_row(name, "fetched" if is_there else f"fastspec fetch {name}")
    Console(highlight=False).print(table)


def describe() -> dict:
    """Everything as plain JSON values."""
    import torch
    import transformers

    from fastspec.models.named import BUNDLED, FETCHED, cache_folder
    from fastspec.tools.bench import cpu_model
    from fastspec_kernels import available_backends, cpu_instruction_set, unavailable_backends

    devices = [f"cpu ({cpu_model()})"]
    devices += [
        f"cuda:{index} ({torch.cuda.get_device_name(index)})"
        for index in range(torch.cuda.device_count())
    ]
    return {
        "fastspec": fastspec.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "devices": devices,
        "threads": torch.get_num_threads(),
        "cpu_instruction_set": cpu_instruction_set(),
        "available_backends": list(available_backends()),
        "unavailable_backends": unavailable_backends(),
        "bundled_models": {
            name: (folder / "config.json").is_file() for name, folder in BUNDLED.items()
        },
        "fetched_models": {name: (cache_folder() / name).is_dir() for name in FETCHED},
    }
