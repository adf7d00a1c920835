"""Bilevel problems: `fs.Bilevel`."""

from fedstrata.algorithms import public_classes

__getattr__ = public_classes(__name__)
