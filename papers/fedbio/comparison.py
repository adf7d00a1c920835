"""All methods on one kind of division: step sizes chosen by one rule, and twenty runs on other divisions.

Every run has a different division of the data (train, test, validation and clients) and a different sampling seed. The
chosen step has the lowest final loss on the balanced validation split, on average over two further divisions with other
seeds. The rule is the same for every method.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedstrata.experiments.reproduction import Desk
from fedstrata.experiments.reproduction.statistics import interval

from . import methods
from .tasks import DATA, L2, divided, model_task, weight_task

if TYPE_CHECKING:
    from fedstrata.report.history import History

STEPS = (0.001, 0.01, 0.1, 1.0)  # li2022's grid
SPLITS = tuple(range(20))  # each the seed of a division and of the sampling
TUNING_SPLITS = (1000, 1001)
CRITERION = "valid/log_loss"
MEASURES = {"test/accuracy": "test accuracy", "eq_opp": "train EqOpp", "test/eq_opp": "test EqOpp"}
COLUMNS = (*MEASURES, CRITERION, "test/eq_opp_zero", "test/mean_gap_zero", "bytes_up", "samples")
RECORDS = 40
EQUAL = 0.5  # the weights at the start


class Task(NamedTuple):
    """Data, their division, and the number of local steps of each stage."""

    data: str
    iid: bool
    steps: int

    @property
    def name(self) -> str:
        return f"{self.data}_{'iid' if self.iid else 'non_iid'}"

    @property
    def title(self) -> str:
        return f"{DATA[self.data].title}, {'I.I.D.' if self.iid else 'non-I.I.D.'}"


class Found(NamedTuple):
    """One method: its step, whether that is at the edge of the grid, and the final values of all runs."""

    step: float
    edge: bool
    values: dict[str, np.ndarray]


def compared(desk: Desk, task: Task, names: Sequence[str] = methods.METHODS) -> dict[str, Found]:
    """Every method's choice on the tuning divisions, and its runs on the others."""
    found = {}
    for name in names:
        step = tuned(desk, task, name)
        runs = [ends(desk, task, name, split, step) for split in _shown(SPLITS, desk, f"{task.title}: {name}")]
        values = {column: np.array([run[column] for run in runs]) for column in COLUMNS}
        found[name] = Found(step, step in (STEPS[0], STEPS[-1]), values)
    return found


def tuned(desk: Desk, task: Task, name: str) -> float:
    """The step with the lowest mean criterion, among those that never diverged."""
    tries = _shown([(step, split) for step in STEPS for split in TUNING_SPLITS], desk, f"{task.title}: tuning {name}")
    tried = [ends(desk, task, name, split, step)[CRITERION] for step, split in tries]
    scores = np.mean(np.reshape(tried, (len(STEPS), len(TUNING_SPLITS))), axis=1)
    if not np.isfinite(scores).any():
        raise ValueError(f"{name}: every step of {STEPS} diverged on {task.title}")
    return STEPS[int(np.nanargmin(scores))]


def ends(desk: Desk, task: Task, name: str, split: int, step: float) -> dict[str, float]:
    """Final values of one run; NaN where it diverged. A bilevel method's bytes and samples are of both stages."""
    if name not in methods.BILEVEL:
        return _last(_run(desk, task, name, split, step))
    first = _run(desk, task, name, split, step)
    weights = last_weights(task, first)
    if not np.all(np.isfinite(weights)):
        return dict.fromkeys(COLUMNS, np.nan)
    # FedAvg from its start, with the weights of this run.
    last = _last(_run(desk, task, "FedAvg", split, step, f"_after_{name}", weights=weights.tolist()))
    return last | {column: last[column] + first.last(column)[0] for column in ("bytes_up", "samples")}


def last_weights(task: Task, history: "History") -> np.ndarray:
    return np.array([history.last(f"weight_{k}")[0] for k in range(DATA[task.data].groups)])


def curves(desk: Desk, task: Task, name: str, like: str | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Rounds, and the outer loss at the clients' models: a row for every reported run.

    like: use the step chosen for another method.
    """
    step = tuned(desk, task, like or name)
    splits = _shown(SPLITS, desk, f"{task.title}: {name}, stage one")
    histories = [_run(desk, task, name, split, step) for split in splits]
    return histories[0]["round"][0], np.concatenate([history["objective"] for history in histories])


def exact_ends(desk: Desk, task: Task, name: str | None = None) -> np.ndarray:
    """The exact outer loss at the end of every reported run of a method; without a name, of equal weights."""
    from .exact import outer_loss

    about, out = DATA[task.data], []
    step = tuned(desk, task, name) if name else None
    for split in SPLITS:
        weights = np.full(about.groups, EQUAL)
        if name is not None and step is not None:
            weights = last_weights(task, _run(desk, task, name, split, step))
        out.append(outer_loss(divided(task.data, task.iid, split, about.validation), weights, L2))
    return np.array(out)


def against(found: Mapping[str, Found], name: str, column: str, base: str = "FedAvg") -> tuple[float, float, float]:
    """The mean difference to another method and its 95 % interval, paired by division and seed."""
    return paired(found[name].values[column], found[base].values[column])


def paired(values: np.ndarray, others: np.ndarray) -> tuple[float, float, float]:
    return interval(values - others)


def _run(desk: Desk, task: Task, name: str, split: int, step: float, after: str = "", **more: Any) -> "History":
    """Run one seed. Single runs share one program over divisions and steps."""
    bilevel, rounds = name in methods.BILEVEL, methods.rounds(name, task.steps)
    data = {"data": task.data, "iid": task.iid, "split": split, **more}
    options: dict[str, Any] = {
        "rounds": rounds,
        "batch_size": DATA[task.data].batch_size,
        "seeds": [split],
        "evaluate_every": max(1, rounds // RECORDS) if bilevel else rounds,
        "stationarity": False,
        "execution": "vmap",
        **methods.weighting(name),
    }
    quiet = copy.copy(desk)  # see `_shown`
    quiet.quiet = True
    label = f"{task.name}_{name}{after}_step_{step:g}_split_{split}"
    build = weight_task if bilevel else model_task
    return quiet.run(label, build, data, methods.method(name, step, task.steps), **options)


def _shown(things: Sequence[Any], desk: Desk, label: str) -> Iterator[Any]:
    """One progress bar for many short runs."""
    from fedstrata.report.progress import Progress

    with Progress(len(things), label, quiet=desk.quiet) as bar:
        for done, thing in enumerate(things, start=1):
            yield thing
            bar.update(done)


def _last(history: "History") -> dict[str, float]:
    return {column: float(history.last(column)[0]) for column in COLUMNS}
