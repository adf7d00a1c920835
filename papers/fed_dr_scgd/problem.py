"""The portfolio problem with its smallest value. A separate file, so that the command line does not import it."""

import dataclasses
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array

from fedstrata.base.directions import Direction
from fedstrata.core.vector import Vector
from fedstrata.problems.compositions import risk_averse
from fedstrata.problems.nested import Nested
from fedstrata.prox import Simplex


class Holdings(eqx.Module):
    """The start point: equal shares of all assets."""

    portfolios: int = eqx.field(static=True)

    def init(self, key: Any) -> Array:
        return jnp.full(self.portfolios, 1 / self.portfolios)


class Portfolio(Nested):
    """A nested problem with its smallest value. It records the gap to that value, and eq. (13) itself.

    "gap" is that of the minimised objective, guards included. "printed" is λ times the deviation less the mean, without
    guards, as in the paper's plots.
    """

    best: Array | None = None  # an array, not a number: other data do not recompile

    def evaluate(self, x: Vector, full: Any, smooth: Any = None) -> dict[str, Array]:
        found = super().evaluate(x, full, smooth)
        mean, variance = self.values(x, full)[-2].tree
        risk: Any = self.levels[-1]
        printed = jnp.asarray(risk.risk_aversion, mean.dtype) * jnp.sqrt(variance) - mean
        return {**found, "gap": found["objective"] - jnp.asarray(self.best, mean.dtype), "printed": printed}

    def modes(self) -> dict[str, Direction]:
        return {**super().modes(), "gap": "min", "printed": "min"}


def portfolio(assets: int, best: float, risk_aversion: float, budget: bool, **guards: Any) -> Portfolio:
    """λ times the guarded deviation less the mean return, of `assets` assets; budget: on the simplex."""
    constraint = Simplex() if budget else None
    base = risk_averse(risk_aversion, regularizer=constraint, model=Holdings(assets), **guards)
    known = {f.name: getattr(base, f.name) for f in dataclasses.fields(base)}
    return Portfolio(**known, best=jnp.asarray(best))
