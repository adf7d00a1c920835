"""A table and a picture of the rows of each client of a federation."""

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedstrata.data.validation import labels_of

if TYPE_CHECKING:
    from rich.table import Table

    from fedstrata.base.figures import Figure
    from fedstrata.data.federation import Federation

OKABE_ITO = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#F0E442", "#000000")
FEW_CLASSES = 30  # with more labels than this, bars are not divided
FEW_CLIENTS = 150  # more bars than this are a histogram


def label_counts(federation: "Federation", split: str = "train") -> np.ndarray | None:
    """The number of rows by client and class, (N, classes); None without class labels.

    Args:
        federation: the data.
        split: the split that is counted.

    >>> from fedstrata.data.federation import Federation
    >>> label_counts(Federation.from_arrays({"y": [0, 1, 1]}, [0, 0, 1]))
    array([[1, 1], [0, 1]])
    """
    labels, classes = labels_of(federation[split].examples), federation.classes
    if labels is None or classes is None or labels.ndim != 1:
        return None
    part = federation[split]
    cells = np.bincount(part.owners * classes + np.asarray(labels), minlength=part.clients * classes)
    return cells.reshape(part.clients, classes)


def _shares(counts: np.ndarray) -> str:
    """The largest classes of one client as text, e.g. "1: 60 %, 0: 40 %"."""
    top = np.argsort(-counts, kind="stable")[:3]
    listed = ", ".join(f"{c}: {100 * counts[c] / max(counts.sum(), 1):.0f} %" for c in top if counts[c])
    return listed + (", …" if (counts > 0).sum() > 3 else "")


def summary(federation: "Federation", limit: int = 20) -> "Table":
    """One line per client (the first `limit`), then the totals; see `Federation.summary`."""
    from rich.table import Table

    own = [name for name, split in federation.splits.items() if not split.pooled]
    pooled = [f"{name} {split.size:,} rows" for name, split in federation.splits.items() if split.pooled]
    labels = label_counts(federation)
    table = Table(
        title=f"{federation.clients:,} clients, {federation['train'].size:,} training rows",
        caption=f"pooled, owned by no client: {', '.join(pooled)}" if pooled else None,
    )
    table.add_column("client")
    for name in own:
        table.add_column(f"{name} rows", justify="right")
    if labels is not None:
        table.add_column("class shares (train)")
    for i in range(min(limit, federation.clients)):
        shares = [] if labels is None else [_shares(labels[i])]
        table.add_row(federation.name(i), *(f"{federation[name].counts[i]:,}" for name in own), *shares)
    if federation.clients > limit:
        table.add_row(f"… {federation.clients - limit:,} more", *("" for _ in own))
    shares = [] if labels is None else [_shares(labels.sum(axis=0))]
    table.add_section()
    table.add_row("all", *(f"{federation[name].size:,}" for name in own), *shares)
    return table


def _colours(classes: int) -> list:
    """Colours for colour-blind readers: the Okabe-Ito set, or for more classes an even ramp that works in grey."""
    from matplotlib import colormaps

    if classes <= len(OKABE_ITO):
        return list(OKABE_ITO[:classes])
    return [colormaps["cividis"](k / (classes - 1)) for k in range(classes)]


def plot(federation: "Federation", path: str | PathLike[str] | None = None) -> "Figure":
    """Stacked bars of training rows by label; a histogram of client sizes for more than `FEW_CLIENTS` clients."""
    from fedstrata.base.figures import Figure

    clients, counts = federation.clients, np.asarray(federation["train"].counts)
    figure = Figure(figsize=(min(5 + 0.12 * clients, 14), 4), layout="constrained")
    axes = figure.subplots()
    if clients > FEW_CLIENTS:
        axes.hist(counts, bins=50, color=OKABE_ITO[0])
        axes.set(xlabel="training rows of a client", ylabel="clients", title=f"Sizes of {clients:,} clients")
    else:
        labels, place, floor = label_counts(federation), np.arange(clients), np.zeros(clients)
        if labels is None or labels.shape[1] > FEW_CLASSES:
            axes.bar(place, counts, color=OKABE_ITO[0])
        else:
            many, edge = labels.shape[1] > len(OKABE_ITO), {"edgecolor": "white", "linewidth": 0.3}
            for k, colour in enumerate(_colours(labels.shape[1])):
                bars = axes.bar(place, labels[:, k], bottom=floor, color=colour, label=str(k), **edge)
                floor = floor + labels[:, k]
                if many and clients <= 40:  # neighbouring shades are alike: write the label into the larger pieces
                    words = [str(k) if height > 0.04 * counts.max() else "" for height in labels[:, k]]
                    ink = "white" if k < 0.6 * labels.shape[1] else "black"
                    axes.bar_label(bars, words, label_type="center", fontsize=7, color=ink)
            columns = 1 + (labels.shape[1] - 1) // 15
            handles, texts = axes.get_legend_handles_labels()
            # Reversed, so that the legend reads from top to bottom like the bars.
            figure.legend(handles[::-1], texts[::-1], title="label", loc="outside right upper", ncols=columns)
        if clients <= 30:
            axes.set_xticks(
                place,
                list(federation.names),
                rotation=30 if clients > 4 else 0,
                ha="right" if clients > 4 else "center",
            )
        axes.set(xlabel="client", ylabel="training rows", title="Who has what")
    axes.spines[["top", "right"]].set_visible(False)
    if path is not None:
        figure.write(Path(path), dpi=150)
    return figure
