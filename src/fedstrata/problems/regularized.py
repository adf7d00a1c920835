"""Regularised federated learning: the average of local losses plus a term that need not be smooth."""

from collections.abc import Mapping
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from fedstrata.problems.average import Loss, LossOracle, LossProblem
from fedstrata.problems.base import CompositeOracle, Full
from fedstrata.prox import Regularizer, hoyer, zeros
from fedstrata.vector import Vector


class RegularizedOracle(LossOracle, CompositeOracle):
    pass


class Regularized(LossProblem):
    r"""$\min_x f(x) + \varphi(x)$: an average of local losses plus a regulariser or a constraint of `fs.prox`.

    loss: `loss(params, example) -> scalar`, for one example; f is its mean, as in `Average`. regularizer: φ, convex or
    weakly convex, or the indicator of a set. metrics: more functions like the loss, averaged the same way.
    gamma: the γ of the recorded stationarity $\|F_{nat}^\gamma(x)\|$, which has nothing to do with a method's own.
    more_gammas: further ones, recorded as stationarity_γ.

    Recorded: objective (f + φ), loss (f), regularizer (φ), stationarity, subdifferential_distance (where φ has a
    closed form for it), hoyer and zeros (of all parameters).

    >>> import fedstrata as fs
    >>> problem = Regularized(lambda w, example: 0.5 * (w @ example["x"] - example["y"]) ** 2, fs.prox.L1(0.1))
    """

    regularizer: Regularizer
    metrics: Mapping[str, Loss] = eqx.field(default_factory=dict)
    gamma: float = 1.0
    more_gammas: tuple[float, ...] = ()
    Oracle: ClassVar[type] = RegularizedOracle

    def __check_init__(self) -> None:
        if not isinstance(self.regularizer, Regularizer):
            raise TypeError(
                f"Regularized: regularizer={self.regularizer!r} is not one of fs.prox; give say fs.prox.L1(0.01), or "
                "subclass fs.prox.Regularizer (for none, use fs.Average)"
            )
        for gamma in (self.gamma, *self.more_gammas):
            if not gamma > 0:
                raise ValueError(f"Regularized: gamma={gamma!r}, the step of the stationarity measure, must be > 0")
            self.regularizer.check_step(gamma)

    def prox(self, z: Vector, step: Any) -> Vector:
        return self.regularizer.prox(z, step)

    def objective(self, x: Vector, full: Full) -> Array:
        return _plus(self.mean_loss(x, full), self.regularizer.value(x))

    def smooth(self, x: Vector, full: Full) -> tuple[Array, Vector]:
        """f and ∇f, without φ."""
        return jax.value_and_grad(self.mean_loss)(x, full)

    def natural_residual(self, x: Vector, full: Full, gamma: Any = None) -> Vector:
        r"""$F_{nat}^\gamma(x) = (x - \mathrm{prox}_{\gamma\varphi}(x - \gamma \nabla f(x))) / \gamma$"""
        return self._residual(x, self.gradient(x, full), self.gamma if gamma is None else gamma)

    def normal_map(self, z: Vector, full: Full, gamma: Any = None) -> Vector:
        r"""$F_{nor}^\gamma(z) = \nabla f(x) + (z - x) / \gamma$ at $x = \mathrm{prox}_{\gamma\varphi}(z)$."""
        gamma = self.gamma if gamma is None else gamma
        x = self.prox(z, gamma)
        return self.gradient(x, full) + (z - x) / gamma

    def subdifferential_distance(self, x: Vector, full: Full) -> Array:
        """dist(0, ∇f(x) + ∂φ(x)), where φ has a closed form for it."""
        return self.regularizer.distance(x, self.gradient(x, full))

    def stationarity(self, x: Vector, full: Full, gradient: Vector | None = None) -> Array:
        """The norm of the natural residual: zero exactly at stationary points, and continuous in x."""
        return self._residual(x, self.gradient(x, full) if gradient is None else gradient, self.gamma).norm()

    def _residual(self, x: Vector, gradient: Vector, gamma: Any) -> Vector:
        return (x - self.prox(x - gamma * gradient, gamma)) / gamma

    def evaluate(self, x: Vector, full: Full, smooth: tuple[Array, Vector] | None = None) -> dict[str, Array]:
        loss = self.mean_loss(x, full) if smooth is None else smooth[0]
        penalty = self.regularizer.value(x)
        out = {"objective": _plus(loss, penalty)}
        if smooth is not None:
            out["stationarity"] = self.stationarity(x, full, smooth[1])
            out |= {f"stationarity_{g:g}": self._residual(x, smooth[1], g).norm() for g in self.more_gammas}
            if self.regularizer.has_distance:
                out["subdifferential_distance"] = self.regularizer.distance(x, smooth[1])
        shape = {"hoyer": hoyer(x), "zeros": zeros(x).astype(x.scalar_dtype)}
        return {**out, "loss": loss, "regularizer": penalty, **shape, **self.measured(x, full["train"])}

    def check(self, x: Vector, federation: Any) -> None:
        super().check(x, federation)
        self.regularizer.check(x)
        start = self.prox(x, self.gamma)
        if not all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(start)):
            raise ValueError(
                f"Regularized: the prox of {self.regularizer!r} is not finite at the start values (step {self.gamma}); "
                "a regulariser must map finite parameters to finite ones"
            )


def _plus(loss: Array, penalty: Array) -> Array:
    return loss + penalty.astype(loss.dtype)
