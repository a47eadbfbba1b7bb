"""`fastspec info`: what runs here, and what does not and why."""

import json
import platform

import typer
from rich.console import Console
from rich.table import Table

import fastspec
from fastspec.cli.options import AsJson


def info(as_json: AsJson = False) -> None:
    """Show versions, devices, which kernel backends are available and why the others are not."""
    facts = describe()
    if as_json:
        typer.echo(json.dumps(facts))
        return
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _rows(facts):
        table.add_row(name, value)
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


def _rows(facts: dict) -> list[tuple[str, str]]:
    missing = facts["unavailable_backends"].items()
    bundled = facts["bundled_models"].items()
    fetched = facts["fetched_models"].items()
    return [
        ("fastspec", facts["fastspec"]),
        ("python", facts["python"]),
        ("torch", facts["torch"]),
        ("transformers", facts["transformers"]),
        ("devices", ", ".join(facts["devices"])),
        ("CPU threads", str(facts["threads"])),
        ("CPU instruction set", facts["cpu_instruction_set"] or "none, _cpu is not built"),
        ("available backends", ", ".join(facts["available_backends"])),
        *((f"no {name} backend", reason) for name, reason in missing),
        *((f"bundled {name}", "present" if there else "missing") for name, there in bundled),
        *((name, "fetched" if there else f"fastspec fetch {name}") for name, there in fetched),
    ]
