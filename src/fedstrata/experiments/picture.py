"""The picture of an experiment: each chosen column against megabytes and against rounds, in one figure."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedstrata.base.directions import is_gain
from fedstrata.report.history import History
from fedstrata.report.labels import label_ends
from fedstrata.report.plots import COLOURS, STYLES, Curve, X, curve, far_apart, sends_nothing
from fedstrata.report.series import Series, series

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from fedstrata.base.figures import Figure

_ACROSS: dict[X, str] = {"megabytes": "megabytes sent (up + down, all clients)", "round": "communication rounds"}


def picture(
    histories: Mapping[str, History],
    columns: Sequence[str],
    title: str,
    *,
    path: str | Path | None = None,
) -> "Figure":
    """A row of two panels per column; lines are labelled at the right, bands show one deviation over seeds.

    A method that sends nothing (a centralised one) is a thin horizontal line against megabytes, at its final level.

    Args:
        histories: by label.
        columns: what to draw, a row each.
        title: the line above.
        path: where to save it; None: it is not saved.
    """
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    from fedstrata.base.figures import Figure

    lines = [line for line in series(histories, "picture") if all(c in line.history.columns for c in columns)]
    longest = max(len(line.label) for line in lines)
    height = max(2.9, 0.9 + 0.2 * len(lines))
    layout = ConstrainedLayoutEngine(hspace=0.06)
    figure = Figure(figsize=(8.6 + 0.075 * longest, 0.6 + height * len(columns)), layout=layout)
    figure.suptitle(title, x=0.012, horizontalalignment="left", fontsize=12, fontweight="bold")
    grid: Any = figure.subplots(len(columns), 2, sharey="row", sharex="col", squeeze=False)
    for row, column in zip(grid, columns, strict=True):
        for axes, x in zip(row, _ACROSS, strict=True):
            curves = [curve(line.history, column, x, "std") for line in lines]
            _panel(axes, lines, curves, column, x)
        row[0].set_ylabel(_name(column))
    for axes, words in zip(grid[-1], _ACROSS.values(), strict=True):
        axes.set_xlabel(words)
    several = any(len(line.history.seeds) > 1 for line in lines)
    free = any(sends_nothing(curve(line.history, columns[0], "megabytes", "std")) for line in lines)
    notes = ["bands: one standard deviation over seeds"] if several else []
    notes += ["horizontal lines on the left: final levels of methods that send nothing"] if free else []
    if notes:
        figure.supxlabel("; ".join(notes), fontsize=8, color="0.4", x=0.012, ha="left")
    for row in grid:  # last, because labels are placed within settled limits
        drawn = row[1].lines[: len(lines)]
        label_ends(row[1], [(d, _with_fate(line, d)) for line, d in zip(lines, drawn, strict=True)])
        for line in drawn:
            line.set_clip_on(True)  # a zoomed panel cuts its curves off
    if path is not None:
        figure.write(path, dpi=160)
    return figure


def _panel(axes: "Axes", lines: Sequence[Series], curves: Sequence[Curve], column: str, x: str) -> None:
    gain = any(is_gain(column, line.history.modes) for line in lines)
    if not gain and _spans(curves, 10):
        axes.set_yscale("log", nonpositive="mask")
    if x == "megabytes" and far_apart(curves):
        axes.set_xscale("log", nonpositive="mask")
    for number, (line, c) in enumerate(zip(lines, curves, strict=True)):
        colour, style = COLOURS[number % len(COLOURS)], STYLES[number % len(STYLES)]
        if x == "megabytes" and sends_nothing(c):  # named on the right, in the same colour and style
            axes.axhline(c.middle[-1], color=colour, linestyle=style, linewidth=1.0, alpha=0.6)
            continue
        axes.plot(c.x, c.middle, color=colour, linestyle=style, linewidth=1.7, label=line.label)
        if len(line.history.seeds) > 1:
            low = np.where(c.low > 0, c.low, c.middle / 10) if axes.get_yscale() == "log" else c.low
            axes.fill_between(c.x, low, c.high, color=colour, alpha=0.15, linewidth=0)
    if gain:
        axes.set_ylim(*_zoom(curves))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.margins(x=0.02)


def _spans(curves: Sequence[Curve], factor: float) -> bool:
    values = np.concatenate([c.middle for c in curves])
    values = values[np.isfinite(values)]
    return bool(values.size) and values.min() > 0 and values.max() > factor * values.min()


def _zoom(curves: Sequence[Curve]) -> tuple[float, float]:
    """Limits that show the ends of gains, where methods differ: the first sixth of the way may be below the frame."""
    ends = [c for c in curves if np.isfinite(c.middle[-1])]
    later = [(c.low[len(c.low) // 6 :], c.high[len(c.high) // 6 :]) for c in ends]
    low = min((np.nanmin(under) for under, _ in later), default=0.0)
    best = max((np.nanmax(over) for _, over in later), default=1.0)
    room = 0.06 * max(best - low, 1e-3)
    return low - room, best + room


def _with_fate(line: Series, drawn: Any) -> str:
    return line.label if np.isfinite(drawn.get_ydata()[-1]) else f"{line.label} (diverged)"


def _name(column: str) -> str:
    return column.replace("/", " ").replace("_", " ")
