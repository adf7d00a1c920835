"""The error of bilevel methods against the number of clients, with batches of one row.

The `bilevel` problem. After a burn-in the error of a method with constant steps fluctuates around a level, measured as
the mean of |∇h|² over the second half of a run. Theory promises for FedBiOAcc that it falls like 1/M (linear speed-up).
"""

from typing import TYPE_CHECKING, Any

import numpy as np

from fedstrata.experiments.bilevel import build
from fedstrata.experiments.reproduction import Claim, Desk, Outcome, Verdict
from fedstrata.experiments.reproduction.drawing import Line, Panel, draw
from fedstrata.experiments.reproduction.statistics import interval, slope

if TYPE_CHECKING:
    from fedstrata.core.algorithm import Algorithm

SIZES: dict[str, dict[str, Any]] = {
    "small": {"rounds": 1000, "seeds": 4, "clients": (2, 8, 32)},
    "full": {"rounds": 8000, "seeds": 10, "clients": (2, 4, 8, 16, 32)},
}
STEP, LOWER, LOCAL, WEIGHT = 0.01, 0.05, 5, 0.1


def forms() -> dict[str, "Algorithm"]:
    """All methods with the same steps. Those with memory give a new sample the weight 0.1."""
    from fedstrata.algorithms import AnchoredBiOAcc, FedBiO, FedBiOAcc, TrackedBiO

    same: dict[str, Any] = {"step_size": STEP, "lower_step_size": LOWER, "local_steps": LOCAL}
    memory: dict[str, Any] = {"delta": 1.0, "momentum": WEIGHT, "lower_momentum": WEIGHT}
    return {
        "FedBiO": FedBiO(**same),
        "FedBiOAcc": FedBiOAcc(**same, **memory),
        "AnchoredBiOAcc": AnchoredBiOAcc(**same, **memory),
        "TrackedBiO": TrackedBiO(**same),
        "TrackedBiO, a = 0.1": TrackedBiO(**same, momentum=WEIGHT),
    }


def floor(desk: Desk, name: str, algorithm: "Algorithm", **data: Any) -> np.ndarray:
    """The mean of |∇h|² over the second half of the run, for every seed."""
    size = SIZES[desk.scale]
    options = {"rounds": size["rounds"], "seeds": size["seeds"], "batch_size": 1}
    options["evaluate_every"] = size["rounds"] // 50
    found = desk.run(f"rates_{name}", build, data, algorithm, **options)["stationarity"] ** 2
    return found[..., found.shape[-1] // 2 :].mean(axis=-1)


def speed_up(desk: Desk, number: int) -> Outcome:
    """The floor against the number of clients, for homogeneous and heterogeneous clients."""
    clients = np.array(SIZES[desk.scale]["clients"])
    panels, words, slopes = [], [], {}
    for spread, title in ((0.0, "clients alike"), (1.0, "clients differ")):
        lines = {}
        for form, algorithm in forms().items():
            name = f"{form}_{spread:g}".replace(", a = 0.1", "_recursive")
            ends = [floor(desk, f"{name}_{m}", algorithm, clients=int(m), spread=spread) for m in clients]
            lines[form] = Line(clients, np.stack(ends, axis=-1))
            slopes[spread, form] = interval(slope(np.log(clients), np.log(lines[form].values)))
        panels.append(Panel(title, lines, across="clients", up="mean |∇h|²", log_x=True))
        found = (
            f"{form} {mean:.2f} ({low:.2f} to {high:.2f})"
            for (s, form), (mean, low, high) in slopes.items()
            if s == spread
        )
        words.append(f"{title}: {', '.join(found)}")
    title = f"Error against the number of clients, batches of one, {SIZES[desk.scale]['seeds']} seeds"
    path = draw(panels, title, desk.folder / f"figure_{number}.png", columns=2)
    fast = [high < -0.5 for (_, form), (_, _, high) in slopes.items() if form == "FedBiOAcc"]
    verdict: Verdict = "holds" if all(fast) else "holds in part" if any(fast) else "does not hold"
    claim = "FedBiOAcc achieves linear speed-up with respect to the number of clients (Remark 6)"
    ours = f"slope of log error in log M (−1 is linear); {'; '.join(words)}"
    return Outcome([Claim(number, claim, ours, verdict)], [path])
