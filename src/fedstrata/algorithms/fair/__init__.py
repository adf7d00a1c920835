"""Fairness between groups and between clients: `fs.Fair` problems."""

from fedstrata.algorithms import public_classes

__getattr__ = public_classes(__name__)
