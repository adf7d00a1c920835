"""Binary classification sets in the LIBSVM format, made dense."""

import io

import numpy as np

from fedstrata.data.sources import store
from fedstrata.data.sources.dataset import Arrays, Dataset, Source, pick

SETS = {  # train file, test file, features
    "a9a": ("a9a.bz2", "a9a.t.bz2", 123),
    "w8a": ("w8a.bz2", None, 300),
    "ijcnn1": ("ijcnn1.trn.bz2", "ijcnn1.tst.bz2", 22),
    "german": ("german.numer_scale.bz2", None, 24),
}


def libsvm(name: str = "a9a") -> Dataset:
    """A binary classification set of the LIBSVM collection; labels -1 and +1 become 0 and 1.

    Args:
        name: `a9a`, `w8a`, `ijcnn1` or `german` (german.numer, scaled).
    """
    train, test, features = SETS[pick("libsvm set", name, tuple(SETS))]
    return Dataset(_dense(train, features), _dense(test, features) if test else None, classes=2)


def _dense(file: str, features: int) -> Arrays:
    from sklearn.datasets import load_svmlight_file

    x, y = load_svmlight_file(io.BytesIO(store.read("libsvm", file)), n_features=features)[:2]
    return {"x": x.astype(np.float32).toarray(), "y": (y > 0).astype(np.int32)}


SOURCES = (Source("libsvm", "a9a, w8a, ijcnn1, german", "LIBSVM data sets (NTU)", "none stated", libsvm),)
