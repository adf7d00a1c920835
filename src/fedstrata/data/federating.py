"""From a named data set to a federation in one call."""

from typing import Any

import numpy as np

from fedstrata.data.federation import Federation
from fedstrata.data.partition import Partition
from fedstrata.data.sources import Dataset, load


def federate(
    data: str | Dataset, partition: Partition | None = None, seed: int = 0, test: bool | float = True, **options: Any
) -> Federation:
    """Divide a data set among clients.

    Args:
        data: a name of `fs.data.available()`, or a data set that was loaded.
        partition: the rule; None: the natural clients of the data set.
        seed: of the partition and of the held-out rows.
        test: True: the data set's test rows, with their natural clients where these are used, else pooled. A fraction:
            that part of every client is held out instead. False: no test split.
        **options: passed to the loader of the data set.

    >>> from fedstrata.data import Dirichlet
    >>> fed = federate("digits", Dirichlet(5, alpha=0.5), test=0.2)
    >>> fed.clients, fed.classes, sorted(fed.splits)
    (5, 10, ['test', 'train'])
    """
    if not isinstance(data, str | Dataset):
        raise TypeError(
            f"federate: data is a {type(data).__name__}; give a name from fs.data.available(), or give arrays "
            'to fs.Federation.from_arrays({"x": X, "y": y}, partition).'
        )
    if not isinstance(partition, Partition | None):
        raise TypeError(f"federate: partition={partition!r} is no partition; give e.g. fs.data.IID(10).")
    name = data if isinstance(data, str) else "the data set"
    dataset = load(data, **options) if isinstance(data, str) else data
    if isinstance(test, bool):
        fraction = None
    elif isinstance(test, float | np.floating) and 0 < test < 1:
        fraction = float(test)
    else:
        raise ValueError(f"federate: test must be True, False or a fraction between 0 and 1, got {test!r}.")
    natural = partition is None
    owners = dataset.clients if partition is None else partition
    if owners is None:
        raise ValueError(
            f"federate: {name} has no natural clients; pass a partition, e.g. fs.data.IID(10) or "
            "fs.data.Dirichlet(10, 0.3)."
        )
    federation = Federation.from_arrays(
        dataset.train,
        owners,
        classes=dataset.classes,
        names=dataset.client_names if natural else None,
        features=dataset.features,
        seed=seed,
    )
    if dataset.valid is not None:
        federation = federation.with_split("valid", dataset.valid)
    if fraction is not None:
        return federation.hold_out("test", fraction, seed)
    if test and dataset.test is not None:
        return federation.with_split("test", dataset.test, dataset.test_clients if natural else None)
    return federation
