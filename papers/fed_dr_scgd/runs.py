"""Common parts of all figures: the methods, the lengths of runs, and the measure of an end."""

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedstrata.experiments.reproduction import Desk
from fedstrata.experiments.reproduction.drawing import Line

from .returns import SHAPES, US, present
from .tasks import build

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fedstrata.core.algorithm import Algorithm
    from fedstrata.report.history import History

BATCH = 1
CLIENTS = 8
PAPERS = ("FedDRSCGD", "SMVR", "SCSC", "NLASG")  # the methods of the paper's figures
OURS = ("LevelwiseDRSCGD", "TrackedSCGD")
NAMES = {"us_100_size_bm_daily": "Book-to-Market", "us_100_size_op_daily": "Operating Profitability"}
NAMES |= {"us_100_size_inv_daily": "Investment", "developed": "six regions"}


class Size(NamedTuple):
    epochs: float  # of figures 1 to 3
    fair_epochs: float  # of figures 4 to 6
    seeds: int
    tuning: int  # seeds for tuning, different from the reported ones
    records: int
    sets: int  # of the three data sets, how many figures 1 and 3 show
    without: tuple[str, ...]  # methods that figures 4 to 6 leave out


SIZES = {
    # As many seeds as settings: tuning and reported runs then share one compiled program.
    "small": Size(0.25, 0.25, 10, 1, 20, 1, ("LevelwiseDRSCGD",)),
    "full": Size(2.0, 1.0, 10, 3, 40, 3, ()),
}


def method(name: str, step_size: float, momentum: float, local_steps: int, **more: Any) -> "Algorithm":
    from fedstrata.algorithms.nested import FedDRSCGD, LevelwiseDRSCGD, SeparateDRSCGD, TrackedSCGD
    from fedstrata.algorithms.nested.nlasg import NLASG
    from fedstrata.algorithms.nested.scsc import SCSC
    from fedstrata.algorithms.nested.smvr import SMVR

    classes = (FedDRSCGD, LevelwiseDRSCGD, SeparateDRSCGD, TrackedSCGD, SMVR, SCSC, NLASG)
    kinds: dict[str, Any] = {c.__name__: c for c in classes}
    return kinds[name](step_size=step_size, momentum=momentum, local_steps=local_steps, **more)


def run(
    desk: Desk,
    label: str,
    data: "Mapping[str, Any]",
    algorithm: "Algorithm",
    epochs: float,
    seeds: "int | list[int]",
    sweep: "Mapping[str, list[float]]",
    records: int | None = None,
) -> "History":
    """Run for some epochs: passes of all clients together over all days, with a batch of one."""
    from fedstrata.core.algorithm import steps_of

    steps = steps_of(algorithm)
    days, clients = days_and_clients(data)
    rounds = max(1, round(epochs * days / (clients * steps)))
    options: dict[str, Any] = {"rounds": rounds, "batch_size": BATCH, "seeds": seeds, "sweep": dict(sweep)}
    options["evaluate_every"] = max(1, rounds // (records or SIZES[desk.scale].records))
    # Without autotuning, which costs one compilation more than it saves on a busy machine.
    return desk.run(label, build, data, algorithm, **options, stationarity=False, execution="vmap")


def days_and_clients(data: "Mapping[str, Any]") -> tuple[int, int]:
    """Rows of all clients together, and how many clients there are."""
    days = SHAPES[data["data"]][0]
    return (6 * days, 6) if data["data"] == "developed" else (days, data.get("clients", CLIENTS))


def epochs_of(history: "History", data: "Mapping[str, Any]", local_steps: int) -> np.ndarray:
    days, clients = days_and_clients(data)
    return history.mean("round") * clients * local_steps / days


def megabytes(history: "History") -> np.ndarray:
    """Up and down, all clients together."""
    return (history.mean("bytes_up") + history.mean("bytes_down")) / 1e6


def line(history: "History", across: np.ndarray, column: str) -> Line:
    return Line(across, history[column])


def end(history: "History", column: str = "gap", share: float = 0.2) -> np.ndarray:
    """Every seed's value at the end: the mean over this share of the records, infinite for one that diverged."""
    values = history[column]
    values = values[..., -max(1, round(share * values.shape[-1])) :].mean(axis=-1)
    return np.where(np.isnan(values), np.inf, values)


def first_below(history: "History", column: str, target: float, across: np.ndarray) -> np.ndarray:
    """For every seed, the first point of this axis at which the column is at most the target; infinite if never."""
    under = history[column] <= target
    return np.where(under.any(axis=-1), across[under.argmax(axis=-1)], np.inf)


def stamp(*data: str) -> str:
    """For titles: whether the returns are real."""
    return "" if all(present(d) for d in data) else " (synthetic returns)"


def us_sets(desk: Desk) -> tuple[str, ...]:
    """Operating Profitability, the data of the paper's figure 2, and as many others as the scale has."""
    ordered = sorted(US, key=lambda name: name != "us_100_size_op_daily")
    return tuple(ordered[: SIZES[desk.scale].sets])
