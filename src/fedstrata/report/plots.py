"""Curves over rounds, examples, bytes or time: mean and band over seeds, each line labelled at its end."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np

from fedstrata.base.directions import is_gain
from fedstrata.base.errors import unknown
from fedstrata.report.history import History
from fedstrata.report.labels import label_ends
from fedstrata.report.series import series

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from fedstrata.base.figures import Figure

X = Literal["round", "samples", "megabytes", "seconds"]
Band = Literal["std", "ci", "quantiles", "none"]

# Okabe and Ito's colours that are visible on white, in an order that keeps neighbours far apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9")
STYLES = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (5, 1.5, 1, 1.5)), (0, (8, 2)))

_X_LABELS = {
    "round": "communication rounds",
    "samples": "examples used (all clients)",
    "megabytes": "megabytes sent (up + down)",
    "seconds": "wall-clock time (seconds)",
}
_Y_LABELS = {"bytes_up": "bytes sent up", "bytes_down": "bytes sent down", "seconds": "wall-clock time (seconds)"}


class Curve(NamedTuple):
    """A line with its band.

    Args:
        x: the horizontal positions.
        middle: the line.
        low: the lower end of the band.
        high: the upper end of the band.
    """

    x: np.ndarray
    middle: np.ndarray
    low: np.ndarray
    high: np.ndarray


def curve(history: History, y: str, x: X, band: Band) -> Curve:
    """The line and its band for the seeds of one setting.

    Args:
        history: the seeds.
        y: the column.
        x: the horizontal axis.
        band: "std": mean and one standard deviation; "ci": mean and its 95 % Student interval; "quantiles": median and
            quartiles; "none": no band.
    """
    mean, std = history.mean(y), history.std(y)
    if band == "quantiles":
        middle, low, high = (history.quantile(y, q) for q in (0.5, 0.25, 0.75))
    else:
        seeds = len(history.seeds)
        width = {"std": 1.0, "none": 0.0, "ci": _student(seeds) / seeds**0.5}[band]
        middle, low, high = mean, mean - width * std, mean + width * std
    if x == "megabytes":
        across = (history.mean("bytes_up") + history.mean("bytes_down")) / 1e6
    else:
        across = history.mean(x)
    return Curve(across, middle, low, high)


def plot(
    results: Any,
    y: str = "objective",
    x: X = "round",
    path: str | Path | None = None,
    log: bool | Literal["auto"] = "auto",
    band: Band = "std",
) -> "Figure":
    """One line per method and swept value, with a band over seeds.

    Over megabytes a method that sends nothing (a centralised one) is a thin horizontal line at its last value, and the
    axis is logarithmic where one method sends more than twenty times as much as another.

    Args:
        results: a dictionary from labels to results of `fs.run` or histories, a list of them, or one.
        y: the column.
        x: the horizontal axis: "round", "samples", "megabytes" or "seconds".
        path: also save the figure there, in the format of the suffix (.png, .pdf, .svg).
        log: whether the vertical axis is logarithmic; "auto": if a cost decreases by more than two orders of magnitude.
        band: "std" (mean and standard deviation), "ci" (95 % interval of the mean), "quantiles" (median and quartiles)
            or "none".
    """
    for what, value, known in (("x axis", x, get_args(X)), ("band", band, get_args(Band))):
        if value not in known:
            raise unknown(what, str(value), known)
    if log not in (True, False, "auto"):
        raise ValueError(f"plot: log must be True, False or 'auto', got {log!r}")
    lines = series(results, "plot")
    for line in lines:
        if y not in line.history.columns:
            raise unknown(f"column of {line.label!r}", y, line.history.columns)
    curves = [curve(line.history, y, x, band) for line in lines]
    still = [x == "megabytes" and sends_nothing(c) for c in curves]
    if all(still):
        raise ValueError("plot: none of these methods sends anything, so there are no megabytes; give x='round'")
    sent = np.concatenate([c.x for c, free in zip(curves, still, strict=True) if not free])
    apart = x == "megabytes" and far_apart(curves)
    span = np.array([sent[sent > 0].min() if apart else 0.0, sent.max()])
    shown = lambda c: Curve(*(part[c.x > 0] for part in c)) if apart else c  # round 0 cannot be shown on a log axis
    curves = [_level(c, span) if free else shown(c) for c, free in zip(curves, still, strict=True)]
    labels = [f"{line.label} (sends nothing)" if free else line.label for line, free in zip(lines, still, strict=True)]

    from fedstrata.base.figures import Figure

    width = 5.4 + 0.08 * max(map(len, labels))  # room for the longest label
    figure = Figure(figsize=(width, max(3.8, 0.9 + 0.2 * len(lines))), layout="constrained")
    axes = figure.add_subplot()
    if log is True or (
        log == "auto" and not any(is_gain(y, line.history.modes) for line in lines) and _falls_far(curves)
    ):
        axes.set_yscale("log", nonpositive="mask")
    if apart:
        axes.set_xscale("log", nonpositive="mask")
    for i, c in enumerate(curves):
        seeds = 1 if still[i] else len(lines[i].history.seeds)
        _draw(axes, c, COLOURS[i % len(COLOURS)], STYLES[i % len(STYLES)], lines[i].label, seeds)
        axes.lines[-1].set_linewidth(0.9 if still[i] else 1.6)
    axes.set_xlabel(_X_LABELS[x])
    axes.set_ylabel(_Y_LABELS.get(y, y.replace("/", " ").replace("_", " ")))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.margins(x=0.02)
    label_ends(axes, [(axes.lines[i], _with_fate(labels[i], c)) for i, c in enumerate(curves)])
    if path is not None:
        figure.write(path, dpi=200)
    return figure


def sends_nothing(c: Curve) -> bool:
    """Whether a curve over megabytes stays at zero, where it would be a vertical line."""
    return not c.x.any()


def far_apart(curves: Sequence[Curve]) -> bool:
    """Whether methods send such different amounts that on a linear axis some would be vertical lines."""
    ends = [c.x[-1] for c in curves if not sends_nothing(c)]
    return bool(ends) and max(ends) > 20 * min(ends)


def _level(c: Curve, span: np.ndarray) -> Curve:
    return Curve(span, *(np.repeat(part[-1], 2) for part in (c.middle, c.low, c.high)))


def _draw(axes: "Axes", c: Curve, colour: str, style: Any, label: str, seeds: int) -> None:
    axes.plot(c.x, c.middle, color=colour, linestyle=style, label=label)
    if seeds > 1 and not np.array_equal(c.low, c.high, equal_nan=True):
        low = c.low
        if axes.get_yscale() == "log":
            # A band that reaches zero cannot be shown on this axis: end it a decade below its line.
            low = np.where(c.low > 0, c.low, c.middle / 10)
        axes.fill_between(c.x, low, c.high, color=colour, alpha=0.16, linewidth=0)


def _falls_far(curves: list[Curve]) -> bool:
    values = np.concatenate([c.middle for c in curves])
    values = values[np.isfinite(values)]
    return bool(values.size) and values.min() > 0 and values.max() > 100 * values.min()


def _with_fate(label: str, c: Curve) -> str:
    return label if np.isfinite(c.middle[-1]) else f"{label} (diverged)"


def _student(seeds: int) -> float:
    from scipy.stats import t

    return float(t.ppf(0.975, seeds - 1)) if seeds > 1 else 0.0
