"""Small data sets that are part of scikit-learn: no file is needed."""

import importlib

import numpy as np

from fedstrata.data.sources.dataset import Dataset, Source


def _bundled(name: str) -> Dataset:
    bunch = getattr(importlib.import_module("sklearn.datasets"), f"load_{name}")()
    regression = name == "diabetes"
    y = bunch.target.astype(np.float32 if regression else np.int32)
    return Dataset(
        train={"x": bunch.data.astype(np.float32), "y": y},
        classes=None if regression else len(bunch.target_names),
        features=tuple(str(f) for f in bunch.feature_names),
    )


def digits() -> Dataset:
    """1,797 handwritten digits, 8 x 8 pixels scaled to [0, 1] and flattened."""
    data = _bundled("digits")
    return data._replace(train={**data.train, "x": data.train["x"] / 16})


def breast_cancer() -> Dataset:
    """569 tumours, 30 measurements; label 0 malignant, 1 benign."""
    return _bundled("breast_cancer")


def wine() -> Dataset:
    """178 wines of three cultivars, 13 measurements."""
    return _bundled("wine")


def iris() -> Dataset:
    """150 flowers of three species, four measurements."""
    return _bundled("iris")


def diabetes() -> Dataset:
    """442 patients, 10 scaled measurements, disease progression after a year (regression)."""
    return _bundled("diabetes")


SOURCES = (
    Source("digits", "handwritten digits, 8 x 8", "UCI, via scikit-learn", "CC BY 4.0", digits),
    Source("breast_cancer", "Wisconsin breast cancer", "UCI, via scikit-learn", "CC BY 4.0", breast_cancer),
    Source("wine", "wine cultivars", "UCI, via scikit-learn", "CC BY 4.0", wine),
    Source("iris", "iris species", "UCI, via scikit-learn", "CC BY 4.0", iris),
    Source("diabetes", "diabetes progression", "Efron et al. (2004), via scikit-learn", "none stated", diabetes),
)
