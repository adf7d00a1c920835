"""Labels at the ends of lines, moved apart so that they do not overlap."""

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

_POINTS = 9.0  # size of the letters
_MARGIN = 1.045  # where leaders end, as a fraction of the axes' width


def spread(wanted: np.ndarray, gap: float, low: float, high: float) -> np.ndarray:
    """The positions nearest to `wanted` (least squares) that keep their order, are `gap` apart and in [low, high].

    With the i-th smallest moved down by i gaps this is an isotonic regression, clipped to the remaining interval.

    >>> spread(np.array([0.5, 0.5, 0.1]), gap=0.2, low=0.0, high=1.0)
    array([0.4, 0.6, 0.1])
    """
    from scipy.optimize import isotonic_regression

    order = np.argsort(wanted, kind="stable")
    steps = gap * np.arange(len(wanted))
    room = max(high - steps[-1], low)
    placed = np.clip(isotonic_regression(wanted[order] - steps).x, low, room) + steps
    out = np.empty_like(placed)
    out[order] = placed
    return out


def label_ends(axes: "Axes", labelled: "list[tuple[Line2D, str]]") -> None:
    """Write each line's name to the right of the axes, in its colour, tied to the line's last finite point."""
    from matplotlib.collections import LineCollection

    figure = axes.figure
    figure.canvas.figure.draw_without_rendering()  # settles the layout, so that the height is known
    gap = 1.25 * _POINTS * figure.dpi / 72 / axes.get_window_extent().height
    axes.set(xlim=axes.get_xlim(), ylim=axes.get_ylim())  # the leaders below are right for these limits only
    to_axes = axes.transData + axes.transAxes.inverted()
    ends = [_end(line, axes.get_yscale() == "log") for line, _ in labelled]
    points = [(1.0, 1.0) if end is None else np.clip(to_axes.transform(end[1]), 0, 1) for end in ends]
    places = spread(np.array([y for _, y in points]), gap, low=0.0, high=1.0)
    leaders, colours = [], []
    for (line, text), end, (x, y), place in zip(labelled, ends, points, places, strict=True):
        axes.text(
            _MARGIN + 0.01,
            place,
            text,
            color=_darker(line.get_color()),
            fontsize=_POINTS,
            verticalalignment="center",
            transform=axes.transAxes,
        )
        if end is not None:
            line.set(marker="o", markersize=3.5, markevery=[end[0]], clip_on=False)
            leaders.append([(x, y), (1.0, y), (_MARGIN, place)])
            colours.append(line.get_color())
    # Behind the curves and dotted: otherwise a leader would look like the continuation of a curve.
    styles = {"linewidths": 0.8, "linestyles": "dotted", "alpha": 0.7, "zorder": 1}
    leader = LineCollection(leaders, colors=colours, transform=axes.transAxes, clip_on=False, **styles)
    axes.add_collection(leader, autolim=False)


def _end(line: "Line2D", log: bool) -> tuple[int, np.ndarray] | None:
    """Index and place of the last point of a line that can be drawn."""
    points = np.column_stack([np.asarray(line.get_xdata(), float), np.asarray(line.get_ydata(), float)])
    drawn = np.isfinite(points).all(axis=1) & ((points[:, 1] > 0) | (not log))
    return (last := int(np.flatnonzero(drawn)[-1]), points[last]) if drawn.any() else None


def _darker(colour: Any) -> tuple[float, ...]:
    """Thin letters need more contrast than a line of the same colour."""
    from matplotlib.colors import to_rgb

    return tuple(0.75 * channel for channel in to_rgb(colour))
