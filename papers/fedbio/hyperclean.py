"""Data cleaning: a weight for every training example, learned from a few examples with clean labels.

Every client has training pictures, 40 % of which have a wrong label, and a few clean ones. Upper problem: x has one
number per training example of the federation, whose sigmoid is its weight, and the objective is the loss on the clean
examples. Lower problem: each client trains a softmax regression on its weighted examples. FedAvg then trains one model
with these weights. References: FedAvg on all examples with equal weights, and FedAvg on the examples with right labels,
which are unknown in practice.
"""

from typing import Any, Literal

import numpy as np

from fedstrata.experiments.base import Setup

from .two_stage import TwoStage

LABELS = 10
L2 = 1e-2


def build(
    source: Literal["auto", "mnist", "fashion_mnist", "digits"] = "auto",
    clients: int = 5,
    rows: int = 400,
    clean_rows: int = 100,
    wrong: float = 0.4,
    known: bool = False,
    seed: int = 0,
) -> Setup:
    """A softmax regression on pictures shrunk to at most 8 × 8, on equal shares.

    Args:
        source: a data set; "auto" is mnist where its files are, else scikit-learn's digits.
        clients: how many.
        rows: of each client in "train".
        clean_rows: of each client in "valid".
        wrong: the share of train labels that are replaced by another one.
        known: leave the wrong ones out, as if they were known.
        seed: of everything random in the data.
    """
    from fedstrata.data import Federation
    from fedstrata.data.sources import missing
    from fedstrata.data.split import Split
    from fedstrata.models import Linear
    from fedstrata.problems.losses import Classification
    from fedstrata.problems.sample_weights import SampleWeighted

    name = ("digits" if missing("mnist") else "mnist") if source == "auto" else source
    pictures, labels, others, truths = shrunk(name)
    rows = min(rows, len(labels) // clients - clean_rows)  # digits has fewer pictures
    rng, many = np.random.default_rng(seed), clients * rows
    order = rng.permutation(len(labels))[: clients * (rows + clean_rows)]
    x, y, x_clean, y_clean = pictures[order[:many]], labels[order[:many]], pictures[order[many:]], labels[order[many:]]
    false = rng.permutation(many) < round(wrong * many)
    y = np.where(false, (y + rng.integers(1, LABELS, many)) % LABELS, y).astype(np.int32)
    cut = lambda n: np.arange(clients + 1) * n
    train = {"x": x, "y": y, "id": np.arange(many, dtype=np.int32), "wrong": false.astype(np.int32)}
    plain = lambda x, y: {"x": x, "y": y, "id": np.full(len(y), -1, np.int32), "wrong": np.zeros(len(y), np.int32)}
    splits = {"train": Split(train, cut(rows)), "valid": Split(plain(x_clean, y_clean), cut(clean_rows))}
    splits["test"] = Split(plain(others, truths), np.array([0, len(truths)]), pooled=True)
    weights = np.where(false, 0.0, 1.0 / (1 - wrong)) if known else np.ones(many)
    loss = Classification(Linear(x.shape[1], LABELS), L2)
    return Setup(SampleWeighted.of(loss, weights.astype(np.float32)), Federation(splits, classes=LABELS))


def shrunk(name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Train and test pictures as vectors of at most 64 numbers, with mean zero and norm one, and their labels."""
    from fedstrata.data import load

    data = load(name)
    train, test = data.train, data.test
    if test is None:  # digits: every third picture is for the test
        keep = np.arange(len(train["y"])) % 3 > 0
        train, test = ({k: v[rows] for k, v in train.items()} for rows in (keep, ~keep))
    small = lambda images: _pooled(np.asarray(images, np.float32))
    first = small(train["x"])
    centre, size = first.mean(axis=0), first.std()
    scaled = lambda pixels: ((pixels - centre) / size).astype(np.float32)
    number = lambda part: np.asarray(part["y"], np.int32)
    return scaled(first), number(train), scaled(small(test["x"])), number(test)


def _pooled(images: np.ndarray) -> np.ndarray:
    side = round(images[0].size ** 0.5)
    images = images.reshape(len(images), side, side)
    step = side // (7 if side == 28 else 8)
    return (
        images.reshape(len(images), side // step, step, side // step, step).mean(axis=(2, 4)).reshape(len(images), -1)
    )


SAME: dict[str, Any] = {"step_size": 300.0, "lower_step_size": 0.5, "local_steps": 5}

EXPERIMENT = TwoStage(
    name="hyperclean",
    summary="softmax regression on 5 clients with 40 % wrong labels: learn which examples to trust",
    build=build,
    rounds=50,
    batch_size="all",
    seeds=3,
    methods={
        "FedAvg": {"step_size": 0.5, "local_steps": 5},
        "FedBiO": SAME,
        "FedBiOAcc": {**SAME, "delta": 1.0, "momentum": 0.1, "lower_momentum": 0.1},
        "TrackedBiO": SAME,
    },
    common=SAME,
    panels=("test/accuracy", "objective"),
)
