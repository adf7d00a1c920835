"""The methods of the paper's tables, by their names there, and the tuned hyper-parameters of each.

Every method gets the same number of settings: four steps a decade apart, then four more around the best of them: for
KL-OPAUC four other λ, otherwise four steps in between and just outside. A centralised method also tries other batch
sizes, as in the paper. Steps of CODASCA are in units of 1 / (p(1−p)), the factor of the square loss in its min-max
form.

β = 0.1 where f is not linear, as in the paper, for all methods with a β. γ = 0.2 as in the authors' code; the paper
does not state it. CODASCA runs without stages and without its proximal term: its step falls like that of the others.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from fedstrata.core.algorithm import Algorithm

STEPS = (0.001, 0.01, 0.1, 1.0)  # the ends are the paper's
FINER = (10**-0.5, 10**-0.25, 10**0.25, 10**0.5)
LAMS = (2.0, 3.0, 4.0, 5.0)  # beside 1
BATCHES = (64, 128, 256, 512)  # of a centralised method, beside 32
BETA, GAMMA = 0.1, 0.2
METRIC = {"kl": "pauc_0.3", "psm": "auc", "ap": "ap"}  # the criterion of tuning, on validation data


class Method(NamedTuple):
    """A row of a table: an algorithm, its loss if not the table's, and its batch."""

    algorithm: str
    loss: str = ""
    batch: int = 32
    ours: bool = False


class Setting(NamedTuple):
    """The tuned values."""

    step: float
    lam: float = 1.0
    batch: int = 32

    @property
    def name(self) -> str:
        return f"step_{self.step:.4g}_lam_{self.lam:g}_batch_{self.batch}"


LOCAL_SGD = Method("FedAvg", "cross_entropy", 64)
TABLES: dict[str, dict[str, Method]] = {
    "kl": {
        "Centralized": Method("SOX"),
        "Local SGD": LOCAL_SGD,
        "CODASCA": Method("CODASCA", "square"),
        "Local Pair": Method("LocalPair"),
        "FedX2": Method("FedX2"),
        "TrackedX": Method("TrackedX", ours=True),
    },
    "psm": {
        "Centralized": Method("PairSGD"),
        "Local SGD": LOCAL_SGD,
        "CODASCA": Method("CODASCA", "square"),
        "Local Pair": Method("LocalPair"),
        "FedX1": Method("FedX1"),
        "TrackedX": Method("TrackedX", ours=True),
    },
    "ap": {
        "Centralized": Method("SOX"),
        "Local SGD": LOCAL_SGD,
        "Local Pair": Method("LocalPair"),
        "FedX2": Method("FedX2"),
        "TrackedX": Method("TrackedX", ours=True),
    },
}


def first_settings(steps: tuple[float, ...] = STEPS) -> list[Setting]:
    return [Setting(step) for step in steps]


def more_settings(table: str, method: Method, best: Setting, lams: tuple[float, ...] = LAMS) -> list[Setting]:
    """The second four settings, around the best of the first."""
    if table == "kl" and not method.loss:
        return [best._replace(lam=lam) for lam in lams]
    return [best._replace(step=best.step * factor) for factor in FINER[: len(lams)]]


def more_batches(method: Method, best: Setting, batches: tuple[int, ...] = BATCHES) -> list[Setting]:
    """The additional batch sizes of a centralised method."""
    return [best._replace(batch=batch) for batch in batches] if method.algorithm in ("SOX", "PairSGD") else []


def algorithm(
    table: str, method: Method, setting: Setting, steps: int, local_steps: int, ratio: int, history: int = 1
) -> "Algorithm":
    """The algorithm with a step that falls to a tenth after each quarter of a run."""
    from fedstrata.algorithms import SOX, FedAvg, FedX1, FedX2, LocalPair, PairSGD, TrackedX
    from fedstrata.algorithms.pairwise.codasca import CODASCA

    from .problems import Quartered

    step: Any = Quartered.of(setting.step, steps)
    name, linear = method.algorithm, table == "psm"
    if name == "FedAvg":
        return FedAvg(step, local_steps)
    if name == "CODASCA":
        share = 1 / (1 + ratio)
        falling: Any = Quartered.of(setting.step / (share * (1 - share)), steps)
        return CODASCA(falling, local_steps)
    if name == "FedX1":
        return FedX1(step, local_steps, history=history)
    if name == "PairSGD":
        return PairSGD(step, local_steps)
    momentum = 1.0 if linear else BETA
    if name in ("FedX2", "TrackedX"):
        kind: Any = FedX2 if name == "FedX2" else TrackedX
        return kind(step, local_steps, memory_weight=GAMMA, momentum=momentum, history=history)
    return {"LocalPair": LocalPair, "SOX": SOX}[name](step, local_steps, memory_weight=GAMMA, momentum=momentum)
