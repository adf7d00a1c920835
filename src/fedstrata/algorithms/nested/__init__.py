"""Functions of expectations of functions: `fs.Nested` problems."""

from fedstrata.algorithms import public_classes

__getattr__ = public_classes(__name__)
