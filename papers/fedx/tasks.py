"""The learning tasks: imbalanced data that differ among clients as in the paper, a model and a loss.

As in the paper: two classes, positives to negatives as 1 to 5 in training data, equal shares for all clients, and
Gaussian noise on the training data, with a different mean for every client, from −0.08 on in steps of 0.16 / N (0.01
for its 16 clients). The paper writes N(μ, 0.04). Here that is a variance, a deviation of 0.2, as in the authors' code
(`deviation=0.04` for the other reading). Noise is drawn once; their code draws it for every batch. On tables the noise
is four times as large in units of a column's deviation: that of a pixel of CIFAR-10 is about 1/4.

Scores of KL-OPAUC, of the square loss and of average precision are between 0 and 1, as in the authors' code; those of
the pairwise sigmoid and of cross-entropy are not bounded. With unbounded scores FedX2 is unstable for average
precision: the u of a well ranked positive tends to zero, f' at it is then very large, and partners carry such a u.

Fewer data than the paper's: CIFAR-10 has batches 1 and 2 only (20,000 of 50,000 training pictures).
"""

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedstrata.base.errors import unknown
from fedstrata.experiments.base import Setup

if TYPE_CHECKING:
    from fedstrata.data.federation import Federation
    from fedstrata.models.base import Model

Arrays = dict[str, np.ndarray]
LOSSES = ("kl", "psm", "ap", "square", "cross_entropy")
MODELS = ("auto", "linear", "mlp", "resnet18", "densenet121")
PIXEL = 0.25  # the deviation of a pixel of CIFAR-10, the unit of noise on tables
TRAIN, TEST = 4800, 10000  # rows used of larger tables


class About(NamedTuple):
    """A task: its title, the source of its files, its number of clients, and its model."""

    title: str
    source: str
    clients: int
    model: str
    positive: int = 1  # the label that counts as positive
    image: tuple[int, int, int] | None = None
    here: str = ""  # differences to the paper's size


TASKS = {
    "cifar10": About("CIFAR-10", "cifar10", 16, "resnet18", image=(32, 32, 3), here="20,000 of 50,000 pictures"),
    "cifar100": About("CIFAR-100", "cifar100", 16, "resnet18", image=(32, 32, 3)),
    "chexpert": About("CheXpert", "chexpert", 16, "densenet121", image=(320, 320, 3)),
    "chestmnist": About("ChestMNIST", "chestmnist", 16, "densenet121", image=(28, 28, 1)),
    "pneumonia": About("PneumoniaMNIST", "medmnist", 4, "mlp", image=(14, 14, 1), here="14 x 14 pixels"),
    "breast": About("BreastMNIST", "medmnist", 4, "mlp", 0, image=(14, 14, 1), here="14 x 14 pixels; 1 is malignant"),
    "ijcnn1": About("ijcnn1", "libsvm", 8, "mlp", here=f"{TRAIN:,} training and {TEST:,} test rows"),
    "w8a": About("w8a", "libsvm", 8, "mlp", here="its training file only"),
    "digits": About("digits, 0–4 against 5–9", "digits", 4, "mlp", here="scikit-learn's 8 x 8 pixels"),
}
PAPER = ("cifar10", "cifar100", "chexpert", "chestmnist")
CPU = ("pneumonia", "breast", "ijcnn1", "w8a")


def absent(task: str) -> bool:
    """Whether files of the task are missing."""
    from fedstrata.data.sources import by_hand, missing

    source = TASKS[task].source
    if source in by_hand.FILES:
        return by_hand.find(source) is None
    return source != "digits" and missing(source)


def build(
    task: str = "auto",
    loss: str = "kl",
    lam: float = 1.0,
    clients: int = 0,
    only: int = 0,
    deviation: float = 0.2,
    ratio: int = 5,
    flipped: float = 0.0,
    model: str = "auto",
    hidden: int = 32,
    width: int = 64,
    half: bool = False,
    squashed: bool = True,
    split: int = 0,
    metrics: str = "pauc_0.3 pauc_0.5",
) -> Setup:
    """A task of the paper, or a smaller one, with one of its losses.

    Args:
        task: a name of `TASKS`; "auto" is ijcnn1, or digits where its file is missing.
        loss: "kl" (KL-OPAUC), "psm" (pairwise sigmoid), "ap" (average precision), "square" (for CODASCA) or
            "cross_entropy".
        lam: λ of KL-OPAUC.
        clients: how many (0: the task's number).
        only: the number of clients that take part, from the first (0: all); the data of the others are left out.
        deviation: of the noise (0: none, and no means either).
        ratio: negatives to a positive in training (0: as they are).
        flipped: the share of training labels of each class that are wrong.
        model: the network; "auto" is the task's.
        hidden: units of the MLP.
        width: channels of the network's stem.
        half: compute in bfloat16.
        squashed: scores pass through the logistic function, as in the authors' code (never for "psm").
        split: the seed of everything random in the data.
        metrics: the metrics recorded on held-out data.
    """
    from fedstrata.problems.losses import Classification
    from fedstrata.problems.pairwise import pair_losses

    if task == "auto":
        task = "digits" if absent("ijcnn1") else "ijcnn1"
    for what, value, known in (("task", task, TASKS), ("loss", loss, LOSSES), ("model", model, MODELS)):
        if value not in known:
            raise unknown(f"{what} of fedx", value, known)
    import jax.numpy as jnp

    from .problems import Held, Ranked, Squashed

    federation = divided(task, clients or TASKS[task].clients, deviation, ratio, flipped, split)
    federation = federation.select(range(only)) if only else federation
    features = federation["train"].examples["x"].shape[1:]
    network = _network(TASKS[task].model if model == "auto" else model, features, hidden, width, half)
    names = tuple(metrics.split())
    scored = Squashed(network) if squashed else network
    if loss == "cross_entropy":
        return Setup(Ranked(Classification(network), ranks=names), federation)
    if loss == "ap":
        problem = Held(scored, pair_losses.AveragePrecision(), second="train", metrics=names)
    elif loss == "psm":
        problem = Held(network, pair_losses.PSM(), metrics=names)
    elif loss == "square":
        problem = Held(scored, pair_losses.Square(), metrics=names)
    else:  # λ as an array, so that another value does not recompile
        lam_: Any = jnp.asarray(lam, float)
        problem = Held(scored, pair_losses.KLOPAUC(lam_), metrics=names)
    return Setup(problem, federation)


@functools.lru_cache(maxsize=2)
def divided(task: str, clients: int, deviation: float, ratio: int, flipped: float, split: int) -> "Federation":
    """Train rows of all clients with their noise, and pooled validation and test rows without any."""
    from fedstrata.data import Federation

    rng = np.random.default_rng(split)
    train, valid, test = _parts(task, rng)
    train = _imbalanced(train, ratio, rng)
    train, valid, test = _scaled(task, train, valid, test)
    train["y"] = _flip(train["y"], flipped, rng)
    owner = _owners(train["y"], clients, rng)
    if deviation:
        train["x"] = noisy(train["x"], owner, clients, deviation, rng)
    federation = Federation.from_arrays(train, owner, classes=2)
    return federation.with_split("valid", valid).with_split("test", test).by_label()


def noisy(x: np.ndarray, owner: np.ndarray, clients: int, deviation: float, rng: Any) -> np.ndarray:
    """Client i adds N(−0.08 + 0.16 i / N, deviation²), both in units of `PIXEL` where columns have deviation one."""
    mean = (-0.08 + 0.16 * owner / clients).reshape((-1,) + (1,) * (x.ndim - 1))
    noise = mean + deviation * rng.standard_normal(x.shape, np.float32)
    return (x + noise / PIXEL).astype(np.float32)


def _parts(task: str, rng: Any) -> tuple[Arrays, Arrays, Arrays]:
    """Train, validation and test rows with labels 0 and 1."""
    from fedstrata.data import load

    about = TASKS[task]
    if task in ("pneumonia", "breast"):
        data: Any = load("medmnist", name=f"{task}mnist")
        halved = lambda part: {"x": part["x"].reshape(-1, 14, 2, 14, 2, 1).mean((2, 4)), "y": part["y"]}
        train, valid, test = (halved(part) for part in (data.train, data.valid, data.test))
        binary = lambda part: _binary(part, part["y"] == about.positive)
        return binary(train), binary(valid), binary(test)
    if task in ("ijcnn1", "w8a"):
        data = load("libsvm", name=task)
    elif task == "digits":
        data = load("digits")
    elif task == "cifar10":
        data = load("cifar10", batches=2)  # as in the stored runs
    else:
        data = load(about.source)
    train: Any = data.train
    test: Any = data.test
    if task not in ("ijcnn1", "w8a", "chestmnist", "chexpert"):  # the second half of the classes is positive
        half = data.classes // 2
        train, test = (None if p is None else _binary(p, p["y"] >= half) for p in (train, test))
    if test is None:
        train, test = _cut(train, 0.2, rng)
    if len(test["y"]) > TEST:
        test = _take(test, rng.permutation(len(test["y"]))[:TEST])
    if data.valid is not None:
        return train, data.valid, test
    train, valid = _cut(train, 0.2, rng)
    return train, valid, test


def _scaled(task: str, *parts: Arrays) -> list[Arrays]:
    """Pictures by the mean and deviation of a channel, tables by those of a column, both of the train rows."""
    x = parts[0]["x"]
    axes = tuple(range(x.ndim - 1))
    mean, scale = x.mean(axis=axes, dtype=np.float64), x.std(axis=axes, dtype=np.float64)
    if x.ndim > 2:
        scale = np.full_like(scale, PIXEL)  # noise is in units of pixels
    scale = np.where(scale > 0, scale, 1.0)
    return [{"x": ((p["x"] - mean) / scale).astype(np.float32), "y": p["y"].astype(np.int32)} for p in parts]


def _imbalanced(part: Arrays, ratio: int, rng: Any) -> Arrays:
    """`ratio` negatives per positive, by dropping rows of the larger class; at most `TRAIN` rows of a table."""
    order = rng.permutation(len(part["y"]))
    positives, negatives = (order[part["y"][order] == kind] for kind in (1, 0))
    if ratio:
        most = min(len(positives), len(negatives) // ratio)
        if part["x"].ndim == 2:
            most = min(most, TRAIN // (ratio + 1))
        positives, negatives = positives[:most], negatives[: most * ratio]
    return _take(part, rng.permutation(np.concatenate([positives, negatives])))


def _flip(y: np.ndarray, share: float, rng: Any) -> np.ndarray:
    """Labels with a share of wrong ones in each class."""
    wrong = [rng.permutation(np.flatnonzero(y == kind)) for kind in (0, 1)]
    flip = np.concatenate([rows[: round(share * len(rows))] for rows in wrong])
    out = y.copy()
    out[flip] = 1 - y[flip]
    return out


def _owners(y: np.ndarray, clients: int, rng: Any) -> np.ndarray:
    """Clients with equal numbers of each label, up to one."""
    owner = np.empty(len(y), np.int64)
    for kind in (0, 1):
        rows = rng.permutation(np.flatnonzero(y == kind))
        owner[rows] = np.arange(len(rows)) % clients
    return owner


def _cut(part: Arrays, share: float, rng: Any) -> tuple[Arrays, Arrays]:
    """The remaining rows, and the held-out share."""
    order = rng.permutation(len(part["y"]))
    held = round(share * len(order))
    return _take(part, order[held:]), _take(part, order[:held])


def _take(part: Arrays, rows: np.ndarray) -> Arrays:
    return {name: values[rows] for name, values in part.items()}


def _binary(part: Arrays, positive: np.ndarray) -> Arrays:
    return {"x": part["x"], "y": positive.astype(np.int32)}


def _network(name: str, features: tuple[int, ...], hidden: int, width: int, half: bool) -> "Model":
    from fedstrata.models import MLP, DenseNet121, Linear, Raveled, ResNet18

    size = int(np.prod(features))
    if name == "linear":
        return Linear(size)
    if name == "mlp":
        return MLP((size, hidden, 1))
    kind = {"resnet18": ResNet18, "densenet121": DenseNet121}[name]
    # All parameters are one vector: a deep network compiles and runs faster so.
    return Raveled(kind(features, outputs=1, width=width, compute="bfloat16" if half else None, remat=False))
