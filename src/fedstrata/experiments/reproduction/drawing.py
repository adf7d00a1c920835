"""Figures of several panels in the library's style: lines labelled at their ends, bands over seeds."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedstrata.report.labels import label_ends
from fedstrata.report.plots import COLOURS, STYLES


class Line(NamedTuple):
    """Values over seeds, `(seeds, points)`; drawn as their mean, with one standard deviation as a band."""

    x: np.ndarray
    values: np.ndarray


class Panel(NamedTuple):
    title: str
    lines: Mapping[str, Line]
    across: str = "communication rounds"
    up: str = ""
    log: bool = True  # the vertical axis
    log_x: bool = False
    note: str = ""  # a line of words inside the panel


def draw(panels: Sequence[Panel], title: str, path: str | Path, columns: int = 3) -> Path:
    """Panels in rows of `columns`, saved as a picture.

    Args:
        panels: what to draw.
        title: the line above.
        path: where to save it.
        columns: panels in a row.
    """
    from fedstrata.base.figures import Figure

    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    longest = max(len(label) for panel in panels for label in panel.lines)
    width = 2.6 + 0.085 * longest
    across = width * columns + 0.6
    figure = Figure(figsize=(across, 2.75 * rows + 0.5), layout="constrained")
    figure.suptitle(
        textwrap.fill(title, int(9 * across)), x=0.01, horizontalalignment="left", fontsize=12, fontweight="bold"
    )
    grid: Any = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.remove()
    for axes, panel in zip(grid.flat, panels, strict=False):
        _panel(axes, panel)
    for axes, panel in zip(grid.flat, panels, strict=False):  # last, because labels need settled limits
        label_ends(axes, list(zip(axes.lines[: len(panel.lines)], panel.lines, strict=True)))
    return figure.write(path, dpi=150)


def _panel(axes: Any, panel: Panel) -> None:
    if panel.log:
        axes.set_yscale("log", nonpositive="mask")
    if panel.log_x:  # few points: a tick at each, and none between
        points = next(iter(panel.lines.values())).x
        axes.set_xscale("log")
        axes.set_xticks(points, labels=[f"{point:g}" for point in points])
        axes.set_xticks([], minor=True)
    for number, line in enumerate(panel.lines.values()):
        colour, style = COLOURS[number % len(COLOURS)], STYLES[number % len(STYLES)]
        middle = line.values.mean(axis=0)
        axes.plot(line.x, middle, color=colour, linestyle=style, linewidth=1.5)
        if len(line.values) > 1:
            spread = line.values.std(axis=0, ddof=1)
            low = middle - spread
            low = np.where(low > 0, low, middle / 10) if panel.log else low
            axes.fill_between(line.x, low, middle + spread, color=colour, alpha=0.15, linewidth=0)
    axes.set_title(panel.title, fontsize=10, loc="left")
    axes.set_xlabel(panel.across, fontsize=9)
    axes.set_ylabel(panel.up, fontsize=9)
    axes.tick_params(which="both", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.margins(x=0.02)
    if panel.note:
        axes.text(0.03, 0.04, panel.note, transform=axes.transAxes, fontsize=8, color="0.25")
