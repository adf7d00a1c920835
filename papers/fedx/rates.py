"""The error of FedX1 and FedX2 against the number of clients, with small batches and constant steps.

Each client has a few rows of five features; the score is linear. Homogeneous clients all have the same rows, so that
the objective does not depend on their number and only the samples differ. Heterogeneous clients have different rows and
offsets. After a burn-in the error fluctuates around a level, measured as the mean of |∇F|² over the second half of a
run.
"""

from typing import TYPE_CHECKING, Any

import numpy as np

from fedstrata.experiments.base import Setup
from fedstrata.experiments.reproduction import Claim, Desk, Outcome, Verdict
from fedstrata.experiments.reproduction.drawing import Line, Panel, draw
from fedstrata.experiments.reproduction.statistics import interval, slope

if TYPE_CHECKING:
    from fedstrata.core.algorithm import Algorithm

SIZES: dict[str, dict[str, Any]] = {
    "small": {"rounds": 800, "seeds": 4, "clients": (2, 8, 32)},
    "full": {"rounds": 6000, "seeds": 10, "clients": (2, 4, 8, 16, 32)},
}
STEP, LOCAL, BATCH = 0.05, 4, 2


def forms() -> dict[str, tuple[str, "Algorithm"]]:
    """Pairs of a loss and a method, all with the same steps."""
    from fedstrata.algorithms import FedX1, FedX2, TrackedX

    return {
        "FedX1": ("logistic", FedX1(STEP, LOCAL)),
        "FedX2": ("kl", FedX2(STEP, LOCAL)),
        "TrackedX": ("kl", TrackedX(STEP, LOCAL)),
    }


def build(loss: str = "logistic", clients: int = 8, spread: float = 0.0, rows: int = 16, seed: int = 0) -> Setup:
    """A linear score for two overlapping clouds; l2 = 0.1, so that there is one minimum.

    Args:
        loss: "logistic" or "kl" (KL-OPAUC, λ = 2).
        clients: how many.
        spread: how much clients differ (0: all have the same rows).
        rows: of each client.
        seed: of everything random in the data.
    """
    from fedstrata.data import Federation
    from fedstrata.models import Linear
    from fedstrata.problems.pairwise import pair_losses
    from fedstrata.problems.pairwise.problem import Pairwise

    from .problems import Squashed

    rng = np.random.default_rng(seed)
    y = np.arange(rows, dtype=np.int32) % 2
    cloud = lambda: rng.normal(size=(rows, 5)) + 0.7 * y[:, None]
    same = cloud()
    offset = lambda: spread * rng.normal(size=5)
    parts = [{"x": cloud() + offset() if spread else same, "y": y} for _ in range(clients)]
    federation = Federation.from_clients([{**p, "x": p["x"].astype(np.float32)} for p in parts]).by_label()
    if loss == "kl":
        return Setup(Pairwise(Squashed(Linear(5)), pair_losses.KLOPAUC(2.0), l2=0.1, metrics=()), federation)
    return Setup(Pairwise(Linear(5), pair_losses.Logistic(), l2=0.1, metrics=()), federation)


def floor(desk: Desk, name: str, loss: str, algorithm: "Algorithm", **data: Any) -> np.ndarray:
    """The mean of |∇F|² over the second half of the run, for every seed."""
    size = SIZES[desk.scale]
    options = {"rounds": size["rounds"], "seeds": size["seeds"], "batch_size": BATCH}
    options["evaluate_every"] = max(1, size["rounds"] // 60)
    found = desk.run(f"rates_{name}", build, {"loss": loss, **data}, algorithm, **options)["stationarity"] ** 2
    return found[..., found.shape[-1] // 2 :].mean(axis=-1)


def speed_up(desk: Desk) -> Outcome:
    """The floor against the number of clients, for homogeneous and heterogeneous clients."""
    clients = np.array(SIZES[desk.scale]["clients"])
    panels, parts, slopes = [], [], {}
    for spread, title in ((0.0, "clients alike"), (0.5, "clients differ")):
        lines = {}
        for form, (loss, algorithm) in forms().items():
            name = f"{form}_{spread:g}"
            ends = [floor(desk, f"{name}_{n}", loss, algorithm, clients=int(n), spread=spread) for n in clients]
            lines[form] = Line(clients, np.stack(ends, axis=-1))
            slopes[spread, form] = interval(slope(np.log(clients), np.log(lines[form].values)))
        panels.append(Panel(title, lines, across="clients", up="mean |∇F|²", log_x=True))
        told = (
            f"{form} {m:.2f} ({low:.2f} to {high:.2f})" for (s, form), (m, low, high) in slopes.items() if s == spread
        )
        parts.append(f"{title}: {', '.join(told)}".replace("-", "−"))
    title = f"Error against the number of clients, batches of {BATCH}, {SIZES[desk.scale]['seeds']} seeds"
    path = draw(panels, title, desk.folder / "figure_6.png", columns=2)
    fast = [slopes[spread, form][2] < -0.5 for spread in (0.0, 0.5) for form in ("FedX1", "FedX2")]
    verdict: Verdict = "holds" if all(fast) else "holds in part" if any(fast) else "does not hold"
    claim = "both algorithms enjoy parallel speed-up; the complexity of FedX1 is linearly reduced by N (Theorem 1)"
    ours = f"slope of log error in log N (−1 is linear); {'; '.join(parts)}"
    return Outcome([Claim(6, claim, ours, verdict)], [path])
