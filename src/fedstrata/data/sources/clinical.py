"""Patients of several hospitals and regions, which are natural clients."""

import csv
import io

import numpy as np

from fedstrata.data.sources import store
from fedstrata.data.sources.dataset import Dataset, Source

HOSPITALS = {"cleveland": "Cleveland", "hungarian": "Hungarian", "switzerland": "Switzerland", "va": "VA Long Beach"}
COLUMNS = ("age", "sex", "cp", "trestbps", "chol", "fbs", "restecg", "thalach", "exang", "oldpeak")
CODED = {"cp": (2, 3, 4), "restecg": (1, 2)}  # one column per value, the first value being the reference


def heart_disease(indicators: bool = False) -> Dataset:
    """920 patients of four hospitals; label 1 if a disease was found (num > 0).

    Columns `slope`, `ca` and `thal` are left out: a third to two thirds of their values are missing. In the others a
    missing value (`?`, or the impossible 0 of `chol` and `trestbps`: all of Switzerland's `chol`) is 0 here, and True
    in the leaf `missing`, which has the shape of `x`. `Federation.impute` fills them in from the training rows: call it
    after rows are held out, or test rows influence their own features. `cp` and `restecg` are one-hot without their
    first value. Nothing is scaled; use `Federation.standardize`.

    Args:
        indicators: whether to add a 0/1 column for each column with missing values.
    """
    tables = [_hospital(name) for name in HOSPITALS]
    raw, label = np.concatenate([t[:, :10] for t in tables]), np.concatenate([t[:, 13] for t in tables])
    for name in ("trestbps", "chol"):
        column = raw[:, COLUMNS.index(name)]
        column[column == 0] = np.nan
    missing = np.isnan(raw)
    known = np.where(missing, 0, raw)
    columns: dict[str, np.ndarray] = {}
    gone: dict[str, np.ndarray] = {}
    for j, name in enumerate(COLUMNS):
        new = {f"{name} = {value}": known[:, j] == value for value in CODED.get(name, ())} or {name: known[:, j]}
        columns |= new
        gone |= dict.fromkeys(new, missing[:, j])
    if indicators:
        more = {f"{name} missing": missing[:, j] for j, name in enumerate(COLUMNS) if missing[:, j].any()}
        columns |= more
        gone |= dict.fromkeys(more, np.zeros(len(label), bool))
    stacked = lambda of: np.stack(list(of.values()), axis=1)
    return Dataset(
        train={
            "x": stacked(columns).astype(np.float32),
            "y": (label > 0).astype(np.int32),
            "missing": stacked(gone),
        },
        classes=2,
        features=tuple(columns),
        clients=np.repeat(np.arange(len(tables)), [len(t) for t in tables]),
        client_names=tuple(HOSPITALS.values()),
    )


def _hospital(name: str) -> np.ndarray:
    text = store.read("heart_disease", f"processed.{name}.data").decode("ascii")
    return np.array([[float("nan") if v == "?" else float(v) for v in line.split(",")] for line in text.split()])


def tcga_brca() -> Dataset:
    """1,088 breast cancer patients of six regions (FLamby's Fed-TCGA-BRCA): 39 features, survival.

    Leaf `event` is 1 for an observed death, `time` the days until it or until the last contact.
    """
    patients = _rows("brca.csv")
    folds = {row["pid"]: row["fold2"].split("_") for row in _rows("train_test_split.csv")}
    features = tuple(name for name in patients[0] if name not in ("pid", "E", "T"))

    def part(fold: str) -> tuple[dict[str, np.ndarray], np.ndarray]:
        chosen = [row for row in patients if folds.get(row["pid"], [""])[0] == fold]
        examples = {
            "x": np.array([[float(row[f]) for f in features] for row in chosen], np.float32),
            "event": np.array([float(row["E"]) for row in chosen], np.int32),
            "time": np.array([float(row["T"]) for row in chosen], np.float32),
        }
        return examples, np.array([int(folds[row["pid"]][1]) for row in chosen])

    (train, clients), (test, test_clients) = part("train"), part("test")
    names = tuple(f"region {k}" for k in range(clients.max() + 1))
    return Dataset(train, test, None, features, clients, names, test_clients)


def _rows(name: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(store.read("tcga_brca", name).decode("utf-8"))))


SOURCES = (
    Source("heart_disease", "heart disease, four hospitals", "UCI", "CC BY 4.0", heart_disease),
    Source("tcga_brca", "breast cancer survival, six regions", "NCI GDC, via FLamby", "GDC open access", tcga_brca),
)
