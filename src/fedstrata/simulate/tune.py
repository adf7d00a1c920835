"""`fs.tune`, the same procedure for every method: a grid, a choice on validation data, a rerun on fresh seeds."""

import itertools
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedstrata.base.directions import Mode, sign
from fedstrata.base.errors import unknown
from fedstrata.core.algorithm import Algorithm
from fedstrata.core.hyperparameters import reals, with_values
from fedstrata.data.federation import Federation
from fedstrata.data.validation import check_federation
from fedstrata.engine.checks import check_solves
from fedstrata.problems.base import Problem
from fedstrata.simulate.evaluate import modes_of
from fedstrata.simulate.options import RunOptions, takes_run_options
from fedstrata.simulate.records import OWN
from fedstrata.simulate.result import DivergenceWarning, Result
from fedstrata.simulate.run import prepare, recorded, run
from fedstrata.simulate.sweep import check_grid, seed_list

FRESH = 1000  # seeds of the rerun start here: none of them was used for the choice


@dataclass(eq=False, repr=False)
class Tuned:
    """The result of tuning: the chosen values, every setting's score, and the rerun on fresh seeds."""

    algorithm: Algorithm  # with the chosen values
    chosen: dict[str, Any]
    scores: list[tuple[dict[str, Any], float, float]]  # setting, mean and spread over seeds; NaN where one diverged
    select: str
    result: Result
    at_edge: list[str]  # hyper-parameters whose best value is the first or last of its grid: widen it

    def __repr__(self) -> str:
        edge = f"; at the edge of its grid: {', '.join(self.at_edge)}" if self.at_edge else ""
        return f"Tuned({type(self.algorithm).__name__}: {self.chosen} of {len(self.scores)} by {self.select}{edge})"


@takes_run_options
def tune(
    problem: Problem,
    algorithm: Algorithm,
    federation: Federation,
    grid: Mapping[str, Sequence[Any]],
    *,
    select: str = "valid/loss",
    mode: Mode = "auto",
    seeds: int | Sequence[int] = 3,
    final_seeds: int | Sequence[int] = 5,
    **options: Any,
) -> Tuned:
    """Run every setting of a grid, choose by the mean of `select` at the end, and run the choice on fresh seeds.

    Real hyper-parameters are swept in one program; others (local_steps, say) cost a program per value. A setting that
    diverges on any seed is never chosen. With `patience`, a run stops when `select` no longer improves; its score is
    then its best value of `select`, and the solutions of the rerun are those that had it.

    Args:
        problem: what to minimise.
        algorithm: how; the grid replaces its hyper-parameters.
        federation: on whose data.
        grid: the values to try, by hyper-parameter.
        select: the column to choose by.
        mode: the better end of that column, "max" or "min"; "auto": as the column declares.
        seeds: of the runs that are compared.
        final_seeds: of the rerun: how many, or which; none of them may be among `seeds`.
        **options: those of `fs.run`, except checkpoints, which belong to one run.
    """
    check_solves(algorithm, problem)
    check_federation(federation)
    if not isinstance(select, str):
        raise TypeError(f"tune: select={select!r} must name a column of the history, e.g. 'valid/loss'")
    for name in ("sweep", "checkpoint", "resume"):
        if options.get(name):
            raise ValueError(f"tune: {name} is an option of one run; tuning makes several, from the grid")
    grid = check_grid(grid, "tune: grid")
    if not grid:
        raise ValueError("tune: the grid is empty; give at least one hyper-parameter and its values")
    split = select.split("/")[0]
    if "/" in select and split not in federation.splits and split != "monitor":
        raise ValueError(
            f"tune: select={select!r} needs a split {split!r}; make one with federation.hold_out({split!r})"
        )
    final = final_seeds if not isinstance(final_seeds, int) else range(FRESH, FRESH + final_seeds)
    if {*seed_list(seeds)} & {*seed_list(final)}:
        raise ValueError("tune: final_seeds must not contain a seed that was used for the choice")
    early = options.get("patience") is not None
    options |= {"select": select, "mode": mode} if early else {}
    swept = {n: v for n, v in grid.items() if n in reals(algorithm) and not any(callable(x) for x in v)}
    fixed = {n: v for n, v in grid.items() if n not in swept}
    settings = [dict(zip(fixed, values, strict=True)) for values in itertools.product(*fixed.values())]
    variants = [with_values(algorithm, **setting) for setting in settings]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the runs warn later
        for here in variants:  # check every variant before the first run
            given = {**options, "seeds": seeds, "sweep": swept, "execution": "vmap"}
            executable = prepare(problem, here, federation, RunOptions.of("fs.tune", given))
            columns = [*OWN, *(name for name, value in recorded(executable).items() if not value.shape)]
            if select not in columns:
                raise unknown("column to tune by", select, columns)
    to_max = sign(select, mode, modes_of(problem, algorithm, options.get("monitor")))
    scores: list[tuple[dict[str, Any], float, float]] = []
    for setting, here in zip(settings, variants, strict=True):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DivergenceWarning)  # expected at the edges of a grid
            found = run(problem, here, federation, seeds=seeds, sweep=swept, **options)
        for labels, history in found.history.settings():
            ends = history.last(select)  # NaN where it diverged, even if it had a good value before
            ends = np.where(np.isnan(ends), np.nan, history.best(select, mode)) if early else ends
            scores.append(({**setting, **labels}, float(np.mean(ends)), float(np.std(ends))))
    good = [s for s in scores if np.isfinite(s[1])]
    if not good:
        raise ValueError(
            f"tune: {type(algorithm).__name__} diverged at every setting of {dict(grid)}; try smaller steps"
        )
    chosen = max(good, key=lambda s: to_max * s[1])[0]
    best = with_values(algorithm, **chosen)
    result = run(problem, best, federation, seeds=list(final), **options)
    edge = [n for n, v in grid.items() if len(v) > 1 and chosen[n] in (v[0], v[-1])]
    return Tuned(best, chosen, scores, select, result, edge)
