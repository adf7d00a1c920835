"""Constraint sets: φ is 0 inside and infinite outside, and the prox is the projection, whatever the step."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from fedstrata.prox.base import Regularizer, number, plain
from fedstrata.prox.trees import Leaves, root, squared, total, unit

# How many rounding errors a point may be off a set and still belong to it.
_ROUNDINGS = 4


class ConstraintSet(Regularizer):
    r"""The indicator of a closed convex set C; $\partial\varphi$ is its normal cone.

    `distance` is the distance of −g to the normal cone, by Moreau the length of −g projected onto the tangent cone.
    "Inside" and "on the boundary" hold within a few rounding errors of the dtype. Subclasses define `_prox` (the
    projection), `_inside(x, eps)` and `_normal_distance(x, d, eps)`, the distance squared from d to the normal cone.
    """

    def _inside(self, x: Array, eps: float) -> Array:
        raise NotImplementedError

    def _normal_distance(self, x: Array, d: Array, eps: float) -> Array:
        raise NotImplementedError

    def _value_on(self, leaves: Leaves) -> Array:
        pairs = zip(self._blocks(leaves), self._eps(leaves), strict=True)
        return total([jnp.where(self._inside(x, eps), 0, math.inf).astype(x.dtype) for x, eps in pairs])

    def _distance_on(self, leaves: Leaves, gradients: Leaves) -> Array:
        triples = zip(self._blocks(leaves), self._blocks(gradients), self._eps(leaves), strict=True)
        parts = [(self._inside(x, e), self._normal_distance(x, -g.astype(x.dtype), e)) for x, g, e in triples]
        return total([jnp.where(inside, length, math.inf) for inside, length in parts])


class _Interval(ConstraintSet):
    """Every entry between two bounds."""

    @property
    def bounds(self) -> tuple[float, float]:
        raise NotImplementedError

    def _prox(self, z: Array, step: Array) -> Array:
        return jnp.clip(z, *self.bounds)

    def _inside(self, x: Array, eps: float) -> Array:
        (low, high), near = self.bounds, self._near(x, eps)
        return jnp.all((x >= low - near) & (x <= high + near))

    def _normal_distance(self, x: Array, d: Array, eps: float) -> Array:
        (low, high), near = self.bounds, self._near(x, eps)
        d = jnp.where(x <= low + near, jnp.maximum(d, 0), d)
        return squared(jnp.where(x >= high - near, jnp.minimum(d, 0), d))

    def _near(self, x: Array, eps: float) -> Array:
        bound = max(abs(b) for b in (*self.bounds, 0.0) if math.isfinite(b))
        return _ROUNDINGS * eps * jnp.maximum(_largest(x), bound)


class Box(_Interval):
    r"""$\{ x : \text{low} \le x_i \le \text{high} \}$; a bound may be infinite. The projection clips.

    Args:
        low: the lower bound.
        high: the upper bound, at least `low`.

    >>> Box(-1, 1).prox(jnp.array([3.0, -0.5]), step=1.0).tolist()
    [1.0, -0.5]
    """

    low: float = eqx.field(static=True, converter=plain)
    high: float = eqx.field(static=True, converter=plain)

    def __check_init__(self) -> None:
        for name, bound in (("low", self.low), ("high", self.high)):
            if not isinstance(bound, float):
                raise TypeError(f"Box: {name} = {bound!r} must be a number")
        if not (self.low <= self.high and self.low < math.inf and self.high > -math.inf):
            raise ValueError(f"Box: low = {self.low:g} and high = {self.high:g} hold no number; low <= high is needed")

    @property
    def bounds(self) -> tuple[float, float]:
        return self.low, self.high


class NonNegative(_Interval):
    r"""$\{ x : x_i \ge 0 \}$: the projection is $\max(z, 0)$.

    >>> NonNegative().prox(jnp.array([3.0, -0.5]), step=1.0).tolist()
    [3.0, 0.0]
    """

    @property
    def bounds(self) -> tuple[float, float]:
        return 0.0, math.inf


class LInfBall(_Interval):
    r"""$\{ x : \max_i |x_i| \le r \}$: the projection clips to $[-r, r]$.

    Args:
        radius: r, above 0.

    >>> float(LInfBall(2.0).value(jnp.array([3.0, -0.5])))
    inf
    """

    radius: float = number(above=0)

    @property
    def bounds(self) -> tuple[float, float]:
        return -self.radius, self.radius


class L2Ball(ConstraintSet):
    r"""$\{ x : |x|_2 \le r \}$ over all leaves together: the projection is $z \cdot \min(1, r / |z|_2)$.

    Args:
        radius: r, above 0.

    >>> L2Ball(5.0).prox({"w": jnp.array([6.0]), "b": jnp.array([8.0])}, step=1.0)["w"].tolist()
    [3.0]
    """

    radius: float = number(above=0)
    joint = True

    def _prox(self, z: Array, step: Array) -> Array:
        scaled, norm, radius = self._scaled(z)
        outside = norm > radius
        return jnp.where(outside, scaled * (self.radius / jnp.where(outside, norm, 1)), z)

    def _inside(self, x: Array, eps: float) -> Array:
        _, norm, radius = self._scaled(x)
        return norm <= radius * (1 + _slack(x, eps))

    def _normal_distance(self, x: Array, d: Array, eps: float) -> Array:
        x, norm, radius = self._scaled(x)
        outward = jnp.where(norm >= radius * (1 - _slack(x, eps)), jnp.maximum(jnp.sum(d * x), 0), 0)
        return squared(d - outward * x / jnp.maximum(norm, radius / 2) ** 2)

    def _scaled(self, x: Array) -> tuple[Array, Array, Array]:
        """x, its norm and the radius in units in which squares neither overflow nor underflow."""
        by = unit(x)
        return (scaled := x / by), root(squared(scaled)), self.radius / by


class Simplex(ConstraintSet):
    r"""$\{ x : x_i \ge 0, \sum_i x_i = s \}$ over all leaves together; with total s = 1, the probabilities.

    The projection is $(z - t)_+$ with the level t at which the entries sum to s.

    Args:
        total: s, above 0.

    >>> Simplex().prox(jnp.array([0.75, 1.25, -3.0]), step=1.0).tolist()
    [0.25, 0.75, 0.0]
    """

    total: float = number(1.0, above=0)
    joint = True

    def _prox(self, z: Array, step: Array) -> Array:
        return _onto_simplex(z, self.total)

    def _inside(self, x: Array, eps: float) -> Array:
        scale = jnp.maximum(_largest(x), self.total)
        whole = jnp.abs(jnp.sum(x) - self.total) <= _slack(x, eps) * scale
        return whole & jnp.all(x >= -_ROUNDINGS * eps * scale)

    def _normal_distance(self, x: Array, d: Array, eps: float) -> Array:
        # The normal cone: equal to some μ where x > 0, at most μ where x = 0.
        positive = x > _ROUNDINGS * eps * _largest(x)
        level = _water_level(d, ~positive, _count(positive, x), -jnp.sum(jnp.where(positive, d, 0)))
        return squared(jnp.where(positive, d - level, jnp.maximum(d - level, 0)))


class L1Ball(ConstraintSet):
    r"""$\{ x : |x|_1 \le r \}$ over all leaves together.

    From outside, the projection is soft thresholding at the level that brings the norm down to r.

    Args:
        radius: r, above 0.

    >>> L1Ball(1.0).prox(jnp.array([1.25, -0.75, 0.1]), step=1.0).tolist()
    [0.75, -0.25, 0.0]
    """

    radius: float = number(above=0)
    joint = True

    def _prox(self, z: Array, step: Array) -> Array:
        onto = jnp.sign(z) * _onto_simplex(jnp.abs(z), self.radius)
        return jnp.where(jnp.sum(jnp.abs(z)) > self.radius, onto, z)

    def _inside(self, x: Array, eps: float) -> Array:
        return jnp.sum(jnp.abs(x)) <= self.radius * (1 + _slack(x, eps))

    def _normal_distance(self, x: Array, d: Array, eps: float) -> Array:
        # On the boundary, the normal cone: μ sign(x) where x ≠ 0, at most μ in size where x = 0, for some μ ≥ 0.
        boundary = jnp.sum(jnp.abs(x)) >= self.radius * (1 - _slack(x, eps))
        nonzero = jnp.abs(x) > _ROUNDINGS * eps * _largest(x)
        along = jnp.where(nonzero, jnp.sign(x) * d, 0)
        level = _water_level(jnp.abs(d), ~nonzero, _count(nonzero, x), -jnp.sum(along))
        level = jnp.where(boundary, jnp.maximum(level, 0), 0)
        return squared(jnp.where(nonzero, d - level * jnp.sign(x), jnp.maximum(jnp.abs(d) - level, 0)))


def _onto_simplex(v: Array, total: float) -> Array:
    # Only differences between entries matter; from the largest down, they keep their digits.
    v = v - jnp.max(v)
    everyone = jnp.ones_like(v, bool)
    return jnp.maximum(v - _water_level(v, everyone, jnp.zeros((), v.dtype), jnp.full((), total, v.dtype)), 0)


def _water_level(v: Array, among: Array, k: Array, a: Array) -> Array:
    r"""The t that solves $k t + a = \sum_{i \in \text{among}} (v_i - t)_+$, exactly, by sorting.

    If the j largest entries stand above t, then $t = (v_{(1)} + … + v_{(j)} - a) / (k + j)$; j is the last for which
    the j-th entry does stand above.
    """
    falling = -jnp.sort(-jax.lax.stop_gradient(jnp.where(among, v, -math.inf)))
    many = k + jnp.arange(1, v.size + 1, dtype=v.dtype)
    above = falling > (jnp.cumsum(falling) - jax.lax.stop_gradient(a)) / many
    lowest = jnp.min(jnp.where(above, falling, math.inf), initial=math.inf)
    # Summed again over those above: one rounding instead of a running sum's, and a formula to differentiate.
    members = among & (v >= lowest)
    return (jnp.sum(jnp.where(members, v, 0)) - a) / jnp.maximum(k + _count(members, v), 1)


def _count(mask: Array, like: Array) -> Array:
    return jnp.sum(mask.astype(like.dtype))


def _largest(x: Array) -> Array:
    return jnp.max(jnp.abs(x), initial=0)


def _slack(x: Array, eps: float) -> float:
    """The relative rounding error of a sum over x: of the stored entries, and of adding them up."""
    return _ROUNDINGS * (eps + math.sqrt(x.size) * float(jnp.finfo(x.dtype).eps))
