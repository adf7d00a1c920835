"""A smooth average plus a regulariser or constraint: `fs.Regularized` problems."""

from fedstrata.algorithms.regularized.fast_fedda import FastFedDA
from fedstrata.algorithms.regularized.fedavg_prox import FedAvgLocalProx, FedAvgServerProx
from fedstrata.algorithms.regularized.fedcanon import FedCanon
from fedstrata.algorithms.regularized.fedda import FedDA
from fedstrata.algorithms.regularized.fedmid import FedMid
from fedstrata.algorithms.regularized.fednmap import FedNMap
from fedstrata.algorithms.regularized.scaffold_prox import ScaffoldServerProx
from fedstrata.algorithms.regularized.zhang2024 import Zhang2024

__all__ = [
    "FastFedDA",
    "FedAvgLocalProx",
    "FedAvgServerProx",
    "FedCanon",
    "FedDA",
    "FedMid",
    "FedNMap",
    "ScaffoldServerProx",
    "Zhang2024",
]
