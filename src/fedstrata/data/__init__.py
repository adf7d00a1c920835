"""Federations, partitions and data sets. Names are imported on first use: commands about files need no JAX."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedstrata.data.federating import federate
    from fedstrata.data.federation import Federation, Split
    from fedstrata.data.partition import IID, ByColumn, Contiguous, Dirichlet, LabelShards, Partition, QuantitySkew
    from fedstrata.data.sources import Dataset, available, load

_HOME = {
    "Federation": "federation",
    "Split": "federation",
    "federate": "federating",
    "ByColumn": "partition",
    "Contiguous": "partition",
    "Dirichlet": "partition",
    "IID": "partition",
    "LabelShards": "partition",
    "Partition": "partition",
    "QuantitySkew": "partition",
    "Dataset": "sources",
    "available": "sources",
    "load": "sources",
}

__all__ = [
    "IID",
    "ByColumn",
    "Contiguous",
    "Dataset",
    "Dirichlet",
    "Federation",
    "LabelShards",
    "Partition",
    "QuantitySkew",
    "Split",
    "available",
    "federate",
    "load",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value  # importing the module `federate` has put the module itself there
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
