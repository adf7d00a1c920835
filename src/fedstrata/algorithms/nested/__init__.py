"""Functions of expectations of functions: `fs.Nested` problems."""

from fedstrata.algorithms.nested.ada_mfcgd import AdaMFCGD, Coordinate, DiagonalRule, Norm, TrackedAdaMFCGD
from fedstrata.algorithms.nested.base import CouplingWarning
from fedstrata.algorithms.nested.comfedl import ComFedL
from fedstrata.algorithms.nested.fed_dr_scgd import AnchoredDRSCGD, FedDRSCGD, LevelwiseDRSCGD, SeparateDRSCGD
from fedstrata.algorithms.nested.fednest_compositional import CompositionalFedNest, LevelwiseFedNest
from fedstrata.algorithms.nested.local_moml import LocalMOML
from fedstrata.algorithms.nested.local_scgdm import LocalSCGDM
from fedstrata.algorithms.nested.mfcgd import MFCGD, TrackedMFCGD
from fedstrata.algorithms.nested.nlasg import NLASG, NLASGAveraged
from fedstrata.algorithms.nested.scsc import SCSC
from fedstrata.algorithms.nested.smvr import SMVR
from fedstrata.algorithms.nested.tracked_scgd import TrackedSCGD

__all__ = [
    "MFCGD",
    "NLASG",
    "SCSC",
    "SMVR",
    "AdaMFCGD",
    "AnchoredDRSCGD",
    "ComFedL",
    "CompositionalFedNest",
    "Coordinate",
    "CouplingWarning",
    "DiagonalRule",
    "FedDRSCGD",
    "LevelwiseDRSCGD",
    "LevelwiseFedNest",
    "LocalMOML",
    "LocalSCGDM",
    "NLASGAveraged",
    "Norm",
    "SeparateDRSCGD",
    "TrackedAdaMFCGD",
    "TrackedMFCGD",
    "TrackedSCGD",
]
