"""Bilevel problems: `fs.Bilevel`."""

from fedstrata.algorithms.bilevel.fedbio import FedBiO
from fedstrata.algorithms.bilevel.fedbioacc import AnchoredBiOAcc, FedBiOAcc
from fedstrata.algorithms.bilevel.fednest import FedNest, LFedNest
from fedstrata.algorithms.bilevel.tracked_bio import TrackedBiO

__all__ = ["AnchoredBiOAcc", "FedBiO", "FedBiOAcc", "FedNest", "LFedNest", "TrackedBiO"]
