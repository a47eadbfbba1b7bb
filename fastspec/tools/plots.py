"""Charts of the counters; the only module that needs matplotlib."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastspec.config.checks import require

if TYPE_CHECKING:
    from fastspec.engine.stats import SpecStats


_NEEDS_LATEX = "pgf"


def require_plotting(path: Path) -> Any:
    """matplotlib's Figure, which draws without a display, to plot to a file.

    Raises:
        ValueError: matplotlib is not installed, or does not know the suffix of the file.
    """
    try:
        from matplotlib.backend_bases import (  # pyright: ignore[reportMissingImports]
            FigureCanvasBase,
        )
        from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ValueError("plot: needs matplotlib; install fastspec-kernels[plot]") from error
    known = FigureCanvasBase.get_supported_filetypes().keys() - {_NEEDS_LATEX}
    expected = f"a file whose suffix is one of {', '.join(sorted(known))}"
    require("plot", str(path), path.suffix[1:].lower() in known, expected)
    return Figure


def plot_loss(losses: Sequence[float], path: Path) -> None:
    """Plot the loss of each training step, and its mean over 2 % of the steps.

    Raises:
        ValueError: as for `plot_acceptance`.
    """
    figure = require_plotting(path)(figsize=(6, 3), layout="constrained")
    chart = figure.subplots()
    width = max(1, len(losses) // 50)
    means = [
        sum(part) / len(part)
        for part in (losses[max(0, end - width) : end] for end in range(1, len(losses) + 1))
    ]
    chart.plot(losses, linewidth=0.5, alpha=0.5)
    chart.plot(means)
    chart.set(xlabel="step", ylabel="loss", yscale="log")
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    staged = path.with_name(f".new.{path.name}")
    figure.savefig(staged)
    staged.replace(path)


def plot_acceptance(stats: "SpecStats", rates: list[float], path: Path) -> None:
    """Plot two charts: target passes by accepted tokens, and the acceptance rate by position.

    Args:
        stats: of a run or a simulation.
        rates: by position in the draft, see `formulas.acceptance_by_position`.
        path: the image file; its suffix determines the format.
    Raises:
        ValueError: see `require_plotting`; nothing is written.
    """
    figure = require_plotting(path)(figsize=(8, 3), layout="constrained")
    steps, curve = figure.subplots(1, 2)
    steps.bar(range(len(stats.acceptance_histogram)), stats.acceptance_histogram)
    steps.set(xlabel="accepted draft tokens", ylabel="target passes")
    curve.plot(range(1, len(rates) + 1), rates, marker="o")
    curve.set(xlabel="position in the draft", ylabel="acceptance rate", ylim=(0, 1))
    _save(figure, path)
