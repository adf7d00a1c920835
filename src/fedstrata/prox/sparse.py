"""Regularisers of single entries: the lasso and its relatives."""

import math

import jax.numpy as jnp
from jaxtyping import Array

from fedstrata.prox.base import Regularizer, number
from fedstrata.prox.trees import squared


class Zero(Regularizer):
    r"""No regulariser: $\varphi = 0$, so that a regularised method can run without one.

    >>> Zero().prox(jnp.array([1.0, -2.0]), 0.5).tolist()
    [1.0, -2.0]
    """

    def _value(self, x: Array) -> Array:
        return jnp.zeros((), x.dtype)

    def _prox(self, z: Array, step: Array) -> Array:
        return z

    def _distance(self, x: Array, g: Array) -> Array:
        return squared(g)


class L1(Regularizer):
    r"""The lasso $\nu |x|_1$: its prox moves every entry towards zero by γν and stops there (soft thresholding).

    $$ \mathrm{prox}(z) = \mathrm{sign}(z) \, (|z| - \gamma\nu)_+ $$

    Args:
        weight: ν, at least 0.

    >>> L1(2.0).prox(jnp.array([3.0, -0.5]), step=0.5).tolist()
    [2.0, 0.0]
    """

    weight: float = number(at_least=0)

    def _value(self, x: Array) -> Array:
        return self.weight * jnp.sum(jnp.abs(x))

    def _prox(self, z: Array, step: Array) -> Array:
        return soft(z, step * self.weight)

    def _distance(self, x: Array, g: Array) -> Array:
        return folded_distance(x, g, jnp.full_like(x, self.weight), self.weight)


class SquaredL2(Regularizer):
    r"""Weight decay $\nu |x|_2^2$ (no ½): its prox is $z / (1 + 2\gamma\nu)$.

    It can be added to any other regulariser.

    Args:
        weight: ν, at least 0.

    >>> L1(2.0) + SquaredL2(0.5)
    L1(weight=2.0) + SquaredL2(weight=0.5)
    """

    weight: float = number(at_least=0)

    def _value(self, x: Array) -> Array:
        return self.weight * squared(x)

    def _prox(self, z: Array, step: Array) -> Array:
        return z / (1 + 2 * self.weight * step)

    def _distance(self, x: Array, g: Array) -> Array:
        return squared(g + 2 * self.weight * x)


class ElasticNet(Regularizer):
    r"""The lasso with weight decay, $\nu_1 |x|_1 + \nu_2 |x|_2^2$ (no ½).

    $$ \mathrm{prox}(z) = \frac{\mathrm{sign}(z) \, (|z| - \gamma\nu_1)_+}{1 + 2\gamma\nu_2} $$

    Args:
        l1: ν₁, at least 0.
        l2: ν₂, at least 0.

    >>> ElasticNet(l1=2.0, l2=0.5).prox(jnp.array([4.0, -0.5]), step=1.0).tolist()
    [1.0, 0.0]

    Reference: zou2005.
    """

    l1: float = number(at_least=0)
    l2: float = number(at_least=0)

    def _value(self, x: Array) -> Array:
        return self.l1 * jnp.sum(jnp.abs(x)) + self.l2 * squared(x)

    def _prox(self, z: Array, step: Array) -> Array:
        return soft(z, step * self.l1) / (1 + 2 * self.l2 * step)

    def _distance(self, x: Array, g: Array) -> Array:
        return folded_distance(x, g, self.l1 + 2 * self.l2 * jnp.abs(x), self.l1)


class L0(Regularizer):
    r"""The number of nonzero entries, $\nu |x|_0$: its prox keeps what exceeds $\sqrt{2\gamma\nu}$ and drops the rest.

    Not weakly convex for any ρ (`rho` is infinite), so the theory of regularised methods does not apply. The prox is
    this formula for every step; an entry exactly at the threshold has two minimisers and becomes zero. `distance` uses
    the limiting subdifferential: {0} where x ≠ 0, every number where x = 0.

    Args:
        weight: ν, above 0.

    >>> L0(0.5).prox(jnp.array([3.0, -0.5]), step=1.0).tolist()
    [3.0, 0.0]
    """

    weight: float = number(above=0)

    @property
    def rho(self) -> float:
        return math.inf

    def _value(self, x: Array) -> Array:
        return self.weight * jnp.sum((x != 0).astype(x.dtype))

    def _prox(self, z: Array, step: Array) -> Array:
        return jnp.where(jnp.abs(z) > jnp.sqrt(2 * self.weight * step), z, 0)

    def _distance(self, x: Array, g: Array) -> Array:
        return squared(jnp.where(x != 0, g, 0))


def soft(z: Array, threshold: Array) -> Array:
    """sign(z) (|z| − threshold)₊, written so that small entries become exactly zero."""
    return z - jnp.clip(z, -threshold, threshold)


def folded_distance(x: Array, g: Array, slope: Array, kink: float) -> Array:
    """The squared distance for φ(x) = Σ p(|x_i|): `slope` is p'(|x|), `kink` is p'(0), the half-width of ∂φ at 0."""
    there = g + jnp.sign(x) * slope
    at_zero = jnp.maximum(jnp.abs(g) - kink, 0)
    return squared(jnp.where(x != 0, there, at_zero))
