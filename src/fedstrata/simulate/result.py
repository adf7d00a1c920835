"""The result of a run: its history, its solutions, its last state, and its endings."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from fedstrata.core.vector import Vector
from fedstrata.engine.ledger import Ledger
from fedstrata.engine.privacy import Spent
from fedstrata.report.history import History

if TYPE_CHECKING:
    from fedstrata.base.figures import Figure

ENDINGS = ("finished", "diverged", "exploded", "stopped early", "worsened")
WORSE = 10.0  # a run is "worsened" if its objective ends above its start by more than this × max(|start|, 1)


class DivergenceWarning(UserWarning):
    """A run diverged or ended far worse than it started.

    If its numbers are not finite, or its objective exploded, the result has the last good state. If it only got worse,
    the result has the last state.
    """


@dataclass(eq=False, repr=False)
class Result:
    """Runs of one algorithm on one problem, over swept values and seeds (the axes of `history`).

    Arrays in `solutions`, `state` and `local` have the axes of the history in front.

    Args:
        label: the name in tables and plots.
        history: what was recorded.
        problem: what was minimised.
        algorithm: how.
        ledger: bytes of every field, per client and round.
        solutions: the last solution of every run, or its best one where `select` was given.
        state: the server's state at the end.
        local: the clients' `Local` fields at the end.
        endings: how each run ended, one of `ENDINGS`; "worsened": its objective ended far above its start.
        notes: what went wrong, in words.
        seconds: of the rounds, without compilation.
        compile_seconds: of compilation and the start.
        rounds: the number of rounds.
        privacy: the privacy cost of the run to its clients, in a private run.
        federation: the training data, if all runs had the same.
    """

    label: str
    history: History
    problem: Any
    algorithm: Any
    ledger: Ledger
    solutions: Vector
    state: Any
    local: Mapping[str, Any]
    endings: np.ndarray
    notes: list[str]
    seconds: float
    compile_seconds: float
    rounds: int
    privacy: Spent | None = None
    federation: Any = None

    def solution(self, **labels: Any) -> Any:
        """The parameters of one run: `solution(step_size=0.1, seed=3)`.

        Args:
            **labels: values of the history's axes; of an axis left out, the first.
        """
        index = []
        for axis, values in self.history.axes.items():
            wanted = labels.get(axis, values[0])
            if wanted not in values:
                raise ValueError(f"Result.solution: axis {axis!r} has no value {wanted!r}; it has {values}")
            index.append(values.index(wanted))
        for name in labels:
            if name not in self.history.axes:
                raise ValueError(f"Result.solution: there is no axis {name!r}; the axes are {list(self.history.axes)}")
        return jax.tree.map(lambda a: a[tuple(index)], self.solutions.tree)

    @property
    def diverged(self) -> bool:
        """Whether any run diverged."""
        return bool(np.isin(self.endings, ("diverged", "exploded")).any())

    def save_model(self, path: Any, **labels: Any) -> None:
        """Save the trained model of one run as a file that `fs.load_model` reads.

        For a problem made from a plain function, only the parameters are saved. A ranking (`fs.Pairwise`) is saved with
        a threshold for `predict`: as many training rows are above it as are positive.

        Args:
            path: the file, ending in .npz.
            **labels: which run, as in `solution`.
        """
        from fedstrata.engine.saving import save_trained

        about = {"algorithm": self.label, "rounds": self.rounds}
        save_trained(path, self.problem, self.solution(**labels), about, self.federation)

    def plot(self, y: str = "objective", x: Any = "round", path: Any = None, **options: Any) -> "Figure":
        """Mean and band over seeds of one column; see `fs.plot` for several results together.

        Args:
            y: the column to draw.
            x: the horizontal axis: "round", "megabytes", "seconds" or another column.
            path: a file to save the figure to.
            **options: those of `fs.plot`.
        """
        from fedstrata.report.plots import plot

        return plot({self.label: self.history}, y=y, x=x, path=path, **options)

    def __repr__(self) -> str:
        kinds, counts = np.unique(self.endings, return_counts=True)
        ends = ", ".join(f"{c} {k}" for k, c in zip(kinds, counts, strict=True))
        axes = " × ".join(f"{len(v)} {k}" for k, v in self.history.axes.items())
        return f"Result({self.label}: {self.rounds} rounds, {axes}; {ends}; columns {', '.join(self.history.columns)})"
