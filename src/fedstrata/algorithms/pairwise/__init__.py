"""AUC, partial AUC and average precision: `fs.Pairwise` problems."""

from fedstrata.algorithms import public_classes

__getattr__ = public_classes(__name__)
