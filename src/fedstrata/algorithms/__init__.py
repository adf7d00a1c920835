"""All algorithms, one paper's method in one file. `known()` finds them by subclass."""

from fedstrata.algorithm import Algorithm
from fedstrata.algorithms.average import CentralSGD, FedAdam, FedAvg, FedOpt, FedProx, FedSGD, FedYogi, Scaffold
from fedstrata.algorithms.bilevel import AnchoredBiOAcc, FedBiO, FedBiOAcc, FedNest, LFedNest, TrackedBiO
from fedstrata.algorithms.fair import AFL, FCFL, QFFL, FedMinMax, FedReg
from fedstrata.algorithms.nested import (
    MFCGD,
    NLASG,
    SCSC,
    SMVR,
    AdaMFCGD,
    AnchoredDRSCGD,
    ComFedL,
    CompositionalFedNest,
    FedDRSCGD,
    LevelwiseDRSCGD,
    LevelwiseFedNest,
    LocalMOML,
    LocalSCGDM,
    NLASGAveraged,
    SeparateDRSCGD,
    TrackedAdaMFCGD,
    TrackedMFCGD,
    TrackedSCGD,
)
from fedstrata.algorithms.pairwise import CODASCA, SOX, CODAPlus, FedX1, FedX2, LocalPair, PairSGD, TrackedX
from fedstrata.algorithms.regularized import (
    FastFedDA,
    FedAvgLocalProx,
    FedAvgServerProx,
    FedCanon,
    FedDA,
    FedMid,
    FedNMap,
    ScaffoldServerProx,
    Zhang2024,
)

__all__ = [
    "AFL",
    "CODASCA",
    "FCFL",
    "MFCGD",
    "NLASG",
    "QFFL",
    "SCSC",
    "SMVR",
    "SOX",
    "AdaMFCGD",
    "AnchoredBiOAcc",
    "AnchoredDRSCGD",
    "CODAPlus",
    "CentralSGD",
    "ComFedL",
    "CompositionalFedNest",
    "FastFedDA",
    "FedAdam",
    "FedAvg",
    "FedAvgLocalProx",
    "FedAvgServerProx",
    "FedBiO",
    "FedBiOAcc",
    "FedCanon",
    "FedDA",
    "FedDRSCGD",
    "FedMid",
    "FedMinMax",
    "FedNMap",
    "FedNest",
    "FedOpt",
    "FedProx",
    "FedReg",
    "FedSGD",
    "FedX1",
    "FedX2",
    "FedYogi",
    "LFedNest",
    "LevelwiseDRSCGD",
    "LevelwiseFedNest",
    "LocalMOML",
    "LocalPair",
    "LocalSCGDM",
    "NLASGAveraged",
    "PairSGD",
    "Scaffold",
    "ScaffoldServerProx",
    "SeparateDRSCGD",
    "TrackedAdaMFCGD",
    "TrackedBiO",
    "TrackedMFCGD",
    "TrackedSCGD",
    "TrackedX",
    "Zhang2024",
    "known",
]


def known() -> dict[str, type[Algorithm]]:
    """Every algorithm of the library by name.

    >>> "FedAvg" in known()
    True
    """
    found: dict[str, type[Algorithm]] = {}
    todo: list[type[Algorithm]] = list(Algorithm.__subclasses__())
    while todo:
        cls = todo.pop()
        todo += cls.__subclasses__()
        if cls.__module__.startswith(__name__) and hasattr(cls, "State"):  # a method, not what several share
            found[cls.__name__] = cls
    return dict(sorted(found.items()))
