"""Base class of problems with a smooth part and a regulariser: the prox and the stationarity measures."""

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from fedstrata.core.vector import Vector
from fedstrata.problems.base import Full, Problem
from fedstrata.prox import Regularizer


class CompositeProblem(Problem):
    """min f(x) + φ(x). Subclasses declare the fields `regularizer`, `gamma` and `more_gammas`, and the smooth part."""

    if TYPE_CHECKING:  # at run time these are fields of the subclasses

        def __getattr__(self, name: str) -> Any: ...

    def __check_init__(self) -> None:
        who = type(self).__name__
        if not isinstance(self.regularizer, Regularizer):
            raise TypeError(
                f"{who}: regularizer={self.regularizer!r} is not one of fs.prox; give e.g. fs.prox.L1(0.01), or "
                "subclass fs.prox.Regularizer (for none, fs.prox.Zero())"
            )
        for gamma in (self.gamma, *self.more_gammas):
            if not gamma > 0:
                raise ValueError(f"{who}: gamma={gamma!r}, the step of the stationarity measure, must be > 0")
            self.regularizer.check_step(gamma)

    @abstractmethod
    def smooth_part(self, x: Vector, full: Full) -> Array:
        """f(x), on all data."""

    def prox(self, z: Vector, step: Any) -> Vector:
        """The minimiser of φ(x) + |x − z|² / (2 step)."""
        return self.regularizer.prox(z, step)

    def objective(self, x: Vector, full: Full) -> Array:
        return plus(self.smooth_part(x, full), self.regularizer.value(x))

    def smooth(self, x: Vector, full: Full) -> tuple[Array, Vector]:
        """f and ∇f, without φ."""
        return jax.value_and_grad(self.smooth_part)(x, full)

    def natural_residual(self, x: Vector, full: Full, gamma: Any = None) -> Vector:
        r"""$F_{nat}^\gamma(x) = (x - \mathrm{prox}_{\gamma\varphi}(x - \gamma \nabla f(x))) / \gamma$."""
        return self.residual(x, self.gradient(x, full), self.gamma if gamma is None else gamma)

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
        return self.residual(x, self.gradient(x, full) if gradient is None else gradient, self.gamma).norm()

    def residual(self, x: Vector, gradient: Vector, gamma: Any) -> Vector:
        return (x - self.prox(x - gamma * gradient, gamma)) / gamma

    def evaluate(self, x: Vector, full: Full, smooth: tuple[Array, Vector] | None = None) -> dict[str, Array]:
        loss = self.smooth_part(x, full) if smooth is None else smooth[0]
        penalty = self.regularizer.value(x)
        out = {"objective": plus(loss, penalty)}
        if smooth is not None:
            out["stationarity"] = self.stationarity(x, full, smooth[1])
            out |= {f"stationarity_{g:g}": self.residual(x, smooth[1], g).norm() for g in self.more_gammas}
            if self.regularizer.has_distance:
                out["subdifferential_distance"] = self.regularizer.distance(x, smooth[1])
        return {**out, "loss": loss, "regularizer": penalty}

    def check(self, x: Vector, federation: Any) -> None:
        self.regularizer.check(x)
        start = self.prox(x, self.gamma)
        if not all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(start)):
            raise ValueError(
                f"{type(self).__name__}: the prox of {self.regularizer!r} is not finite at the start values (step "
                f"{self.gamma}); a regulariser must map finite parameters to finite ones"
            )


def plus(loss: Array, penalty: Array) -> Array:
    return loss + penalty.astype(loss.dtype)
