"""The records of a run, and the history made from them."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedstrata.engine.ledger import Ledger
from fedstrata.report.history import History

COUNTS = ("samples", "took")
OWN = ("round", "samples", "bytes_up", "bytes_down", "seconds")  # columns of every history, in addition to evaluations


class Records:
    """Recorded rounds of all runs: `rows[column]` is a list with one array (runs, ...) per recorded round."""

    def __init__(self) -> None:
        self.rounds: list[int] = []
        self.seconds: list[float] = []
        self.rows: dict[str, list[np.ndarray]] = {}
        self.totals = {name: np.zeros((), np.int64) for name in COUNTS}  # at the end of the last segment
        self.early = np.zeros((), np.int64)  # clients that took part while the pool of all clients lasted

    def start(self, found: Mapping[str, Any]) -> None:
        """Round 0: the start values."""
        runs = np.shape(found["objective"])[0]
        self.totals = {name: np.zeros((runs,), np.int64) for name in COUNTS}
        self.early = self.totals["took"]
        running = np.zeros((runs,), np.int32)
        self._add(0, 0.0, {**{n: np.asarray(v) for n, v in found.items()}, **self.totals, "status": running})

    def segment(
        self,
        rounds: list[int],
        found: Mapping[str, Any],
        totals: Mapping[str, Any],
        began: float,
        took: float,
        early: bool = False,
    ) -> None:
        """Add the records of a segment at these rounds. Wall-clock time is divided evenly over it.

        early: the pool of all clients lasted throughout.
        """
        for at, round in enumerate(rounds):
            row = {n: np.asarray(v)[:, at] for n, v in found.items()}
            row |= {n: self.totals[n] + row[n].astype(np.int64) for n in COUNTS}
            self._add(round, began + took * (at + 1) / len(rounds), row)
        self.totals = {n: self.totals[n] + np.asarray(totals[n], np.int64) for n in COUNTS}
        self.early = self.totals["took"] if early else self.early

    def _add(self, round: int, seconds: float, row: Mapping[str, np.ndarray]) -> None:
        self.rounds.append(round)
        self.seconds.append(seconds)
        for name, value in row.items():
            self.rows.setdefault(name, []).append(value)

    def latest(self, name: str) -> np.ndarray:
        return self.rows[name][-1]

    def history(self, axes: dict[str, list], ledger: Ledger, rejoining: bool, **about: Any) -> History:
        """The history with labelled axes and byte counts. about: its other fields."""
        shape = tuple(len(v) for v in axes.values())
        wide = {n: np.stack(v, axis=1).reshape((*shape, len(v), *v[0].shape[1:])) for n, v in self.rows.items()}
        everywhere = lambda values: np.broadcast_to(np.asarray(values), (*shape, len(self.rounds)))
        took, _ = wide.pop("took"), wide.pop("status")
        per_client = {n: wide.pop(n) for n in [n for n in wide if n.startswith("client/")]}
        up, down = ledger.total("up"), ledger.total("down", rejoining)
        columns = {"round": everywhere(self.rounds), **wide}
        more = np.minimum(took, self.early.reshape((*shape, 1))) * ledger.more_at_first
        columns |= {"bytes_up": took * up, "bytes_down": took * down + more, "seconds": everywhere(self.seconds)}
        return History(axes, columns, per_client, **about)

    def arrays(self) -> dict[str, np.ndarray]:
        """All records as arrays, for a checkpoint."""
        out = {f"row/{n}": np.stack(v) for n, v in self.rows.items()} | {
            f"total/{n}": v for n, v in self.totals.items()
        }
        return out | {"rounds": np.asarray(self.rounds), "seconds": np.asarray(self.seconds), "early": self.early}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> "Records":
        self = cls()
        self.rounds, self.seconds = arrays["rounds"].tolist(), arrays["seconds"].tolist()
        self.rows = {n[4:]: list(v) for n, v in arrays.items() if n.startswith("row/")}
        self.totals = {n[6:]: v for n, v in arrays.items() if n.startswith("total/")}
        self.early = arrays.get("early", np.zeros_like(self.totals["took"]))  # older checkpoints had no such pool
        return self
