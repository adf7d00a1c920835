"""A smooth average plus a regulariser or constraint: `fs.Regularized` problems."""

from fedstrata.algorithms import public_classes

__getattr__ = public_classes(__name__)
