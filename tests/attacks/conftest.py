"""Fixtures of the attacks: the grid of Flower in this process, and a run in the middle of which a server attacks."""

from importlib.util import find_spec

if find_spec("flwr") is not None:  # without Flower, the tests that need these are skipped
    from attackers import attacker, begun, begun_once, expected, refuses, worked
    from grids import grid, hurry

    __all__ = ["attacker", "begun", "begun_once", "expected", "grid", "hurry", "refuses", "worked"]
