"""The problems of the fairness experiments: a model on data with groups, and weights for the groups."""

from functools import lru_cache
from typing import Any, NamedTuple

from fedstrata.experiments.base import Setup

PATTERNS = 4  # assignments of the shares 2:2:6 of all groups; each has other client sizes, and recompiles
L2 = 1e-3  # li2022 needs a strongly convex lower level and does not state the constant


class Data(NamedTuple):
    title: str
    groups: int
    batch_size: int
    validation: int  # rows of each group and client; in li2022 "a small subset"


DATA = {
    "adult": Data("Adult", 5, 128, 20),
    "german_credit": Data("German Credit", 4, 32, 5),
    "synthetic": Data("synthetic data", 3, 32, 10),
}


def build(
    data: str = "auto", iid: bool = True, validation: int = 0, l2: float = L2, split: int = 0, hidden: int = 0
) -> Setup:
    """A logistic model on three clients' data; the groups are Adult's races or German Credit's sexes and states.

    Args:
        data: "adult", "german_credit", "synthetic" (3 groups, needs no files) or "auto", which takes German Credit if
            its files are there.
        iid: assign rows at random; otherwise every group is divided 2:2:6.
        validation: rows of each group and client in the balanced split (0: 20 for Adult, 5 for German Credit, 10).
        l2: the weight of the model's squared norm.
        split: the seed of the division (the assignment of the large shares repeats after 4).
        hidden: units of a hidden layer, for the two-layer network of li2022's appendix; its lower problem is not
            convex, so 0 is the sound choice.
    """
    return model_task(data, iid, split, validation=validation, l2=l2, hidden=hidden)


def model_task(
    data: str,
    iid: bool,
    split: int,
    weights: tuple[float, ...] | list[float] | None = None,
    validation: int = 0,
    l2: float = L2,
    hidden: int = 0,
) -> Setup:
    """The problem of FedAvg, FedReg, FedMinMax and FCFL; with weights, the second stage of the bilevel methods."""
    name = chosen(data)
    federation = divided(name, iid, split, validation or DATA[name].validation)
    fair = _fair(federation.features, DATA[name].groups, l2, hidden)
    return Setup(fair if weights is None else fair.weighted(weights), federation)


def weight_task(data: str, iid: bool, split: int, validation: int = 0, l2: float = L2) -> Setup:
    """The first stage of the bilevel methods: find the weights."""
    fair, federation = model_task(data, iid, split, validation=validation, l2=l2)
    return Setup(to_weights(fair), federation)


def to_weights(fair: Any) -> Any:
    """The bilevel problem. Weights are σ(x) and start at 1/2; all clients' models start alike (a linear one at 0)."""
    import jax

    from .problems import Followed

    start = fair.loss.model.init(jax.random.key(0))
    return Followed.of(fair.learn_weights(start, link="sigmoid", allow_missing=True, exact=False))


def chosen(data: str) -> str:
    """The data set that "auto" stands for."""
    from fedstrata.base.errors import unknown
    from fedstrata.data.sources import missing

    if data == "auto":
        return "synthetic" if missing("german_credit") else "german_credit"
    if data not in DATA:
        raise unknown("data of the fairness experiment", data, ["auto", *DATA])
    return data


@lru_cache(maxsize=4)
def divided(name: str, iid: bool, split: int, validation: int) -> Any:
    from .data import divide

    who = split if iid else split % PATTERNS
    return divide(_table(name), iid, validation, split_seed=split, partition_seed=who, validation_seed=split)


@lru_cache(maxsize=1)
def _table(name: str) -> Any:
    from . import data

    return {"adult": data.adult, "german_credit": data.german_credit, "synthetic": data.synthetic}[name]()


@lru_cache(maxsize=8)
def _fair(features: tuple[str, ...], groups: int, l2: float, hidden: int) -> Any:
    """One object for all runs on the same data, so that compiled programs are reused."""
    from fedstrata.models import MLP, Linear
    from fedstrata.problems.base import Metric
    from fedstrata.problems.losses import Classification

    from .problems import Counted

    loss = Classification(MLP((len(features), hidden, 1)) if hidden else Linear(len(features)), l2)
    return Counted(loss, group="group", groups=groups, metrics={"log_loss": Metric(loss.data_loss, "min")})
