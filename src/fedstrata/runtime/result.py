"""What a run gives back: its history, its solutions, its last state, and how it ended."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from fedstrata.report.history import History
from fedstrata.transport.ledger import Ledger
from fedstrata.transport.privacy import Spent
from fedstrata.vector import Vector

if TYPE_CHECKING:
    from fedstrata.figures import Figure

ENDINGS = ("finished", "diverged", "exploded", "stopped early", "worsened")
WORSE = 10.0  # a run whose objective ends above its start by more than this times max(|start|, 1) has worsened


class DivergenceWarning(UserWarning):
    """A run left the finite numbers or its objective exploded (its last good state was kept), or it ended far worse
    than it started (and nothing was taken back).
    """


class SetupWarning(UserWarning):
    """Settings with which a run can be made, but which look like a mistake."""


@dataclass(eq=False, repr=False)
class Result:
    """Runs of one algorithm on one problem, over swept values and seeds (the axes of `history`).

    Arrays in `solutions`, `state` and `local` have the axes of the history in front.
    """

    label: str
    history: History
    problem: Any
    algorithm: Any
    ledger: Ledger
    solutions: Vector  # the last solution of every run, or its best one where `select` was given
    state: Any  # the server's state at the end
    local: Mapping[str, Any]  # the clients' own fields at the end
    endings: np.ndarray  # one of ENDINGS for each run; "worsened": its objective ended far above its start
    notes: list[str]  # what went wrong, in words
    seconds: float
    compile_seconds: float
    rounds: int
    privacy: Spent | None = None  # what it cost its clients, where they were private
    federation: Any = None  # the training data, where all runs had the same

    def solution(self, **labels: Any) -> Any:
        """The parameters of one run: `solution(step_size=0.1, seed=3)`; of an axis left out, the first value."""
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
        """The trained model of one run as a file that `fs.load_model` reads.

        Of a problem that was made from a plain function, the parameters alone. A ranking (`fs.Pairwise`) is saved with
        the threshold above which as many training rows lie as are positive; `predict` uses it.
        """
        from fedstrata.runtime.outcome import save_trained

        about = {"algorithm": self.label, "rounds": self.rounds}
        save_trained(path, self.problem, self.solution(**labels), about, self.federation)

    def plot(self, y: str = "objective", x: Any = "round", path: Any = None, **options: Any) -> "Figure":
        """Mean and band over seeds of one column; see `fs.plot` for several results together."""
        from fedstrata.report.plots import plot

        return plot({self.label: self.history}, y=y, x=x, path=path, **options)

    def __repr__(self) -> str:
        kinds, counts = np.unique(self.endings, return_counts=True)
        ends = ", ".join(f"{c} {k}" for k, c in zip(kinds, counts, strict=True))
        axes = " × ".join(f"{len(v)} {k}" for k, v in self.history.axes.items())
        return f"Result({self.label}: {self.rounds} rounds, {axes}; {ends}; columns {', '.join(self.history.columns)})"
