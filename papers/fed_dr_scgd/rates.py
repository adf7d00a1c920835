"""The error of nested methods against the number of clients, the number of levels, and the spread of the clients.

The `nested` problem with batches of one row. After a burn-in the error of a method with constant steps fluctuates
around a level, measured as the mean of |∇Φ|² over the second half of a run. Theory promises for Fed-DR-SCGD that it
falls like 1/N (linear speed-up, Remark 4.3) and does not depend on K, and for LocalSCGDM a floor like δ² (Theorem 3.5).
"""

from typing import TYPE_CHECKING, Any

import numpy as np

from fedstrata.experiments.nested import build
from fedstrata.experiments.reproduction import Claim, Desk, Outcome, Verdict
from fedstrata.experiments.reproduction.drawing import Line, Panel, draw
from fedstrata.experiments.reproduction.statistics import interval, slope

if TYPE_CHECKING:
    from fedstrata.core.algorithm import Algorithm

SIZES: dict[str, dict[str, Any]] = {
    "small": {"rounds": 600, "seeds": 4, "clients": (2, 8, 32), "levels": (2, 3, 4)},
    "full": {"rounds": 6000, "seeds": 10, "clients": (2, 4, 8, 16, 32), "levels": (2, 3, 4, 5)},
}
STEP, MOMENTUM, LOCAL = 0.01, 0.05, 4
SPREADS = (0.125, 0.25, 0.5, 1.0)


def forms() -> dict[str, "Algorithm"]:
    """The published method and its corrected forms, all with the same steps."""
    from fedstrata.algorithms import FedDRSCGD, LevelwiseDRSCGD, SeparateDRSCGD, TrackedSCGD

    same = (STEP, MOMENTUM, LOCAL)
    return {
        "printed": FedDRSCGD(*same),
        "separate": SeparateDRSCGD(*same),
        "levelwise, separate": LevelwiseDRSCGD(*same, separate_samples=True),
        "tracked": TrackedSCGD(*same),
        "tracked, separate": TrackedSCGD(*same, separate_samples=True),
    }


def floor(desk: Desk, name: str, algorithm: "Algorithm", **data: Any) -> np.ndarray:
    """The mean of |∇Φ|² over the second half of the run, for every seed."""
    size = SIZES[desk.scale]
    options = {
        "rounds": size["rounds"],
        "seeds": size["seeds"],
        "batch_size": 1,
        "evaluate_every": size["rounds"] // 60,
    }
    found = desk.run(f"rates_{name}", build, data, algorithm, **options)["stationarity"] ** 2
    return found[..., found.shape[-1] // 2 :].mean(axis=-1)


def speed_up(desk: Desk) -> Outcome:
    """The floor against the number of clients, for homogeneous and heterogeneous clients."""
    clients = np.array(SIZES[desk.scale]["clients"])
    panels, words, slopes = [], [], {}
    for spread, title in ((0.0, "clients alike"), (1.0, "clients differ")):
        lines = {}
        for form, algorithm in forms().items():
            name = f"clients_{form}_{spread:g}".replace(", ", "_")
            ends = [floor(desk, f"{name}_{n}", algorithm, clients=int(n), spread=spread) for n in clients]
            lines[form] = Line(clients, np.stack(ends, axis=-1))
            slopes[spread, form] = interval(slope(np.log(clients), np.log(lines[form].values)))
        panels.append(Panel(title, lines, across="clients", up="mean |∇Φ|²", log_x=True))
        words.append(f"{title}: " + ", ".join(f"{form} {_range(slopes[spread, form])}" for form in lines))
    title = f"Error against the number of clients, batches of one, {SIZES[desk.scale]['seeds']} seeds"
    path = draw(panels, title, desk.folder / "figure_7.png", columns=2)
    printed = [slopes[spread, "printed"] for spread in (0.0, 1.0)]
    verdict: Verdict = "holds" if all(high < -0.5 for _, _, high in printed) else "does not hold"
    claim = "the convergence rate indicates the linear speed-up with respect to the number of workers (Remark 4.3)"
    return Outcome(
        [Claim(7, claim, f"slope of log error in log N (−1 is linear); {'; '.join(words)}", verdict)], [path]
    )


def levels(desk: Desk) -> Outcome:
    """The floor against the number of levels."""
    depths, lines, found = np.array(SIZES[desk.scale]["levels"]), {}, {}
    for form, algorithm in forms().items():
        name = f"levels_{form}".replace(", ", "_")
        ends = [floor(desk, f"{name}_{k}", algorithm, levels=int(k), clients=8, spread=0.0) for k in depths]
        lines[form] = Line(depths, np.stack(ends, axis=-1))
        found[form] = interval(slope(np.log(depths), np.log(lines[form].values)))
    panel = Panel("8 clients alike", lines, across="levels K", up="mean |∇Φ|²")
    path = draw([panel], "Error against the number of levels", desk.folder / "figure_8.png", columns=1)
    low, high = found["printed"][1:]
    verdict: Verdict = "holds" if low <= 0 <= high or high < 0 else "does not hold"
    claim = "the convergence rate is level-independent"
    ours = ", ".join(f"{form} {_range(value)}" for form, value in found.items())
    note = "one random problem per K, whose constants differ too"
    return Outcome([Claim(8, claim, f"slope of log error in log K ({note}): {ours}", verdict)], [path])


def heterogeneity(desk: Desk) -> Outcome:
    """The end of each method with full batches, against the spread δ of the clients."""
    from fedstrata.algorithms import LocalSCGDM

    spreads, lines, words = np.array(SPREADS), {}, []
    methods = {"LocalSCGDM": LocalSCGDM(STEP, MOMENTUM, MOMENTUM, LOCAL)}
    methods |= {name: forms()[name] for name in ("printed", "tracked")}
    for name, algorithm in methods.items():
        ends = []
        for spread in SPREADS:
            data = {"spread": spread, "noise": 0.0, "rows": 1}
            options = {"rounds": 4000, "batch_size": "all", "evaluate_every": 4000, "seeds": 1}
            history = desk.run(f"rates_spread_{name}_{spread:g}", build, data, algorithm, **options)
            ends.append(history.last("stationarity") ** 2)
        lines[name] = Line(spreads, np.stack(ends, axis=-1))
        if name != "tracked":
            words.append(f"{name} {slope(np.log(spreads), np.log(lines[name].values))[0]:.2f}")
    largest = float(lines["tracked"].values.max())
    words.append(f"tracked is at most {largest:.1e} everywhere")
    panel = Panel("all data, p = 4", lines, across="spread δ", up="|∇Φ|² at the end", log_x=True)
    path = draw([panel], "Where methods end, against the spread of clients", desk.folder / "figure_9.png", columns=1)
    claim = "LocalSCGDM can only converge to a neighbourhood of the optimal solution, of size O(δ²) (Theorem 3.5)"
    stalls = float(lines["LocalSCGDM"].values[0, -1]) > 100 * largest
    verdict: Verdict = "holds" if stalls else "does not hold"
    return Outcome([Claim(9, claim, f"slope of log |∇Φ|² in log δ: {', '.join(words)}", verdict)], [path])


def _range(found: tuple[float, float, float]) -> str:
    mean, low, high = found
    return f"{mean:.2f} ({low:.2f} to {high:.2f})"
