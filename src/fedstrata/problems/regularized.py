"""Regularised federated learning: the average of local losses plus a term that need not be smooth."""

from collections.abc import Mapping
from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array

from fedstrata.core.vector import Vector
from fedstrata.problems.average import Loss, LossOracle, LossProblem
from fedstrata.problems.base import CompositeOracle, Full
from fedstrata.problems.composite import CompositeProblem, plus
from fedstrata.prox import Regularizer, hoyer, zeros


class RegularizedOracle(LossOracle, CompositeOracle):
    """The oracle of `Regularized`."""


class Regularized(LossProblem, CompositeProblem):
    r"""$\min_x f(x) + \varphi(x)$: an average of local losses plus a regulariser or a constraint of `fs.prox`.

    Recorded: objective (f + φ), loss (f), regularizer (φ), stationarity, subdifferential_distance (where φ has a
    closed form for it), hoyer and zeros (of all parameters).

    Args:
        loss: `loss(params, example) -> scalar`, for one example; f is its mean, as in `Average`.
        regularizer: φ, convex or weakly convex, or the indicator of a set.
        metrics: more functions like the loss, averaged; `fs.Metric(function, "max")` declares that high values are
            better.
        gamma: the γ of the recorded stationarity $\|F_{nat}^\gamma(x)\|$; independent of any γ of a method.
        more_gammas: further values, recorded as stationarity_γ.

    >>> import fedstrata as fs
    >>> problem = Regularized(lambda w, example: 0.5 * (w @ example["x"] - example["y"]) ** 2, fs.prox.L1(0.1))
    """

    regularizer: Regularizer
    metrics: Mapping[str, Loss] = eqx.field(default_factory=dict)
    gamma: float = 1.0
    more_gammas: tuple[float, ...] = ()
    Oracle: ClassVar[type] = RegularizedOracle

    def smooth_part(self, x: Vector, full: Full) -> Array:
        return self.mean_loss(x, full)

    def evaluate(self, x: Vector, full: Full, smooth: tuple[Array, Vector] | None = None) -> dict[str, Array]:
        shape = {"hoyer": hoyer(x), "zeros": zeros(x).astype(x.scalar_dtype)}
        return {**CompositeProblem.evaluate(self, x, full, smooth), **shape, **self.measured(x, full["train"])}

    def from_clients(self, x: Vector, values: Array, weights: Array) -> Array | None:
        """The mean of the clients' losses, and φ once."""
        return plus(jnp.sum(weights * values), self.regularizer.value(x))

    def check(self, x: Vector, federation: Any) -> None:
        LossProblem.check(self, x, federation)
        CompositeProblem.check(self, x, federation)
