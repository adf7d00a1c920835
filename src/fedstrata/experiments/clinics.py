"""Breast tumours of four synthetic clinics with differently calibrated instruments: `make demo`; needs no files.

The tumours are real (Wisconsin breast cancer), the clinics are not. Malignant tumours are distributed 4:3:2:1 over the
clinics and benign ones 1:2:3:4, so that from 70 % to 13 % of a clinic's tumours are malignant. Every clinic then has an
offset for each measurement, a normal number of `shift` standard deviations, the same for all of its patients. Scores of
two clinics are comparable only if the model learns to ignore the directions in which their instruments differ.
`--data shift=0` is the division without offsets. Of the 30 measurements only the ten means per tumour are used, without
the four of its size (radius, perimeter, area, concave points), with which the task is too easy to separate methods.

Methods, divisions and tuning are those of the experiment `hospitals`; the step sizes are those that
`python -m fedstrata.experiments.site_study.tuning clinics` prints.
"""

from typing import TYPE_CHECKING, Any

import numpy as np

from fedstrata.experiments.base import Setup
from fedstrata.experiments.site_study.methods import LOCAL_STEPS, settings
from fedstrata.experiments.site_study.sites import Sites
from fedstrata.experiments.site_study.study import Study

if TYPE_CHECKING:
    from fedstrata.data.federation import Federation

SHARES = (4, 3, 2, 1)  # of malignant tumours; reversed for benign ones
NAMES = ("north", "east", "south", "west")
MEASUREMENTS = ("texture", "smoothness", "compactness", "concavity", "symmetry", "fractal dimension")


def build(shift: float = 1.0, l2: float = 0.001) -> Setup:
    """Four clinics; the seed of a run draws the clinic of each tumour, the offsets, and the division.

    Args:
        shift: the size of a clinic's offsets, in standard deviations of the measurement.
        l2: the weight of the squared norm in every method's objective.
    """
    if not 0 <= shift < float("inf"):
        raise ValueError(f"clinics: shift={shift} must be at least 0")
    table, malignant = _tumours()
    return Sites.of(lambda seed: _divided(table, malignant, shift, seed), l2)


def _tumours() -> tuple[np.ndarray, np.ndarray]:
    from fedstrata.data import load

    data = load("breast_cancer")
    names: Any = data.features
    return data.train["x"][:, [names.index(f"mean {m}") for m in MEASUREMENTS]], data.train["y"] == 0


def _divided(table: np.ndarray, malignant: np.ndarray, shift: float, seed: int) -> "Federation":
    from fedstrata.data import Federation
    from fedstrata.experiments.site_study.sites import divided

    rng = np.random.default_rng(seed)
    clinic = np.empty(len(malignant), np.int64)
    for kind, shares in ((malignant, SHARES), (~malignant, SHARES[::-1])):
        rows = rng.permutation(np.flatnonzero(kind))
        cuts = np.round(np.cumsum(shares)[:-1] / np.sum(shares) * len(rows)).astype(int)
        for k, part in enumerate(np.split(rows, cuts)):
            clinic[part] = k
    offsets = shift * rng.normal(size=(len(SHARES), table.shape[1])) * table.std(axis=0)
    examples = {"x": (table + offsets[clinic]).astype(np.float32), "y": malignant.astype(np.int32)}
    return divided(Federation.from_arrays(examples, clinic, classes=2, names=NAMES, features=MEASUREMENTS), seed)


EXPERIMENT = Study(
    name="clinics",
    summary="tumours of 4 clinics with offset instruments: global and per-clinic AUC; no files needed",
    build=build,
    rounds=100,
    batch_size=16,
    seeds=5,
    methods=settings(FedX2=0.003, FedX1=0.01, FedAvg=0.1, LocalPair=0.001, CODASCA=0.03, SOX=0.03, PairSGD=0.03),
    common={"step_size": 0.01, "local_steps": LOCAL_STEPS},
    alone_step=0.001,
    site="clinic",
)
