"""The driver of a run: segments of rounds, their records, and the endings of runs."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.core.memory import Pool
from fedstrata.core.placement import Hidden
from fedstrata.engine.initialise import first_rounds
from fedstrata.engine.participation import Everyone
from fedstrata.simulate.evaluate import modes_of
from fedstrata.simulate.executable import Executable
from fedstrata.simulate.multiprocess import agreed
from fedstrata.simulate.records import Records
from fedstrata.simulate.result import ENDINGS, WORSE, Result
from fedstrata.simulate.state import DIVERGED, EXPLODED, RUNNING, Carry

Callback = Callable[[int, dict[str, np.ndarray]], Any]
SEGMENT_SECONDS = 0.5  # target duration of a segment, and so of an update of the progress bar
MOST_ROWS = 2**30  # examples are counted in 32 bits within a segment, in units of `counting_unit`
WORSENED = ENDINGS.index("worsened")
SNAPSHOT_BYTES = 2**26  # a larger state is not copied before each segment


class Driver:
    """Advances an executable segment by segment. Holds the state of all runs."""

    def __init__(
        self,
        executable: Executable,
        carry: Carry,
        records: Records,
        round: int,
        first_round_starts: Any = None,
        seconds: float = 0.0,
    ):
        self.executable, self.carry, self.records, self.round = executable, carry, records, round
        self.starts, self.seconds = first_round_starts or None, seconds
        self.length = 1  # evaluations in the next segment

    @classmethod
    def start(cls, executable: Executable) -> "Driver":
        carry, found, starts = executable.begin()
        records = Records()
        records.start(found)
        return cls(executable, carry, records, 0, starts)

    def compile(self) -> float:
        """Compile all programs of the run without running a round; returns the seconds that took.

        First rounds that start from more than the carry have a separate program.
        """
        began = time.perf_counter()
        two = self.starts is not None and first_rounds(self.starts) < self.executable.rounds
        for starts in (self.starts, None) if two else (self.starts,):
            self.carry = jax.block_until_ready(self._advance(self.round, self.round, starts))[0]
        return time.perf_counter() - began

    def _advance(self, first: int, last: int, starts: Any = None) -> Any:
        return self.executable.advance(self.carry, first, last, starts, in_place=self.big)

    @property
    def big(self) -> bool:
        return not self.executable.keeps_starts or sum(a.nbytes for a in jax.tree.leaves(self.carry)) > SNAPSHOT_BYTES

    def finished(self) -> bool:
        return self.round >= self.executable.rounds or not np.any(np.asarray(self.carry.status) == RUNNING)

    def segment(self, callbacks: Sequence[Callback] = ()) -> None:
        """Run to the next evaluation or further. The number of rounds does not change the result."""
        executable, first = self.executable, self.round
        last = min((first // executable.every + self.length) * executable.every, executable.rounds)
        last = min(last, first_rounds(self.starts)) if self.starts else last
        unit = executable.counting_unit
        last = min(last, first + max(1, MOST_ROWS // max(1, executable.rows_a_round() // unit)))
        began, before, starts = time.perf_counter(), None if self.big else self.carry, self.starts
        was_running = np.asarray(self.carry.status) == RUNNING
        carry, found, samples, took = self._advance(first, last, starts)
        status = np.asarray(carry.status)  # waits for the segment
        seconds = agreed(time.perf_counter() - began)
        self.starts = starts if starts and last < first_rounds(starts) else None
        due = executable.due(first, last)
        # Once every run has ended, the rest of the segment records nothing.
        over = np.flatnonzero(np.all(np.asarray(found["status"])[:, : len(due)] != RUNNING, axis=0))
        if due and over.size:
            due = due[: over[0] + 1]
            last = due[-1]
        early = starts is not None and any(isinstance(value, Pool) for value in starts.values())
        examples = lambda counted: np.asarray(counted, np.int64) * unit
        found = {n: examples(v) if n == "samples" else v for n, v in found.items()}
        totals = {"samples": examples(samples), "took": took}
        self.records.segment(due, found, totals, self.seconds, seconds, early)
        self.seconds, self.round = self.seconds + seconds, last
        exploded = was_running & (status == EXPLODED)
        self.carry = self._rewind(before, starts, carry, first, exploded) if exploded.any() else carry
        most = min(2 * self.length, executable.runs.options.records)
        self.length = int(np.clip(self.length * SEGMENT_SECONDS / max(seconds, 1e-3), 1, most))
        for callback in callbacks:
            for at, round in enumerate(due, start=len(self.records.rounds) - len(due)):
                callback(round, {n: v[at] for n, v in self.records.rows.items()})

    def _rewind(self, before: Carry | None, starts: Any, carry: Carry, first: int, exploded: np.ndarray) -> Carry:
        """Return runs whose objective exploded to their last good evaluation, by repeating the rounds up to it.

        They start from the beginning of the segment or, if that was not kept or is later, from round 0.
        """
        every, bad_rounds = self.executable.every, np.asarray(carry.bad_round)
        for bad in np.unique(bad_rounds[exploded]):
            good = (int(bad) - 1) // every * every
            again = self._restart(good) if before is None or good < first else self._again(before, starts, first, good)
            chosen = exploded & (bad_rounds == bad)
            choose = lambda a, b, chosen=chosen: pick(chosen, a, b)
            shared, local = jax.tree.map(choose, (again.shared, again.local), (carry.shared, carry.local))
            carry = carry._replace(shared=shared, local=local)
        return carry

    def _restart(self, good: int) -> Carry:
        carry, _, starts = self.executable.begin()
        return self._again(carry, starts or None, 0, good)

    def _again(self, carry: Carry, starts: Any, first: int, last: int) -> Carry:
        """The carry after rounds first … last−1."""
        beside = min(first_rounds(starts or {}), last)
        for part, start, end in ((starts, first, beside), (None, max(first, beside), last)):
            carry = self.executable.advance(carry, start, end, part)[0] if start < end else carry
        return carry

    def objective(self) -> float | None:
        """The mean objective of the runs that have not diverged."""
        values = self.records.latest("objective")
        return float(values[np.isfinite(values)].mean()) if np.isfinite(values).any() else None

    def bytes_sent(self) -> float:
        took = float(np.mean(self.records.totals["took"]))
        return took * (self.executable.ledger.up + self.executable.ledger.total("down", self.rejoining))

    @property
    def rejoining(self) -> bool:
        """Under partial participation every client of a cohort counts as one that missed rounds."""
        return not isinstance(self.executable.context.participation, Everyone)

    def saved(self) -> tuple[dict[str, np.ndarray], list[str]]:
        """Everything that a checkpoint holds: all arrays, and the paths of the carry's, in their order.

        The carry is gathered from all processes, so every one of them must call this.
        """
        carry = self.executable.gathered(self.carry)
        state = {f"carry/{i:05d}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(carry))}
        return {**state, **self.records.arrays(), "elapsed": np.asarray(self.seconds)}, carry_paths(carry)

    def result(self, label: str, algorithm: Any, compile_seconds: float) -> Result:
        executable, carry = self.executable, self.executable.gathered(self.carry)
        shape = tuple(len(v) for v in executable.axes.values())
        reshape = lambda tree: jax.tree.map(lambda a: np.asarray(a).reshape((*shape, *a.shape[1:])), tree)
        best = carry.best_x if executable.runs.options.select is not None else executable.solutions(carry)
        status = np.asarray(carry.status)
        about = {"modes": modes_of(executable.context.problem, algorithm, executable.inputs.monitor)}
        about |= dict(zip(("problem", "monitor"), executable.minimised, strict=True))
        bad = (status == DIVERGED) | (status == EXPLODED)
        first, last = np.asarray(carry.first), self.records.latest("objective")
        worse = ~bad & (last - first > WORSE * np.maximum(np.abs(first), 1))
        notes = {int(i): self._note(int(i), label) for i in np.flatnonzero(bad)}
        notes |= {int(i): self._worse(int(i), label, first[i], last[i]) for i in np.flatnonzero(worse)}
        return Result(
            label=label,
            history=self.records.history(executable.axes, executable.ledger, self.rejoining, **about),
            problem=executable.context.problem,
            algorithm=algorithm,
            ledger=executable.ledger,
            solutions=reshape(best),
            state=reshape(carry.shared),
            local=reshape(carry.local),
            endings=np.array(ENDINGS)[np.where(worse, WORSENED, status)].reshape(shape),
            notes=[notes[i] for i in sorted(notes)],
            seconds=self.seconds,
            compile_seconds=compile_seconds,
            rounds=self.round,
        )

    def _name(self, run: int, label: str) -> str:
        place = np.unravel_index(run, [len(v) for v in self.executable.axes.values()])
        where = ", ".join(f"{k}={v[i]}" for (k, v), i in zip(self.executable.axes.items(), place, strict=True))
        return f"{label} ({where})"

    def _worse(self, run: int, label: str, first: Any, last: Any) -> str:
        """The note of a run that ended far above its start."""
        what = f"its objective was {first:.4g} at the start and is {last:.4g} at the end"
        return f"{self._name(run, label)} got worse: {what}; try smaller steps"

    def _note(self, run: int, label: str) -> str:
        """The note of a run that diverged."""
        round = int(np.asarray(self.carry.bad_round)[run])
        shared = self.carry.shared
        fields = [f for f, bad in zip(shared._fields, np.asarray(self.carry.bad_fields)[run], strict=True) if bad]
        local = [f for f in shared._fields if isinstance(getattr(shared, f), Hidden)]
        who = f"{self._name(run, label)} diverged"
        advice = self.executable.context.problem.advice()
        advice = f"; {advice}" if advice else ""
        if not fields:
            what = f"its objective had exploded or was not finite at round {round}"
            return f"{who}: {what}; the state of the last good evaluation was kept{advice}"
        sides = ", ".join(f"{f!r} (Local)" if f in local else repr(f) for f in fields)
        return f"{who} in round {round}: not finite: {sides}; the state of round {round - 1} was kept{advice}"


def carry_paths(carry: Carry) -> list[str]:
    """The path of every array of a carry: `.shared.x.tree['w']`, `.local['c'].tree['w']`."""
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(carry)[0]]


def pick(chosen: np.ndarray, a: Any, b: Any) -> Any:
    """Runs of `a` where chosen, else of `b`. Arrays on the host stay there."""
    where = np.where if isinstance(b, np.ndarray) else jnp.where
    return where(chosen.reshape((-1,) + (1,) * (a.ndim - 1)), a, b)
