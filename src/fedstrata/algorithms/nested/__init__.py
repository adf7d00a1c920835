"""Functions of expectations of functions: `fs.Nested` problems."""

from fedstrata.algorithms.nested.base import CouplingWarning
from fedstrata.algorithms.nested.fed_dr_scgd import AnchoredDRSCGD, FedDRSCGD, LevelwiseDRSCGD, SeparateDRSCGD
from fedstrata.algorithms.nested.tracked_scgd import TrackedSCGD

__all__ = [
    "AnchoredDRSCGD",
    "CouplingWarning",
    "FedDRSCGD",
    "LevelwiseDRSCGD",
    "SeparateDRSCGD",
    "TrackedSCGD",
]
