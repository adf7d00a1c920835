"""Accuracy against the gap in equal opportunity, for the choice of a method."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedstrata.experiments.reproduction.statistics import interval
from fedstrata.report.labels import spread
from fedstrata.report.plots import COLOURS

MARKERS = "osD^vP*X"


class Cloud(NamedTuple):
    """One panel: the accuracies and gaps of every method over runs."""

    title: str
    points: Mapping[str, tuple[np.ndarray, np.ndarray]]


def front(points: Mapping[str, tuple[float, float]]) -> list[str]:
    """The methods that no other beats in both accuracy and gap, in order of the gap.

    >>> front({"a": (0.8, 0.2), "b": (0.7, 0.1), "c": (0.7, 0.3)})
    ['b', 'a']
    """
    beaten = lambda p: any(q[0] >= p[0] and q[1] <= p[1] and q != p for q in points.values())
    return sorted((name for name, p in points.items() if not beaten(p)), key=lambda name: points[name][1])


def pareto(clouds: Sequence[Cloud], title: str, path: str | Path, note: str = "") -> Path:
    """One panel per cloud: labelled means with 95 % intervals, and the line through the Pareto front."""
    from fedstrata.base.figures import Figure

    columns = min(2, len(clouds))
    rows = -(-len(clouds) // columns)
    figure = Figure(figsize=(4.9 * columns + 0.4, 3.3 * rows + 0.6), layout="constrained")
    figure.suptitle(title, x=0.01, horizontalalignment="left", fontsize=12, fontweight="bold")
    grid: Any = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat[len(clouds) :]:
        axes.remove()
    for axes, cloud in zip(grid.flat, clouds, strict=False):
        _panel(axes, cloud)
    if note:
        figure.supxlabel(note, fontsize=8, color="0.4", x=0.01, horizontalalignment="left")
    return figure.write(path, dpi=150)


def _panel(axes: Any, cloud: Cloud) -> None:
    means = {}
    for number, (name, (accuracy, gap)) in enumerate(cloud.points.items()):
        (y, y_low, y_high), (x, x_low, x_high) = (interval(v[np.isfinite(v)]) for v in (accuracy, gap))
        means[name] = (y, x)
        spread = {"xerr": [[x - x_low], [x_high - x]], "yerr": [[y - y_low], [y_high - y]]}
        spread = {key: np.nan_to_num(value) for key, value in spread.items()}
        style = {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)]}
        axes.errorbar(x, y, **spread, **style, markersize=5, linewidth=0.9, elinewidth=0.7, alpha=0.9)
    best = front(means)
    axes.plot([means[n][1] for n in best], [means[n][0] for n in best], color="0.6", linewidth=0.8, zorder=0)
    axes.set_title(cloud.title, fontsize=10, loc="left")
    axes.set_xlabel("test EqOpp gap (left is fairer)", fontsize=9)
    axes.set_ylabel("test accuracy", fontsize=9)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.6)
    _labels(axes, means)


def _labels(axes: Any, means: Mapping[str, tuple[float, float]]) -> None:
    """Names in a column on the right, at least one line apart, each joined to its point."""
    low, high = axes.get_ylim()
    left, right = axes.get_xlim()
    edge = right + 0.06 * (right - left)
    wanted = np.array([(accuracy - low) / (high - low) for accuracy, _ in means.values()])
    for name, place in zip(means, spread(wanted, gap=0.075, low=0.02, high=0.98), strict=True):
        colour = COLOURS[list(means).index(name) % len(COLOURS)]
        at = low + place * (high - low)
        link = {"arrowstyle": "-", "color": colour, "linewidth": 0.5, "alpha": 0.6}
        where = {"xycoords": "data", "textcoords": "data", "fontsize": 8, "va": "center", "annotation_clip": False}
        axes.annotate(name, (means[name][1], means[name][0]), (edge, at), color=colour, arrowprops=link, **where)
    axes.set_xlim(left, right)
    axes.set_ylim(low, high)
