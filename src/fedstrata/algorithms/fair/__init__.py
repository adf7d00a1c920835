"""Fairness between groups and between clients: `fs.Fair` problems."""

from fedstrata.algorithms.fair.afl import AFL
from fedstrata.algorithms.fair.fcfl import FCFL
from fedstrata.algorithms.fair.fedminmax import FedMinMax
from fedstrata.algorithms.fair.fedreg import FedReg
from fedstrata.algorithms.fair.qffl import QFFL

__all__ = ["AFL", "FCFL", "QFFL", "FedMinMax", "FedReg"]
