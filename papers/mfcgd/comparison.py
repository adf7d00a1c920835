"""Methods on one task: a setting chosen from ten, ten runs on fresh seeds, and verdicts on the claims."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedstrata.base.files import replacing
from fedstrata.experiments.base import Setup
from fedstrata.experiments.reproduction import Claim, Desk, Verdict
from fedstrata.experiments.reproduction.drawing import Line, Panel
from fedstrata.experiments.reproduction.statistics import interval

if TYPE_CHECKING:
    from fedstrata.core.algorithm import Algorithm
    from fedstrata.report.history import History

TUNING = (1000, 1001)  # seeds for tuning, which no reported run uses
SEEDS = 10  # as many as settings, so that a grid on one seed and the reported runs share one compiled program
RHO = 0.1  # of AdaMFCGD: where estimates vanish its step is step_size / ρ, which is taken from the grid
# Momenta in the grid.
MOMENTA = {"LocalMOML": (0.5, 0.9), "LocalSCGDM": (0.3, 0.9), "CompositionalFedNest": (0.5, 1.0)}
OWN_MOMENTA = (0.1, 0.5)  # and for the family of MFCGD

EXISTING = ("ComFedL", "LocalMOML", "LocalSCGDM", "CompositionalFedNest")  # of the paper's Table 1
THEIRS = ("MFCGD", "AdaMFCGD")


class Task(NamedTuple):
    """A task: problem and data, length of a run, and recorded columns."""

    name: str
    build: Callable[..., Setup]
    data: Mapping[str, Any]
    rounds: int
    batch_size: int
    columns: Mapping[str, str]  # beside the objective: column -> what it is
    first: float  # the smallest step of the grid
    factor: float  # between its steps
    plain: float = 1.0  # the factor of FedAvg's steps, whose gradients have another scale


def grid(task: Task, name: str) -> dict[str, list[float]]:
    """Ten settings for every method: five steps and two momenta, or ten steps over the same range."""
    first = task.first * {"AdaMFCGD": RHO, "FedAvg": task.plain}.get(name, 1.0)
    if name in ("FedAvg", "ComFedL"):
        return {"step_size": [float(f"{first * task.factor ** (k / 2):.3g}") for k in range(10)]}
    steps = [float(f"{first * task.factor**k:.3g}") for k in range(5)]
    return {"step_size": steps, "value_momentum": list(MOMENTA.get(name, OWN_MOMENTA))}


class Found(NamedTuple):
    """One method: the chosen setting, whether its step is at the edge of the grid, and ten runs with it."""

    chosen: Mapping[str, float]
    edge: bool
    history: "History"


def methods(local_steps: int = 5) -> dict[str, "Algorithm"]:
    """All methods for two levels; steps and momenta come from the grid."""
    from fedstrata.algorithms import (
        MFCGD,
        AdaMFCGD,
        ComFedL,
        CompositionalFedNest,
        FedAvg,
        LocalMOML,
        LocalSCGDM,
        TrackedMFCGD,
    )

    return {
        "FedAvg": FedAvg(0.1, local_steps),
        "ComFedL": ComFedL(0.1, local_steps),
        "LocalMOML": LocalMOML(0.1, local_steps),
        "LocalSCGDM": LocalSCGDM(0.1, value_momentum=0.3, momentum=0.2, local_steps=local_steps),
        "CompositionalFedNest": CompositionalFedNest(0.1, local_steps=local_steps),
        "MFCGD": MFCGD(0.1, local_steps),
        "AdaMFCGD": AdaMFCGD(0.1, local_steps, rho=RHO),
        "TrackedMFCGD": TrackedMFCGD(0.1, local_steps),
    }


def compared(desk: Desk, task: Task, candidates: Mapping[str, "Algorithm"]) -> dict[str, Found]:
    """Every method's choice on the tuning seeds, and its runs on the others."""
    from fedstrata.algorithms.nested.base import CouplingWarning

    found = {}
    options = {"rounds": task.rounds, "batch_size": task.batch_size, "stationarity": False, "execution": "vmap"}
    options["evaluate_every"] = max(1, task.rounds // 10)
    for name, method in candidates.items():
        settings, given = grid(task, name), (task.build, dict(task.data), method)
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", CouplingWarning
            )  # LocalSCGDM and FedNest are for the other coupling; papers run them nevertheless
            grids = {f"{task.name}_{name}_grid_{seed}": [seed] for seed in TUNING}
            tried = [desk.run(what, *given, sweep=settings, seeds=seeds, **options) for what, seeds in grids.items()]
            chosen = best(tried)
            fixed = {key: [value] for key, value in chosen.items()}
            final = desk.run(f"{task.name}_{name}_final", *given, sweep=fixed, seeds=list(range(SEEDS)), **options)
        steps = settings["step_size"]
        found[name] = Found(chosen, chosen["step_size"] in (steps[0], steps[-1]), final.select(**chosen))
    return found


def best(tried: Sequence["History"]) -> dict[str, float]:
    """The setting with the lowest mean objective over the last three records, among those where no run diverged."""
    settings = [labels for labels, _ in tried[0].settings()]
    scores = [[float(h["objective"][:, -3:].mean()) for _, h in history.settings()] for history in tried]
    means = np.mean(scores, axis=0)
    if not np.isfinite(means).any():
        raise ValueError("every setting of the grid diverged; take a smaller first step")
    return settings[int(np.nanargmin(means))]


def panels(task: Task, found: Mapping[str, Found]) -> list[Panel]:
    """The objective and the task's other columns against rounds."""
    line = lambda history, column: Line(history.mean("round"), history[column])
    shown = {"objective": "objective on training data", **task.columns}
    return [
        Panel(text, {name: line(f.history, column) for name, f in found.items()}, log="accuracy" not in column)
        for column, text in shown.items()
    ]


def table(task: Task, found: Mapping[str, Found], desk: Desk) -> Any:
    """Final values, mean ± standard deviation over seeds, as a file."""
    columns = ["objective", *task.columns]
    head = ["method", "step", "momentum", *columns, "MB up"]
    rows = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name, (chosen, edge, history) in found.items():
        ends = [history.last(column) for column in columns]
        lost = int(np.isnan(ends[0]).sum())
        values = [f"{lost} of {SEEDS} diverged" if lost else f"{e.mean():.3g} ± {e.std(ddof=1):.2g}" for e in ends]
        up = history.last("bytes_up").mean() / 1e6
        setting = f"{chosen['step_size']:.3g}{' (edge)' * edge} | {chosen.get('value_momentum', '')}"
        rows.append(f"| {name} | {setting} | {' | '.join(values)} | {up:.3g} |")
    path = desk.folder / f"{task.name}.md"
    with replacing(path) as temporary:
        temporary.write_text("\n".join(rows) + "\n")
    return path


def ratios(found: Mapping[str, Found], ours: str, others: Sequence[str]) -> dict[str, tuple[float, float, float]]:
    """The final objective of others over that of one method, with a 95 % interval; equal seeds start alike."""
    logs = {name: np.log(found[name].history.last("objective")) for name in (ours, *others)}
    out = {}
    for name in others:
        mean, low, high = np.exp(interval(logs[name] - logs[ours]))
        out[name] = (mean, low, high)
    return out


def judged(wins: Sequence[bool]) -> Verdict:
    return "holds" if all(wins) else "holds in part" if any(wins) else "does not hold"


def words(found: Mapping[str, tuple[float, float, float]]) -> str:
    number = lambda mean, low, high: f"{mean:.3g} ({low:.3g} to {high:.3g})" if np.isfinite(mean) else "not comparable"
    return ", ".join(f"{name} {number(*values)}" for name, values in found.items())


def efficient(figure: int, claim: str, found: Mapping[str, Found]) -> Claim:
    """Whether both of the paper's methods end below all the existing ones."""
    against = {ours: ratios(found, ours, EXISTING) for ours in THEIRS}
    wins = [low > 1 for rest in against.values() for _, low, _ in rest.values()]
    text = "; ".join(f"over {ours}'s: {words(rest)}" for ours, rest in against.items())
    return Claim(figure, claim, f"final objective of the others (95 %) {text}", judged(wins))


def cheaper(figure: int, found: Mapping[str, Found]) -> Claim:
    """The rounds that the paper's methods need to reach the final value of the best existing one."""
    end = {name: found[name].history.mean("objective")[-1] for name in EXISTING}
    best = min(end, key=end.__getitem__)
    total = found[best].history.mean("round")[-1]
    text, wins = [], []
    for ours in THEIRS:
        rounds, values = found[ours].history.mean("round"), found[ours].history.mean("objective")
        reached = np.flatnonzero(values <= end[best])
        wins.append(bool(reached.size) and bool(rounds[reached[0]] < total))
        text.append(f"{ours} {f'after {rounds[reached[0]]:.0f}' if reached.size else 'not within'}")
    level = f"the level at which the best existing method, {best}, ends after {total:.0f} rounds ({end[best]:.3g})"
    claim = "lower sample and communication complexities simultaneously than the existing methods (Table 1)"
    return Claim(figure, claim, f"{level} is reached by {' and '.join(text)} rounds", judged(wins))


def tracked(figure: int, found: Mapping[str, Found]) -> Claim:
    """The effect of the correction of client drift. This claim is ours."""
    gap = ratios(found, "TrackedMFCGD", ["MFCGD"])
    claim = "(ours, not the paper's) TrackedMFCGD ends below MFCGD"
    text = f"final objective over TrackedMFCGD's (95 %): {words(gap)}"
    return Claim(figure, claim, text, judged([low > 1 for _, low, _ in gap.values()]))
