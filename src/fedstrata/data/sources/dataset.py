"""The result of loading a data set: plain arrays, with natural clients where the data have them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fedstrata.base.errors import unknown

Arrays = dict[str, np.ndarray]


class Dataset(NamedTuple):
    """Examples before they are divided among clients.

    Args:
        train: arrays with one entry per row, e.g. {"x": X, "y": y}.
        test: the official test set, if there is one.
        classes: the number of label values of a classification, else None.
        features: the column names of x.
        clients: the natural client of each train row.
        client_names: the names of the natural clients.
        test_clients: the natural client of each test row.
        valid: the official validation set, if there is one.
    """

    train: Arrays
    test: Arrays | None = None
    classes: int | None = None
    features: tuple[str, ...] | None = None
    clients: np.ndarray | None = None
    client_names: tuple[str, ...] | None = None
    test_clients: np.ndarray | None = None
    valid: Arrays | None = None


@dataclass(frozen=True)
class Source:
    """A data set that can be loaded by name.

    Args:
        name: of the data set, for `fs.data.load`.
        title: a short description.
        origin: the publisher.
        licence: of the data.
        load: the loader; its parameters are the options of `fs.data.load`.
    """

    name: str
    title: str
    origin: str
    licence: str
    load: Callable[..., Dataset]


def pick(argument: str, value: str, known: Sequence[str]) -> str:
    """The value, if it is one of the known ones."""
    if value not in known:
        raise unknown(argument, str(value), known)
    return value


def standardized(train: np.ndarray, *others: np.ndarray) -> list[np.ndarray]:
    """Columns with train mean 0 and deviation 1, as float32; constant columns are only centred."""
    mean, scale = train.mean(axis=0), train.std(axis=0)
    scale = np.where((train == train[:1]).all(axis=0), 1.0, scale)
    return [((x - mean) / scale).astype(np.float32) for x in (train, *others)]
