"""Regularisers of a matrix's singular values: low rank."""

import math
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array

from fedstrata.prox.base import Regularizer, number
from fedstrata.prox.trees import Leaves, squared, total

_REMEDY = "choose the leaves of two or more dimensions with .on(prox.kernels)"


class _Spectral(Regularizer):
    """Leaves as matrices (first axis × the rest)."""

    weight: float

    def _check_leaf(self, name: str, leaf: Any) -> None:
        if leaf.ndim < 2:
            raise ValueError(f"{self!r}: leaf {name!r} of shape {leaf.shape} is not a matrix; {_REMEDY}")

    def _distance_on(self, leaves: Leaves, gradients: Leaves) -> Array:
        triples = zip(self._blocks(leaves), self._blocks(gradients), self._eps(leaves), strict=True)
        return total([self._matrix_distance(_matrix(x), _matrix(g.astype(x.dtype)), eps) for x, g, eps in triples])

    def _matrix_distance(self, x: Array, g: Array, eps: float) -> Array:
        raise NotImplementedError


class NuclearNorm(_Spectral):
    r"""The sum of singular values, $\nu |X|_*$: its prox lowers each by γν and stops at zero.

    $$ \mathrm{prox}(Z) = U \, (\Sigma - \gamma\nu)_+ V^\top \quad \text{for } Z = U \Sigma V^\top, \qquad
       \partial |X|_* = \{ U_r V_r^\top + W : U_r^\top W = 0, \; W V_r = 0, \; |W|_2 \le 1 \} $$

    A leaf of more than two dimensions is the matrix (first axis × the rest); a vector raises. `distance` needs the
    rank r: a singular value counts as zero if, relative to the largest, it is at most √min(shape) rounding errors of
    the leaf's dtype plus 4 max(shape) of the arithmetic's (float32 or wider). Derivatives through the prox
    stay finite at equal or vanishing singular values.

    Args:
        weight: ν, at least 0.

    >>> NuclearNorm(1.0).prox(jnp.array([[3.0, 0.0], [0.0, 0.5]]), step=1.0).round(6).tolist()
    [[2.0, 0.0], [0.0, 0.0]]
    """

    weight: float = number(at_least=0)

    def _value(self, x: Array) -> Array:
        return self.weight * jnp.sum(jnp.linalg.svd(_matrix(x), compute_uv=False))

    def _prox(self, z: Array, step: Array) -> Array:
        new = _thresholded("soft", _matrix(z), self.weight * step).reshape(z.shape)
        return jnp.where(step > 0, new, z)

    def _matrix_distance(self, x: Array, g: Array, eps: float) -> Array:
        polar, tangent, normal = _parts(x, g, eps)
        rest = jnp.linalg.svd(normal, compute_uv=False)
        return squared(tangent + self.weight * polar) + squared(jnp.maximum(rest - self.weight, 0))


class Rank(_Spectral):
    r"""The rank, $\nu \, \mathrm{rank}(X)$: its prox drops singular values of at most $\sqrt{2\gamma\nu}$.

    Not weakly convex for any ρ (`rho` is infinite), so the theory of regularised methods does not apply. The prox is
    this formula for every step; a singular value exactly at the threshold has two minimisers and is dropped. `distance`
    uses the limiting subdifferential, all W with $U_r^\top W = 0$ and $W V_r = 0$. Leaves and
    the meaning of zero are as in `NuclearNorm`.

    Args:
        weight: ν, above 0.

    >>> Rank(0.5).prox(jnp.array([[3.0, 0.0], [0.0, 0.5]]), step=1.0).round(6).tolist()
    [[3.0, 0.0], [0.0, 0.0]]
    """

    weight: float = number(above=0)

    @property
    def rho(self) -> float:
        return math.inf

    def _value_on(self, leaves: Leaves) -> Array:
        blocks = zip(self._blocks(leaves), self._eps(leaves), strict=True)
        values = [(jnp.linalg.svd(_matrix(x), compute_uv=False), _matrix(x), eps) for x, eps in blocks]
        kept = [jnp.sum(_nonzero(s, x, eps).astype(x.dtype)) for s, x, eps in values]
        return self.weight * total(kept)

    def _prox(self, z: Array, step: Array) -> Array:
        new = _thresholded("hard", _matrix(z), jnp.sqrt(2 * self.weight * step)).reshape(z.shape)
        return jnp.where(step > 0, new, z)

    def _matrix_distance(self, x: Array, g: Array, eps: float) -> Array:
        return squared(_parts(x, g, eps)[1])


def _matrix(x: Array) -> Array:
    return x.reshape(x.shape[0], -1)


def _nonzero(values: Array, x: Array, eps: float) -> Array:
    """Which singular values (largest first) exceed the rounding of the entries and of the arithmetic."""
    rounding = math.sqrt(min(x.shape)) * eps + 4 * max(x.shape) * float(jnp.finfo(x.dtype).eps)
    return values > rounding * values[:1]


def _parts(x: Array, g: Array, eps: float) -> tuple[Array, Array, Array]:
    """U_r V_rᵀ of x, and g split into its parts tangent and normal to the matrices of x's rank."""
    u, values, vt = jnp.linalg.svd(x, full_matrices=False)
    kept = _nonzero(values, x, eps).astype(x.dtype)
    u, vt = u * kept[None, :], vt * kept[:, None]
    normal = g - u @ (u.T @ g)
    normal = normal - (normal @ vt.T) @ vt
    return u @ vt, g - normal, normal


def _filter(kind: Literal["soft", "hard"], values: Array, threshold: Array) -> Array:
    return jnp.where(values > threshold, values - threshold if kind == "soft" else values, 0)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _thresholded(kind: Literal["soft", "hard"], z: Array, threshold: Array) -> Array:
    u, values, vt = jnp.linalg.svd(z, full_matrices=False)
    return (u * _filter(kind, values, threshold)[None, :]) @ vt


@_thresholded.defjvp
def _thresholded_jvp(kind: Literal["soft", "hard"], primals: Any, tangents: Any) -> tuple[Array, Array]:
    """The derivative by divided differences of the filter: it exists at equal singular values, the SVD's does not."""
    (z, threshold), (dz, dthreshold) = primals, tangents
    u, values, vt = jnp.linalg.svd(z, full_matrices=False)
    new, kept = _filter(kind, values, threshold), values > threshold
    down, across = lambda v: v[:, None], lambda v: v[None, :]
    ratio = lambda a, b: jnp.where(b != 0, a / jnp.where(b != 0, b, 1), 0)
    # Both kept: the filter moves them alike, slope 1; written out, since the quotient of nearly equal values is noise.
    difference = ratio(down(new) - across(new), down(values) - across(values))
    slope = jnp.where(down(kept) & across(kept), 1, jnp.where(down(kept) ^ across(kept), difference, 0))
    mean = ratio(down(new) + across(new), down(values) + across(values))
    core = u.T @ dz @ vt.T
    moved = slope * (core + core.T) / 2 + mean * (core - core.T) / 2
    if kind == "soft":
        moved = moved - jnp.diag(jnp.where(kept, dthreshold, 0))
    gain = ratio(new, values)
    beyond_columns = ((dz @ vt.T - u @ core) * across(gain)) @ vt
    beyond_rows = (u * across(gain)) @ (u.T @ dz - core @ vt)
    return (u * across(new)) @ vt, u @ moved @ vt + beyond_columns + beyond_rows
