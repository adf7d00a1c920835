"""All methods on one task: settings tuned by one rule on validation data, then runs on other seeds.

A run's score is its best validation value over the evaluated rounds. A setting's score is the mean of its runs' scores,
over seeds that are not reported. The reported value is the test value of the model with the best validation value.
"""

import copy
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedstrata.experiments.reproduction import Desk

from . import methods
from .methods import Setting
from .tasks import TASKS, build

if TYPE_CHECKING:
    from fedstrata.report.history import History

TUNING = 1000  # seeds from here on are for tuning only


class Size(NamedTuple):
    """The lengths and numbers of runs: `rounds` of `local_steps` steps; settings are chosen on `tuning_rounds`."""

    rounds: int
    tuning_rounds: int
    seeds: int
    tuning_seeds: int
    local_steps: int = 32
    evaluations: int = 20
    steps: tuple[float, ...] = methods.STEPS
    lams: tuple[float, ...] = methods.LAMS
    batches: tuple[int, ...] = methods.BATCHES  # of a centralised method, beside 32
    together: int = 2  # seeds that share a program and a file
    model: tuple[tuple[str, Any], ...] = ()  # options of `build` about the network


class Case(NamedTuple):
    """A table on a task."""

    table: str  # the loss: "kl" (Table 1), "psm" (Table 2) or "ap"
    task: str
    size: Size

    @property
    def metric(self) -> str:
        return methods.METRIC[self.table]

    @property
    def columns(self) -> tuple[str, ...]:
        return ("pauc_0.3", "pauc_0.5") if self.table == "kl" else (self.metric,)

    @property
    def title(self) -> str:
        return TASKS[self.task].title


class Found(NamedTuple):
    """A method: its chosen setting, whether its step is at the edge of the grid, and test values of every seed."""

    setting: Setting
    edge: bool
    values: dict[str, np.ndarray]
    tried: int


def compared(desk: Desk, case: Case, names: Sequence[str] | None = None) -> dict[str, Found]:
    """Every method, or those with these names: `compared(desk, case, ["FedX2"])` runs one and stores its runs."""
    wanted = list(methods.TABLES[case.table]) if names is None else list(names)
    return {name: found(desk, case, name) for name in wanted}


def found(desk: Desk, case: Case, name: str) -> Found:
    setting, tried = tuned(desk, case, name)
    histories = runs(desk, case, name, setting, range(case.size.seeds), case.size.rounds)
    values = {column: np.concatenate([at_best(h, column) for h in histories]) for column in case.columns}
    edge = min(case.size.steps) >= setting.step or max(case.size.steps) <= setting.step
    return Found(setting, edge, values, tried)


def tuned(desk: Desk, case: Case, name: str) -> tuple[Setting, int]:
    """The best setting on validation data, and the number of settings tried."""
    method, size = methods.TABLES[case.table][name], case.size
    worth: dict[Setting, float] = {}

    def best(settings: Sequence[Setting]) -> Setting:
        for setting in _shown(settings, desk, f"{case.title}: tuning {name}"):
            if setting not in worth:
                histories = tries(desk, case, name, setting)
                worth[setting] = float(np.mean([valid_best(h, case.metric) for h in histories]))
        score = lambda setting: worth[setting] if np.isfinite(worth[setting]) else -np.inf
        return max(worth, key=score)

    chosen = best(methods.first_settings(size.steps))
    chosen = best(methods.more_settings(case.table, method, chosen, size.lams))
    chosen = best(methods.more_batches(method, chosen, size.batches))
    tried = len(worth)
    while np.isfinite(worth[chosen]) and not _lasts(desk, case, name, chosen):
        worth[chosen] = float("nan")
        chosen = best([])
    if not np.isfinite(worth[chosen]):
        raise ValueError(f"{name}: every setting diverged on {case.title}")
    return chosen, tried


def _lasts(desk: Desk, case: Case, name: str, setting: Setting) -> bool:
    """Whether a setting chosen on short runs also survives a long one, which has more steps of the first size."""
    if case.size.tuning_rounds == case.size.rounds:
        return True
    long = runs(desk, case, name, setting, [TUNING], case.size.rounds)
    return bool(np.isfinite(valid_best(long[0], case.metric)))


def tries(desk: Desk, case: Case, name: str, setting: Setting) -> list["History"]:
    """Tuning runs of one setting."""
    seeds = range(TUNING, TUNING + case.size.tuning_seeds)
    return runs(desk, case, name, setting, seeds, case.size.tuning_rounds)


def runs(
    desk: Desk, case: Case, name: str, setting: Setting, seeds: Sequence[int], rounds: int, **changed: Any
) -> list["History"]:
    """Histories of a method with one setting, a few seeds in each, so that tuning and reported runs share a program."""
    each = case.size.together
    groups = [list(seeds[i : i + each]) for i in range(0, len(seeds), each)]
    return [_run(desk, case, name, setting, group, rounds, **changed) for group in groups]


def _run(
    desk: Desk,
    case: Case,
    name: str,
    setting: Setting,
    seeds: list[int],
    rounds: int,
    local_steps: int | None = None,
    clients: int = 0,
    only: int = 0,
    history: int = 1,
) -> "History":
    method, size = methods.TABLES[case.table][name], case.size
    local_steps = local_steps or size.local_steps
    data: dict[str, Any] = {"task": case.task, "loss": method.loss or case.table, **dict(size.model)}
    data |= {"lam": setting.lam} if data["loss"] == "kl" else {}
    data |= {"flipped": 0.2} if case.table == "psm" else {}
    data |= {name: value for name, value in (("clients", clients), ("only", only)) if value}
    data |= {} if case.table == "kl" else {"metrics": case.metric}
    algorithm = methods.algorithm(case.table, method, setting, rounds * local_steps, local_steps, 5, history)
    options: dict[str, Any] = {
        "rounds": rounds,
        "batch_size": setting.batch if algorithm.centralised else method.batch,
        "seeds": seeds,
        "evaluate_every": max(1, rounds // size.evaluations),
        "evaluate": ["valid", "test"],
        "stationarity": False,
        "execution": "vmap",
    }
    changes = "".join(f"_{k}_{v}" for k, v in (("K", local_steps), ("N", only or clients), ("tau", history)) if v)
    which = f"seed_{seeds[0]}" + (f"_to_{seeds[-1]}" if len(seeds) > 1 else "")
    label = f"{case.table}_{case.task}_{name}_{setting.name}{changes}_rounds_{rounds}_{which}".replace(" ", "_")
    quiet = copy.copy(desk)  # many short runs have one bar; see `_shown`
    quiet.quiet = desk.quiet or size.together > 1
    return quiet.run(label, build, data, algorithm, **options)


def at_best(history: "History", column: str) -> np.ndarray:
    """For every seed, the test value at the round with the highest validation value."""
    valid, test = history[f"valid/{column}"], history[f"test/{column}"]
    at = np.argmax(np.where(np.isfinite(valid), valid, -np.inf), axis=-1)
    return np.take_along_axis(test, at[:, None], axis=-1)[:, 0]


def valid_best(history: "History", column: str) -> float:
    """The highest validation value of a run, on average over its seeds; NaN where a seed diverged."""
    if not np.isfinite(history.last("objective")).all():
        return float("nan")
    return float(history.best(f"valid/{column}").mean())


def _shown(things: Sequence[Any], desk: Desk, label: str) -> Iterator[Any]:
    """One progress bar for many short runs."""
    from fedstrata.report.progress import Progress

    with Progress(max(1, len(things)), label, quiet=desk.quiet) as bar:
        for done, thing in enumerate(things, start=1):
            yield thing
            bar.update(done)
