"""The results: a table with intervals and paired differences, and one picture."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedstrata.experiments.reproduction.statistics import interval
from fedstrata.experiments.site_study import problems
from fedstrata.experiments.site_study.methods import WORDS
from fedstrata.experiments.site_study.study import ALL, AXIS
from fedstrata.report.history import History
from fedstrata.report.plots import COLOURS

BASE = "FedAvg"
GLOBAL, PARTIAL, LOCAL = "test/auc", "test/pauc_0.3", "test/mean_local_auc"
MARKERS = "osD^vP*X"


class Row(NamedTuple):
    """One method: final values over divisions."""

    label: str
    method: str
    site: str  # that trained alone; "" for all
    values: dict[str, np.ndarray]
    seeds: list[int]

    @property
    def alone(self) -> bool:
        return bool(self.site)


def rows(histories: Mapping[str, History], site: str) -> list[Row]:
    """A row for every method, and one for every site that trained alone.

    Args:
        histories: by method.
        site: what a client is called.
    """
    methods, alone = [], []
    for name, history in histories.items():
        for setting, runs in history.settings():
            one = setting.pop(AXIS, ALL)
            last = {c: runs.last(c).astype(float) for c in runs.columns}
            words = ", ".join(f"{key}={value}" for key, value in setting.items())
            label = WORDS.get(name, name) if one == ALL else f"{one} alone"
            row = Row(f"{label}, {words}" if words else label, name, "" if one == ALL else one, last, runs.seeds)
            (methods if one == ALL else alone).append(row)
    return [*methods, *alone]


def table(found: Sequence[Row], site: str) -> str:
    """Means with 95 % intervals over divisions, in Markdown.

    Args:
        found: what `rows` gives.
        site: what a client is called.
    """
    sites = _sites(found)
    head = ["method", "global AUC", "less FedAvg's", "partial AUC (FPR ≤ 0.3)", "less FedAvg's"]
    head += [f"mean of the {site}s' AUCs", *(f"AUC {name}" for name in sites.values()), "MB sent"]
    base = next((row for row in found if row.method == BASE), None)
    lines = [head, ["---", *["---:"] * (len(head) - 1)]]
    for row in found:
        cells = [row.label]
        for column in (GLOBAL, PARTIAL):
            cells += [_with(row.values[column]), "" if row is base else _less(row, base, column)]
        cells += [_with(row.values[LOCAL]), *(_mean(row.values[column]) for column in sites)]
        cells.append(f"{np.mean(row.values['bytes_up'] + row.values['bytes_down']) / 1e6:.3g}")
        lines.append(cells)
    many = len(found[0].seeds)
    notes = (
        f"Test rows of {many} division{'s' * (many > 1)} of the data; means, and 95 % intervals of the means (Student) "
        "over divisions, whose test rows overlap: intervals are too narrow for a statement about other patients. "
        f"Differences are between runs on the same division.\n\n"
        f"The global AUC compares patients of all {site}s with each other; the mean of the {site}s' AUCs only patients "
        f"of one {site}. They are two different numbers, and a method may be good at one and bad at the other. Partial "
        f"AUC is on McClish's scale, where guessing is 0.5. MB: up and down, all {site}s, the whole run."
    )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + f"\n\n{notes}\n"


def headline(found: Sequence[Row], site: str) -> str:
    """The headline of the picture, which follows from the numbers.

    Args:
        found: what `rows` gives.
        site: what a client is called.
    """
    mean = lambda row: float(np.mean(row.values[GLOBAL]))
    alone = [mean(row) for row in found if row.alone]
    others = [row for row in found if not row.alone and np.isfinite(mean(row))]
    if not others:
        return "no run finished"
    best = max(others, key=mean)
    parts = [f"Ranking the patients of all {site}s: {best.label} is best on average, AUC {mean(best):.3f}"]
    base = next((row for row in found if row.method == BASE), None)
    if base is not None and base is not best:
        gap, low, high = interval(best.values[GLOBAL] - base.values[GLOBAL])
        if np.isfinite(low) and low > 0:
            parts.append(f"{gap:.3f} above FedAvg ({low:.3f} to {high:.3f})")
        else:
            parts.append(f"FedAvg, {mean(base):.3f}, is not clearly worse")
    if alone:
        parts.append(f"one {site} alone reaches {min(alone):.2f} to {max(alone):.2f}")
    return "; ".join(parts)


def picture(found: Sequence[Row], name: str, site: str, path: str | Path) -> Path:
    """Left the global AUC of every method, right how well the patients of each site are ranked among themselves.

    Args:
        found: what `rows` gives.
        name: the experiment's.
        site: what a client is called.
        path: where to save it.
    """
    from fedstrata.base.figures import Figure

    sites = _sites(found)
    figure = Figure(figsize=(10.5, 1.9 + 0.36 * len(found)), layout="constrained")
    title = f"{name}: {headline(found, site)}"
    figure.suptitle(textwrap.fill(title, 100), x=0.01, horizontalalignment="left", fontsize=11, fontweight="bold")
    left, right = figure.subplots(1, 2, sharey=True)
    place = np.arange(len(found))[::-1]
    for at, row in zip(place, found, strict=True):
        middle, low, high = interval(row.values[GLOBAL])
        spread = np.nan_to_num([[middle - low], [high - middle]])
        colour = "0.45" if row.alone else COLOURS[0]
        left.errorbar(middle, at, xerr=spread, color=colour, marker="o", markersize=5, capsize=3)
        left.annotate(f"{middle:.3f}", (middle, at), (0, 6), textcoords="offset points", fontsize=8, ha="center")
    for number, (column, words) in enumerate(sites.items()):
        means = [float(np.mean(row.values[column])) for row in found]
        style: dict[str, Any] = {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)]}
        shifted = place + 0.12 * (number - (len(sites) - 1) / 2)
        right.plot(means, shifted, linestyle="none", markersize=5, label=words, alpha=0.9, **style)
    left.set_yticks(place, labels=[row.label for row in found])
    left.set_ylim(-0.7, len(found) - 0.3)
    left.set_title("patients of all together (global AUC)", fontsize=10, loc="left")
    right.set_title(f"patients of one {site} among themselves (AUC of each)", fontsize=10, loc="left")
    for axes in (left, right):
        axes.set_xlabel("area under the ROC curve, test rows", fontsize=9)
        axes.tick_params(labelsize=8.5)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25, linewidth=0.6)
    figure.legend(*right.get_legend_handles_labels(), loc="outside right center", fontsize=8.5, frameon=False)
    many = len(found[0].seeds)
    note = f"means over {many} division{'s' * (many > 1)} of the data; bars: 95 % intervals of the means"
    figure.supxlabel(note, fontsize=8, color="0.4", x=0.01, horizontalalignment="left")
    return figure.write(path, dpi=150)


def _sites(found: Sequence[Row]) -> dict[str, str]:
    """The columns of single sites, with their names as words."""
    start = "test/auc_"
    columns = [c for c in found[0].values if c.startswith(start)]
    known = {f"test/{problems.column(row.site)}": row.site for row in found if row.site}
    ordered = sorted(columns, key=lambda c: [*known, c].index(c))
    return {c: known.get(c, c.removeprefix(start).replace("_", " ")) for c in ordered}


def _with(values: np.ndarray) -> str:
    mean, low, high = interval(values)
    if not np.isfinite(mean):
        return "diverged"
    return f"{mean:.3f} ({low:.3f} to {high:.3f})" if np.isfinite(low) else f"{mean:.3f}"


def _mean(values: np.ndarray) -> str:
    return f"{np.mean(values):.3f}" if np.isfinite(values).all() else "–"


def _less(row: Row, base: Row | None, column: str) -> str:
    if base is None or row.seeds != base.seeds:
        return ""
    mean, low, high = interval(row.values[column] - base.values[column])
    if not np.isfinite(mean):
        return "–"
    words = f"{mean:+.3f} ({low:+.3f} to {high:+.3f})" if np.isfinite(low) else f"{mean:+.3f}"
    return words.replace("-", "−")
