"""Figures 1 and 2 of li2022, its Table 1 as figure 3, and accuracy against fairness as figure 4."""

from typing import Any

import numpy as np

from fedstrata.data.sources import missing
from fedstrata.experiments.reproduction import Claim, Desk, Outcome
from fedstrata.experiments.reproduction.drawing import Line, Panel, draw

from . import methods
from .claims import claims_about_curves, claims_about_table
from .comparison import SPLITS, Task, compared, curves, exact_ends
from .pareto import Cloud, pareto
from .table import table

STEPS = {"small": {"adult": 200, "german_credit": 1000}, "full": {"adult": 2000, "german_credit": 2000}}
RUNS = f"{len(SPLITS)} divisions of the data, a seed each"


def figure_1(desk: Desk) -> Outcome:
    """Adult: the outer loss against rounds."""
    return _outer_loss(desk, 1, "adult")


def figure_2(desk: Desk) -> Outcome:
    """German Credit: the outer loss against rounds."""
    return _outer_loss(desk, 2, "german_credit")


def figure_3(desk: Desk) -> Outcome:
    """Table 1: all methods, their steps chosen alike."""
    tasks = [task for task in _tasks(desk) if not missing(task.data)]
    if not tasks:
        text = "the files of adult and german_credit are missing"
        return Outcome([Claim(3, "Table 1", text, "not tested")], [])
    found = {task: compared(desk, task) for task in tasks}
    return Outcome(claims_about_table(3, found), [table(task, f, desk) for task, f in found.items()])


def figure_4(desk: Desk) -> Outcome:
    """Table 1 as a trade-off: test accuracy against the test gap. Ours."""
    tasks = [task for task in _tasks(desk) if not missing(task.data)]
    if not tasks:
        return Outcome([], [])
    clouds = []
    for task in tasks:
        found = compared(desk, task)
        pairs = {n: (f.values["test/accuracy"], f.values["test/eq_opp"]) for n, f in found.items()}
        clouds.append(Cloud(f"{task.title}, {task.steps} steps", pairs))
    note = f"means over {RUNS}; bars: 95 % intervals of the means; grey: methods that no other beats in both"
    path = pareto(clouds, "Accuracy and equal opportunity", desk.folder / "figure_4.png", note)
    return Outcome([], [path])


def _tasks(desk: Desk) -> list[Task]:
    """The tasks of a scale. The small one leaves out Adult with non-I.I.D. clients, which takes most of the time."""
    sizes = STEPS[desk.scale]
    cases = [("german_credit", True), ("german_credit", False), ("adult", True), ("adult", False)]
    return [Task(data, iid, sizes[data]) for data, iid in cases if desk.scale == "full" or (data, iid) != cases[-1]]


def _outer_loss(desk: Desk, number: int, data: str) -> Outcome:
    if missing(data):
        text = f"the files of {data} are missing"
        return Outcome([Claim(number, "FedBiOAcc converges much faster than FedBiO", text, "not tested")], [])
    tasks = [task for task in _tasks(desk) if task.data == data]
    seen: dict[Task, dict[str, tuple[np.ndarray, np.ndarray]]] = {}
    exact: dict[Task, dict[str, np.ndarray]] = {}
    alike: dict[Task, np.ndarray] = {}
    for task in tasks:
        seen[task] = {name: curves(desk, task, name) for name in methods.BILEVEL}
        alike[task] = curves(desk, task, "FedBiOAcc", like="FedBiO")[1]
        exact[task] = {name: exact_ends(desk, task, name) for name in methods.BILEVEL}
        exact[task]["equal weights"] = exact_ends(desk, task)
    panels = [panel(task, lines) for panel in (_curves, _differences) for task, lines in seen.items()]
    title = f"Outer loss, {RUNS}"
    path = draw(panels, title, desk.folder / f"figure_{number}.png", columns=len(seen))
    return Outcome(claims_about_curves(number, seen, alike, exact), [path])


def _curves(task: Task, lines: dict[str, Any]) -> Panel:
    shown = {name: Line(rounds, values) for name, (rounds, values) in lines.items()}
    return Panel(task.title, shown, up="validation loss of clients", log=False)


def _differences(task: Task, lines: dict[str, Any]) -> Panel:
    """Differences run by run, because divisions differ more than methods do."""
    _, base = lines["FedBiO"]
    shown = {name: Line(rounds, values - base) for name, (rounds, values) in lines.items()}
    return Panel("the same, less FedBiO's of the same run", shown, up="difference", log=False)
