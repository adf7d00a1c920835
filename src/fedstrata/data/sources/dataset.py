"""What a data source gives: plain arrays, with natural clients where the data have them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fedstrata.errors import unknown

Arrays = dict[str, np.ndarray]


class Dataset(NamedTuple):
    """Examples before they are divided among clients."""

    train: Arrays
    test: Arrays | None = None
    classes: int | None = None
    features: tuple[str, ...] | None = None
    clients: np.ndarray | None = None  # natural client of each train row
    client_names: tuple[str, ...] | None = None
    test_clients: np.ndarray | None = None  # natural client of each test row
    valid: Arrays | None = None  # an official validation set


@dataclass(frozen=True)
class Source:
    """A data set that can be loaded by name."""

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
