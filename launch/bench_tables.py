"""What a suite is, and how people see its records: a table and a plot."""

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jax.sharding import Mesh

from .bench_options import Options
from .errors import BadInput
from .files import not_writable

Record = dict[str, Any]
_PANEL_INCHES = 5.0, 4.0
_PANELS_ACROSS = 3


class Point(NamedTuple):
    """A point of a curve, which a panel of a plot has under this label."""

    panel: str
    label: str
    x: float
    y: float


class Suite(NamedTuple):
    """A set of measurements.

    Attributes:
        records: (options, mesh, Python of peers) to records, each when it is measured.
        header: of the table.
        rows: of the table, that a record makes.
        axes: of the plot, horizontal and vertical; both are logarithmic.
        points: of the plot, that a record makes.
    """

    records: Callable[[Options, Mesh, str | None], Iterator[Record]]
    header: tuple[str, ...]
    rows: Callable[[Record], list[tuple[str, ...]]]
    axes: tuple[str, str]
    points: Callable[[Record], list[Point]]


# What suites of speed have in common: header and axes.
SPEED_HEADER = "what", "d", "mesh", "number", "note"
SPEED_AXES = "d, or columns of a tile", "pairs per second"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown, with columns of even width."""
    lines = [tuple(header), *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    cells = [
        [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        for line in lines
    ]
    cells.insert(1, ["-" * width for width in widths])
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def check_plot(path: str | None) -> None:
    """Refuse a plot that could not be drawn, before anything is measured.

    Raises:
        BadInput: without matplotlib, or if no file can be written at `path`.
    """
    if path is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        raise BadInput("--plot: needs matplotlib: pip install 'ott_shard[report]'")
    if Path(path).suffix != ".png":
        raise BadInput(f"--plot={path}: must end in .png")
    there = Path(path).exists()
    try:
        Path(path).touch()
        if not there:
            Path(path).unlink()
    except OSError as error:
        raise not_writable(f"--plot={path}", error, "file") from None


def plot(path: str, axes: tuple[str, str], points: Sequence[Point]) -> None:
    """Write a picture of all points, one panel beside the other."""
    # Without pyplot: no window, and nothing that would have to be closed.
    from matplotlib.figure import (  # pyright: ignore[reportMissingImports] (optional)
        Figure,
    )

    panels = list(dict.fromkeys(point.panel for point in points))
    across = min(len(panels), _PANELS_ACROSS)
    down = -(-len(panels) // across)
    width, height = _PANEL_INCHES
    figure = Figure(figsize=(width * across, height * down), layout="constrained")
    for place, panel in enumerate(panels, 1):
        own = [point for point in points if point.panel == panel]
        drawn = figure.add_subplot(down, across, place)
        for label in dict.fromkeys(point.label for point in own):
            curve = sorted(point[2:] for point in own if point.label == label)
            drawn.plot(*zip(*curve, strict=True), marker="o", label=label)
        drawn.set(title=panel, xlabel=axes[0], ylabel=axes[1])
        drawn.set(xscale="log", yscale="log")
        ticks = sorted({point.x for point in own})
        drawn.set_xticks(ticks, [f"{tick:g}" for tick in ticks], fontsize="small")
        drawn.set_xticks([], minor=True)
        drawn.legend(fontsize="small")
    figure.savefig(path, dpi=150)
