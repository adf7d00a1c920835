"""Ordinary federated learning: `fs.Average` problems."""

from fedstrata.algorithms.average.fedavg import FedAvg, FedProx
from fedstrata.algorithms.average.fedopt import FedAdam, FedOpt, FedYogi
from fedstrata.algorithms.average.scaffold import Scaffold
from fedstrata.algorithms.average.sgd import CentralSGD, FedSGD

__all__ = ["CentralSGD", "FedAdam", "FedAvg", "FedOpt", "FedProx", "FedSGD", "FedYogi", "Scaffold"]
