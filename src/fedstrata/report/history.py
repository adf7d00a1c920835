"""The record of a run: named columns over (swept values, seeds, rounds), as NumPy arrays."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedstrata.base.directions import Mode, checked, sign
from fedstrata.base.errors import unknown
from fedstrata.report import axes as rules
from fedstrata.report.records import Portable

WALL_CLOCK = ("seconds",)
"""Columns that differ between two runs of the same program; equality ignores them."""


@dataclass(eq=False, repr=False)
class History(Portable):
    """Columns of shape `(*axes, T)`, one entry per run and recorded round.

    Bytes, samples and seconds are cumulative. After a divergence the entries are NaN.

    Args:
        axes: the swept values by name; the last axis is "seed".
        columns: arrays of shape `(*axes, T)`, with at least "round".
        per_client: metrics of shape `(*axes, T, clients)`.
        modes: the directions ("max", "min" or "none") of columns that are not the library's.
        problem: a fingerprint of the problem; empty if unknown.
        monitor: a fingerprint of a monitored second problem; empty if unknown.

    >>> h = History({"seed": [0, 1]}, {"round": [[0, 1], [0, 1]], "objective": [[4.0, 1.0], [2.0, 3.0]]})
    >>> h.mean("objective"), h.last("objective")
    (array([3., 2.]), array([1., 3.]))
    """

    def __post_init__(self) -> None:
        self.axes = {name: [rules.scalar(v) for v in values] for name, values in self.axes.items()}
        self.columns = {name: rules.column(name, values) for name, values in self.columns.items()}
        self.per_client = {name: rules.column(name, values) for name, values in self.per_client.items()}
        self.modes = {name: checked(mode, f"History: column {name!r}") for name, mode in self.modes.items()}
        rules.check(self.axes, self.columns, self.per_client)

    @property
    def shape(self) -> tuple[int, ...]:
        """Lengths of the axes, seeds last."""
        return tuple(len(values) for values in self.axes.values())

    @property
    def seeds(self) -> list:
        """The seeds."""
        return self.axes["seed"]

    def __len__(self) -> int:
        return self.columns["round"].shape[-1]

    def __repr__(self) -> str:
        axes = ", ".join(f"{name}={values}" for name, values in self.axes.items())
        return f"History({len(self)} recorded rounds; {axes}; {', '.join([*self.columns, *self.per_client])})"

    def __getitem__(self, column: str) -> np.ndarray:
        group = self.columns if column in self.columns else self.per_client
        if column not in group:
            raise unknown("history column", column, [*self.columns, *self.per_client])
        return group[column]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, History):
            return NotImplemented
        mine, theirs = ({**h.columns, **h.per_client} for h in (self, other))
        return (
            list(self.axes.items()) == list(other.axes.items())
            and self.columns.keys() - {*WALL_CLOCK} == other.columns.keys() - {*WALL_CLOCK}
            and self.per_client.keys() == other.per_client.keys()
            and all(np.array_equal(v, theirs[k], equal_nan=True) for k, v in mine.items() if k not in WALL_CLOCK)
        )

    def concat(self, other: "History") -> "History":
        """This history followed by the later rounds of a resumed run.

        Args:
            other: the history of the later rounds.
        """
        show = lambda group: group if group is self.axes or group is other.axes else list(group)
        for what in ("axes", "columns", "per_client"):
            ours, theirs = getattr(self, what), getattr(other, what)
            if ours.keys() != theirs.keys() or (what == "axes" and ours != theirs):
                raise ValueError(f"History.concat: {what} differ: {show(ours)} and {show(theirs)}")
        if len(self) and len(other) and not np.all(self["round"][..., -1] < other["round"][..., 0]):
            last, first = self["round"][..., -1].max(), other["round"][..., 0].min()
            raise ValueError(f"History.concat: the second part starts at round {first}, not after round {last}")
        join = lambda axis, a, b: {k: np.concatenate([a[k], b[k]], axis) for k in a}
        columns, per_client = join(-1, self.columns, other.columns), join(-2, self.per_client, other.per_client)
        return replace(self, columns=columns, per_client=per_client)

    def select(self, **labels: Any) -> "History":
        """The runs with these axis values.

        Args:
            **labels: values by axis. A single value removes its axis (except "seed"), a list keeps it.

        >>> h = History({"step_size": [0.1, 0.01], "seed": [0]}, {"round": [[[0, 1]], [[0, 1]]]})
        >>> h.select(step_size=0.1).axes
        {'seed': [0]}
        """
        axes, index = dict(self.axes), []
        for name in labels:
            if name not in axes:
                raise unknown("history axis", name, axes)
        for name, values in self.axes.items():
            wanted = labels.get(name, values)
            several = isinstance(wanted, list | tuple | range | np.ndarray)
            found = [rules.find(name, values, v) for v in (wanted if several else [wanted])]
            if several or name == "seed":
                axes[name] = [values[i] for i in found]
                index.append(found)
            else:
                del axes[name]
                index.append(found[0])

        def take(values: np.ndarray) -> np.ndarray:
            for axis, chosen in reversed(list(enumerate(index))):
                values = np.take(values, chosen, axis)
            return values

        columns, per_client = ({k: take(v) for k, v in g.items()} for g in (self.columns, self.per_client))
        return replace(self, axes=axes, columns=columns, per_client=per_client)

    def settings(self) -> Iterator[tuple[dict[str, Any], "History"]]:
        """Every combination of the swept values, with the history of its seeds."""
        swept = [name for name in self.axes if name != "seed"]
        for values in itertools.product(*(self.axes[name] for name in swept)):
            labels = dict(zip(swept, values, strict=True))
            yield labels, self.select(**labels)

    def mean(self, column: str) -> np.ndarray:
        """The mean over seeds; NaN where a seed diverged.

        Args:
            column: the name of the column.
        """
        return self._over_seeds(np.mean, column)

    def std(self, column: str) -> np.ndarray:
        """The sample standard deviation over seeds (divided by n - 1); zero for one seed.

        Args:
            column: the name of the column.
        """
        return self._over_seeds(np.std, column, ddof=min(1, len(self.seeds) - 1))

    def quantile(self, column: str, q: float) -> np.ndarray:
        """A quantile over seeds.

        Args:
            column: the name of the column.
            q: between 0 and 1.
        """
        return self._over_seeds(np.quantile, column, q=q)

    def _over_seeds(self, reduce: Callable, column: str, **options: Any) -> np.ndarray:
        with np.errstate(invalid="ignore", over="ignore"):  # infinities of a run that is diverging
            return reduce(self[column], axis=len(self.axes) - 1, **options)

    def last(self, column: str) -> np.ndarray:
        """The value at the last recorded round of every run.

        Args:
            column: the name of the column.
        """
        if not len(self):
            raise ValueError(f"History.last: no round was recorded, so {column!r} has no last value")
        return np.take(self[column], -1, axis=len(self.axes))

    def best(self, column: str, mode: Mode = "auto") -> np.ndarray:
        """The best value of every run over its rounds.

        Args:
            column: the name of the column.
            mode: "max" or "min"; "auto": the declared direction of the column.
        """
        to_max = sign(column, mode, self.modes)
        values = to_max * self[column].astype(float)
        top = np.max(np.where(np.isnan(values), -np.inf, values), axis=len(self.axes))
        return to_max * np.where(np.isnan(values).all(axis=len(self.axes)), np.nan, top)

    def best_setting(self, column: str = "objective", mode: Mode = "auto") -> dict[str, Any]:
        """The swept values with the best final mean over seeds; settings with a diverged seed are left out.

        Args:
            column: the name of the column.
            mode: "max" or "min"; "auto": the declared direction of the column.

        >>> columns = {"round": [[[9]], [[9]]], "objective": [[[2.0]], [[1.0]]]}
        >>> h = History({"step_size": [1.0, 0.1], "seed": [0]}, columns)
        >>> h.best_setting()
        {'step_size': 0.1}
        """
        to_max = sign(column, mode, self.modes)
        scores = [(to_max * h.last(column).mean(), labels) for labels, h in self.settings()]
        finite = [(score, labels) for score, labels in scores if not np.isnan(score)]
        if not finite:
            raise ValueError(f"History.best_setting: every setting diverged, no final {column!r} is a number")
        return max(finite, key=lambda pair: pair[0])[1]
